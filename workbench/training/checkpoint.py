"""Checkpoints that are either whole or not there: safetensors and JSON in a folder that is renamed into place."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from workbench.core.files import WRITING, new_folder

PATTERN = "step_"
FILES = ("tensors.safetensors", "meta.json")


def save(root: Path, step: int, tensors: dict[str, Any], meta: dict[str, Any], *, keep: int = 2) -> Path:
    """Write one checkpoint, remove all but the newest `keep` and what a killed writer left. One run, one writer.

    Args:
        root: folder of the run.
        step: optimizer steps done.
        tensors: name -> tensor.
        meta: JSON values (position in the data, history so far, parameters).
        keep: checkpoints that stay; 0 keeps all.
    """
    from safetensors.torch import save_file

    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{WRITING}*"):
        shutil.rmtree(left, ignore_errors=True)
    target = root / f"{PATTERN}{step:08d}"
    with new_folder(target) as folder:
        save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, folder / "tensors.safetensors")
        (folder / "meta.json").write_text(json.dumps({"step": step, **meta}), encoding="utf-8")
        for name in FILES:
            with open(folder / name, "rb") as f:
                os.fsync(f.fileno())
        if target.exists():
            shutil.rmtree(target)
    if keep:
        for old in steps(root)[:-keep]:
            shutil.rmtree(root / f"{PATTERN}{old:08d}", ignore_errors=True)
    return target


def steps(root: Path) -> list[int]:
    """Return the steps of the complete checkpoints, oldest first; other folders and leftovers are not among them."""
    if not root.is_dir():
        return []
    named = {p: re.fullmatch(PATTERN + r"(\d{8}|[1-9]\d{8,})", p.name, re.ASCII) for p in root.iterdir()}
    return sorted(int(m[1]) for p, m in named.items() if m and all((p / name).is_file() for name in FILES))


def load(root: Path, step: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (tensors, meta) of one checkpoint, the newest by default.

    Raises:
        FileNotFoundError: there is none; the message lists those that are.
        ValueError: its files are damaged; the message names the file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    have = steps(root)
    if not have or (step is not None and step not in have):
        raise FileNotFoundError(
            f"no checkpoint {'at all' if step is None else f'of step {step}'} in {root.name}; present: {have}"
        )
    path = root / f"{PATTERN}{have[-1] if step is None else step:08d}"
    file = path / "tensors.safetensors"
    try:
        tensors = load_file(file)
        file = path / "meta.json"
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"checkpoint {file} is damaged: {error}") from error
    return tensors, meta
