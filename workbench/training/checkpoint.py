"""Checkpoints that are either whole or not there: safetensors and JSON in a folder that is renamed into place."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

PATTERN = "step_"


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
    for left in root.glob(".writing-*"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=root))
    try:
        save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, temporary / "tensors.safetensors")
        (temporary / "meta.json").write_text(json.dumps({"step": step, **meta}), encoding="utf-8")
        for name in ("tensors.safetensors", "meta.json"):
            with open(temporary / name, "rb") as f:
                os.fsync(f.fileno())
        target = root / f"{PATTERN}{step:08d}"
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if keep:
        for old in steps(root)[:-keep]:
            shutil.rmtree(root / f"{PATTERN}{old:08d}", ignore_errors=True)
    return target


def steps(root: Path) -> list[int]:
    """Return the steps of the complete checkpoints, oldest first; other folders and leftovers are not among them."""
    if not root.is_dir():
        return []
    named = [(p, p.name.removeprefix(PATTERN)) for p in root.iterdir() if p.name.startswith(PATTERN)]
    return sorted(
        int(number)
        for p, number in named
        if number.isascii()
        and number.isdigit()
        and number == f"{int(number):08d}"
        and (p / "meta.json").is_file()
        and (p / "tensors.safetensors").is_file()
    )


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
    try:
        tensors = load_file(path / "tensors.safetensors")
    except SafetensorError as error:
        raise ValueError(f"checkpoint {path / 'tensors.safetensors'} is damaged: {error}") from error
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"checkpoint {path / 'meta.json'} is damaged: {error}") from error
    return tensors, meta
