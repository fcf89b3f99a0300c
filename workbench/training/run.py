"""Train the small routed language model: resumable at any moment, no host wait in a step.

Source: report, Appendix B.7 (objective, optimizer, branch protocol) and B.8 (batch-size warmup).
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from workbench.core.files import replace_file
from workbench.models.metrics import useful_tokens_per_s_per_gpu
from workbench.training import checkpoint
from workbench.training.config import RunConfig

SCALARS = ("loss", "ce", "lbl", "grad_norm", "applied")
PER_LAYER = ("load_max_over_mean", "load_entropy", "dead_experts", "confidence")


class Trainer:
    """One run in memory: model, optimizer, data position, history.

    A step submits work and returns; metrics stay in a device buffer until `read_back`.

    Args:
        config: the run.
        device: ``cpu`` or ``cuda``.
        graphs: replay each batch size's step as a CUDA graph, captured here before the first step. A small model's
            eager step is bound by submission; its replay is not.
    Raises:
        ValueError: `graphs` on a device other than CUDA.
    """

    def __init__(self, config: RunConfig, device: str = "cpu", *, graphs: bool = False) -> None:
        import torch
        from moe_kernels.block import BlockConfig
        from moe_kernels.model import DevelopmentModel, ModelConfig

        from workbench.training.corpus import DataOrder, load_corpus
        from workbench.training.optimizer import SkipStepAdamW

        self.config, self.device = config, torch.device(device)
        if graphs and self.device.type != "cuda":
            raise ValueError(f"graphs: expected a CUDA device, got {device!r}")
        self.order = DataOrder(
            load_corpus(config.corpus, vocabulary=config.vocabulary), config.sequence, config.data_seed
        )

        def same(*names: str) -> dict[str, Any]:
            return {name: getattr(config, name) for name in names}

        block = BlockConfig(
            num_experts=config.experts,
            lbl_granularity="instance",
            sequence_length=config.sequence,
            **same("width", "expert_width", "top_k", "shared_width", "gating"),
        )
        sizes = ModelConfig(
            vocabulary=self.order.corpus.vocabulary,
            max_sequence=config.sequence,
            block=block,
            **same("layers", "width", "heads", "kv_heads", "head_dim", "dense_width"),
        )
        self.model = DevelopmentModel(
            sizes,
            path="no_ep",
            device=self.device,
            dtype=getattr(torch, config.dtype),
            seed=config.seed,
            annotate=False,
        )
        embedding = self.model.embedding.weight

        def no_decay(name: str, p: Any) -> bool:
            if p is embedding:
                return True
            return not config.decay_norms_and_head and (p.ndim < 2 or name.startswith("head"))

        self.optimizer = SkipStepAdamW(
            self.model,
            lr=config.lr,
            weight_decay=config.weight_decay,
            no_decay=no_decay,
            clip=config.clip,
            window=config.skip_window,
            sigma=config.skip_sigma,
        )
        self.step_count = 0
        self.sequences = 0
        self.rows: list[dict[str, float]] = []
        self._pending: list[tuple[dict[str, float], Any]] = []
        self._stream = torch.cuda.Stream(self.device) if graphs else None
        self._graphs: dict[int, tuple[Any, Any, Any]] = {}
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with self._on_stream():
                self._capture(sorted({config.batch * s.multiple for s in config.stages()}))

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Everything of a run with graphs is submitted to the stream that they were captured on."""
        import torch

        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _capture(self, counts: list[int]) -> None:
        """Run each batch size once, for compilation and library set-up, capture it, and undo what the runs changed."""
        import torch

        before = {name: t.clone() for name, t in self.optimizer.state().items()}
        self._lr = torch.zeros((), dtype=torch.float32, device=self.device)
        pool = torch.cuda.graph_pool_handle()
        for count in counts:
            batch = torch.from_numpy(self.order.batch(0, count)).to(self.device)
            self._compute(batch, self._lr)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                row = self._compute(batch, self._lr)
            self._graphs[count] = (graph, batch, row)
        self.optimizer.load_state(before)

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.sequences * self.config.sequence

    @property
    def done(self) -> bool:
        """True once all tokens of the configuration have been trained on."""
        return self.tokens >= self.config.total_tokens

    def step(self) -> None:
        """Submit one optimizer step; nothing is read from the device."""
        import torch

        count, lr = self.config.at(self.tokens)
        batch = torch.from_numpy(self.order.batch(self.sequences, count))
        with self._on_stream():
            if self.device.type == "cuda":
                batch = batch.pin_memory().to(self.device, non_blocking=True)
            if count in self._graphs:
                graph, static, out = self._graphs[count]
                static.copy_(batch)
                self._lr.fill_(lr)
                graph.replay()
                # The next replay of this graph writes over its row.
                row = out.clone()
            else:
                row = self._compute(batch, lr)
        self.step_count += 1
        self.sequences += count
        self._pending.append(({"step": self.step_count, "tokens": self.tokens, "batch": count, "lr": lr}, row))

    def _compute(self, batch: Any, lr: Any) -> Any:
        """Train on int64 [count, sequence + 1]; return the device row of `SCALARS` and `PER_LAYER`."""
        import torch

        count, micro = batch.shape[0], self.config.microbatch
        self.optimizer.zero_grad()
        parts = []
        for first in range(0, count, micro):
            piece = batch[first : first + micro]
            share = piece.shape[0] / count
            loss, metrics = self._loss(piece)
            (loss * share).backward()
            parts.append(torch.cat([torch.stack([loss.detach(), *metrics[:2]]), *metrics[2:]]) * share)
        total = torch.stack(parts).sum(0)
        taken = self.optimizer.step(total[0], lr)
        return torch.cat([total[:3], torch.stack([taken["grad_norm"], taken["applied"]]), total[3:]])

    def _loss(self, batch: Any) -> tuple[Any, list[Any]]:
        """Return the objective and [ce, lbl, max/mean, entropy, dead, confidence], the last four [routed layers]."""
        import torch
        import torch.nn.functional as F

        logits = self.model(batch[:, :-1]).float()
        ce = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        z = torch.logsumexp(logits, -1).square().mean()
        blocks = self.model.routed_blocks
        lbl = torch.stack([b.aux_losses["lbl"] for b in blocks]).mean()
        # A kept auxiliary loss would keep this step's gradient nodes, and their stream, into the next one.
        for b in blocks:
            b.aux_losses = {name: value.detach() for name, value in b.aux_losses.items()}
        loss = ce + self.config.head_z_coefficient * z + self.config.lbl_coefficient * lbl * len(blocks)
        with torch.no_grad():
            routed = [b.metrics for b in blocks]
            load = torch.stack([m["per_expert_load"] for m in routed]).float()
            p = load / load.sum(1, keepdim=True)
            entropy = -(p * p.clamp(min=1e-12).log()).sum(1)
            confidence = torch.stack([m["confidence"] for m in routed]).float()
            dead = (load == 0).float().sum(1)
        return loss, [ce.detach(), lbl.detach(), load.amax(1) / load.mean(1), entropy, dead, confidence]

    def read_back(self) -> list[dict[str, float]]:
        """Wait for the device once and move pending metrics into the history; return the new rows."""
        import torch

        if not self._pending:
            return []
        with self._on_stream():
            values = torch.stack([r for _, r in self._pending]).cpu().tolist()
        layers = len(self.model.routed_blocks)
        names = list(SCALARS) + [f"{m}_{i + 1}" for m in PER_LAYER for i in range(layers)]
        new = [known | dict(zip(names, row)) for (known, _), row in zip(self._pending, values)]
        self._pending.clear()
        self.rows += new
        return new

    def save(self, folder: Path, *, keep: int = 2, extra: dict[str, Any] | None = None) -> None:
        """Write a checkpoint that holds everything a resumed run needs, its history included."""
        self.read_back()
        meta = {"config": self.config.as_dict(), "sequences": self.sequences, "rows": self.rows} | (extra or {})
        with self._on_stream():
            checkpoint.save(folder, self.step_count, self.optimizer.state(), meta, keep=keep)

    def restore(self, folder: Path, step: int | None = None) -> dict[str, Any]:
        """Load a checkpoint (the newest by default) into this run and return its meta data."""
        tensors, meta = checkpoint.load(folder, step)
        with self._on_stream():
            self.optimizer.load_state(tensors)
        self.step_count, self.sequences, self.rows = meta["step"], meta["sequences"], meta["rows"]
        self._pending.clear()
        return meta


