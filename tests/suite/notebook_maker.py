"""Tiny notebooks for the suite's tests, and what they leave running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULT_MIME = "application/vnd.headroom.result+json"


def result_cell(
    checks: list[dict[str, Any]] | None = None, source: str = "model", badge: str = "computed by a model"
) -> str:
    """Return source that reports a result the way `Result.report` does."""
    payload = {
        "slug": "tiny",
        "source": source,
        "recording": None,
        "badge": badge,
        "checks": checks or [],
        "params": {},
    }
    bundle = {RESULT_MIME: payload, "text/plain": "result"}
    return f"from IPython.display import display\ndisplay({bundle!r}, raw=True)"


def make(folder: Path, slug: str, *cells: str, parameters: str = "", kernel: str = "python3", title: str = "") -> Path:
    """Write ``folder/slug.ipynb`` with these code cells and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [{"cell_type": "markdown", "id": "t", "metadata": {}, "source": f"# {title or slug}"}]
    sources = [(parameters, ["parameters"])] if parameters else []
    for i, (source, tags) in enumerate([*sources, *((c, []) for c in cells)]):
        cell = {"cell_type": "code", "id": f"c{i}", "metadata": {"tags": tags}, "source": source}
        made.append({**cell, "outputs": [], "execution_count": None})
    metadata = {"kernelspec": {"name": kernel, "display_name": kernel, "language": "python"}}
    path = folder / f"{slug}.ipynb"
    content = {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": made}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def marked_processes(mark: str) -> list[int]:
    """Return the processes whose environment carries `mark` (kernels and their children inherit it), but this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
