"""Tokens to train on without a download: by default the Python standard library's own sources on this machine."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Corpus:
    """A token array with its story.

    Attributes:
        tokens: [N] uint16 or uint32.
        vocabulary: number of token ids.
        provenance: source, files (relative names with sizes), sha256 of all text, tokenizer.
    """

    tokens: np.ndarray
    vocabulary: int
    provenance: dict[str, Any] = field(repr=False)


def standard_library() -> list[Path]:
    """Return the standard library's ``.py`` sources in a fixed order, site-packages and tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
    return [p for p in sorted(root.rglob("*.py")) if not skip & set(p.relative_to(root).parts)]


def load_corpus(source: str | Path | np.ndarray = "stdlib", *, vocabulary: int = 256) -> Corpus:
    """Return tokens from the standard library's sources, a folder of text, or a token array.

    Args:
        source: ``"stdlib"``; a folder (every ``.py``, ``.md``, ``.txt``, ``.rst`` below it); a ``.npy`` file of
            non-negative integers; or such an array.
        vocabulary: 256 for bytes; more trains a byte-level BPE of that many tokens on the text itself.
    Raises:
        FileNotFoundError: the folder or file is not there, or holds no text.
        ValueError: the vocabulary is too small, or the array is not one-dimensional, not integer, or its ids exceed it.
    """
    if isinstance(source, np.ndarray) or str(source).endswith(".npy"):
        # allow_pickle stays off: an object array would run code.
        if vocabulary < 2:
            raise ValueError(f"vocabulary: expected at least 2 token ids, got {vocabulary}")
        array = source if isinstance(source, np.ndarray) else np.load(source, allow_pickle=False)
        return _from_array(array, vocabulary)
    if vocabulary < 256:
        raise ValueError(f"vocabulary: expected 256 (bytes) or more (byte-level BPE) for text, got {vocabulary}")
    if str(source) == "stdlib":
        files, root = standard_library(), Path(sysconfig.get_paths()["stdlib"])
    else:
        root = Path(source)
        if not root.is_dir():
            raise FileNotFoundError(
                f"corpus folder {str(source)!r} does not exist; expected 'stdlib', a folder or a .npy file"
            )
        files = [p for p in sorted(root.rglob("*")) if p.suffix in {".py", ".md", ".txt", ".rst"} and p.is_file()]
    texts = [p.read_bytes() for p in files]
    if not sum(map(len, texts)):
        raise FileNotFoundError(f"corpus {str(source)!r} holds no text (.py, .md, .txt, .rst)")
    digest = hashlib.sha256(b"\0".join(texts)).hexdigest()
    provenance: dict[str, Any] = {
        "source": "Python standard library" if str(source) == "stdlib" else "folder of text",
        "files": {str(p.relative_to(root)): len(t) for p, t in zip(files, texts)},
        "bytes": sum(map(len, texts)),
        "sha256": digest,
    }
    if vocabulary == 256:
        tokens = np.frombuffer(b"\n\n".join(texts), dtype=np.uint8).astype(np.uint16)
        return Corpus(tokens, 256, provenance | {"tokenizer": "bytes"})
    tokens, size = _bpe([t.decode("utf-8", errors="replace") for t in texts], vocabulary)
    return Corpus(tokens, size, provenance | {"tokenizer": f"byte-level BPE of {size} tokens trained on the text"})


def _from_array(array: np.ndarray, vocabulary: int) -> Corpus:
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token array: expected one dimension of integers, got shape {array.shape} of {array.dtype}")
    if array.size == 0 or int(array.min()) < 0 or int(array.max()) >= vocabulary:
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        raise ValueError(
            f"token array: expected ids 0 to {vocabulary - 1} (vocabulary), got {low} to {high}, {array.size} tokens"
        )
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    dtype = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    return Corpus(
        array.astype(dtype), vocabulary, {"source": "token array", "tokens": int(array.size), "sha256": digest}
    )


def _bpe(texts: list[str], vocabulary: int) -> tuple[np.ndarray, int]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    ids = [np.asarray(e.ids, dtype=np.uint32) for e in tokenizer.encode_batch(texts)]
    size = tokenizer.get_vocab_size()
    return np.concatenate(ids).astype(np.uint16 if size <= 1 << 16 else np.uint32), size


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, windows: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(windows)


@dataclass(frozen=True)
class DataOrder:
    """A fixed order of training sequences: sequence `i` is the same whatever the batch size or the restart.

    Attributes:
        corpus: tokens.
        sequence: tokens per sequence; one more is read for the targets.
        seed: of the permutation, one per pass over the corpus.
    """

    corpus: Corpus
    sequence: int
    seed: int = 0

    @property
    def windows(self) -> int:
        """Sequences in one pass."""
        return (self.corpus.tokens.size - 1) // self.sequence

    def batch(self, first: int, count: int) -> np.ndarray:
        """Return sequences `first` to `first + count` as int64 [count, sequence + 1].

        Raises:
            ValueError: the corpus is shorter than one sequence.
        """
        if self.windows < 1:
            raise ValueError(
                f"corpus of {self.corpus.tokens.size} tokens is shorter than one sequence of {self.sequence}"
            )
        index = np.arange(first, first + count)
        rows = np.empty(count, dtype=np.int64)
        for epoch in np.unique(index // self.windows):
            order = _permutation(self.seed, int(epoch), self.windows)
            here = index // self.windows == epoch
            rows[here] = order[index[here] % self.windows]
        at = rows[:, None] * self.sequence + np.arange(self.sequence + 1)
        return self.corpus.tokens[at].astype(np.int64)
