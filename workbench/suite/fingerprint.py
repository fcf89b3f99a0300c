"""What a finished run depended on, as one hash: equal hash, equal notebook, parameters, code, packages and data."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.core.params import path_parameters
from workbench.suite.catalog import Notebook

_SETTINGS = ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "WORKBENCH_DATA", "WORKBENCH_SHARED")


def fingerprint(notebook: Notebook, params: Mapping[str, Any]) -> str:
    """Return the hash of everything that a run of `notebook` with `params` depends on.

    A parameter that names an existing file counts with that file's content; a folder, where the experiment reads the
    parameter as a path, with the names, sizes and times of what is below it. Any other folder may be one that runs
    write into.
    """
    files = {}
    experiment = notebook.experiment
    read = path_parameters(experiment.params) if experiment else set()
    for name, value in params.items():
        if isinstance(value, str) and 0 < len(value) < 1000:
            if os.path.isfile(value):
                files[name] = _file_hash(Path(value))
            elif name in read and os.path.isdir(value):
                files[name] = _folder_marks(Path(value))
    parts = {
        "notebook": hashlib.sha256(notebook.path.read_bytes()).hexdigest(),
        "params": dict(params),
        "files": files,
        "code": code_hash(),
        "packages": packages_hash(),
        "data": data_hash(),
        "machine": [platform.python_version(), *gpus()],
        "settings": {name: os.environ.get(name) for name in _SETTINGS},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def code_hash() -> str:
    """Return the hash of the sources of `workbench` and `moe_kernels`."""
    roots = [Path(__file__).resolve().parents[1]]
    spec = importlib.util.find_spec("moe_kernels")
    if spec is not None and spec.submodule_search_locations:
        roots += [Path(p) for p in spec.submodule_search_locations]
    return _tree_hash(roots, skip=("__pycache__", "_bundled"))


@functools.cache
def data_hash() -> str:
    """Return the hash of the recordings and the report's tables."""
    from workbench.core.record import data_root

    return _tree_hash([data_root()])


@functools.cache
def packages_hash() -> str:
    """Return the hash of the names and versions of all installed packages."""
    found = sorted({f"{d.name}=={d.version}" for d in importlib.metadata.distributions()})
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


@functools.cache
def gpus() -> tuple[str, ...]:
    """Return the names of the NVIDIA GPUs that the driver lists, without starting CUDA."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        names.append(fields.get("Model", "unknown").strip())
    return tuple(names)


def _tree_hash(roots: list[Path], skip: tuple[str, ...] = ()) -> str:
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(p for p in root.rglob("*") if p.is_file()):
            relative = path.relative_to(root)
            if not any(part in skip or part.startswith(".") for part in relative.parts):
                digest.update(f"{root.name}/{relative}\0{_file_hash(path)}\n".encode())
    return digest.hexdigest()


def _folder_marks(folder: Path) -> list[list[Any]]:
    below = sorted(p for p in folder.rglob("*") if p.is_file())
    return [[str(p.relative_to(folder)), (s := p.stat()).st_size, s.st_mtime_ns] for p in below]


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