def train(
    config: RunConfig,
    folder: Path,
    *,
    device: str = "cpu",
    steps: int | None = None,
    checkpoint_every: int = 0,
    keep: int = 2,
    read_every: int = 25,
    graphs: bool = False,
    progress: Callable[[dict[str, float]], None] | None = None,
) -> list[dict[str, float]]:
    """Train until the tokens (or `steps`) are used up, resuming from the folder's newest checkpoint.

    Args:
        config: the run; must equal the checkpoint's where there is one.
        folder: checkpoints and ``history.csv``.
        device: ``cpu`` or ``cuda``.
        steps: stop after this many optimizer steps in all.
        checkpoint_every: steps between checkpoints; 0 writes one at the end only.
        keep: checkpoints that stay; 0 keeps all.
        read_every: steps between reading metrics back, the only host waits.
        graphs: replay steps as CUDA graphs, see `Trainer`.
        progress: called at each read-back with the newest row and the tokens per second since the last one.
    Returns:
        The history, one dict a step.
    Raises:
        ValueError: the folder holds a run of another configuration.
    """
    trainer = Trainer(config, device, graphs=graphs)
    meta = trainer.restore(folder) if checkpoint.steps(folder) else {}
    now = config.as_dict()
    before = meta.get("config", now)
    if changed := sorted(k for k in now.keys() | before.keys() if before.get(k) != now.get(k)):
        raise ValueError(f"{folder.name} holds another run; these parameters differ: {', '.join(changed)}")
    extra = {k: v for k, v in meta.items() if k == "branch"}
    since, first = time.perf_counter(), trainer.tokens
    while not trainer.done and (steps is None or trainer.step_count < steps):
        trainer.step()
        if trainer.step_count % read_every == 0:
            trainer.read_back()
            now = time.perf_counter()
            if progress:
                rate = useful_tokens_per_s_per_gpu(trainer.tokens - first, now - since, 1)
                progress(trainer.rows[-1] | {"tokens_per_s": rate})
            since, first = now, trainer.tokens
        if checkpoint_every and trainer.step_count % checkpoint_every == 0:
            trainer.save(folder, keep=keep, extra=extra)
    trainer.save(folder, keep=keep, extra=extra)
    write_history(folder / "history.csv", trainer.rows)
    return trainer.rows


def branch(origin: Path, step: int, target: Path, **changes: Any) -> RunConfig:
    """Start a new run from another run's model and optimizer at `step`, with parameters changed.

    Args:
        origin: folder of the original run, which has a checkpoint of that step.
        step: where to branch.
        target: folder of the branch; must hold no checkpoint.
        **changes: fields of `RunConfig`.
    Returns:
        The branch's configuration, to be given to `train`.
    Raises:
        ValueError: nothing changes, or the target already holds a run.
    """
    if checkpoint.steps(target):
        raise ValueError(f"{target.name} already holds a run; a branch starts in an empty folder")
    tensors, meta = checkpoint.load(origin, step)
    before = RunConfig.from_dict(meta["config"])
    after = before.replace(**changes)
    if after == before:
        raise ValueError("a branch changes at least one parameter; nothing was changed")
    note = {"from": origin.name, "step": step, "changes": {k: [getattr(before, k), v] for k, v in changes.items()}}
    # The branch's history starts after the branch point, as an archive of it would.
    kept = {"config": after.as_dict(), "sequences": meta["sequences"], "rows": [], "branch": note}
    checkpoint.save(target, step, tensors, kept)
    return after


def write_history(path: Path, rows: list[dict[str, float]]) -> None:
    """Write a history as CSV, whole or not at all."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else ["step"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(path, out.getvalue())
