"""Real profiler traces: read them, find out why the GPU waited, judge them, and ask what a change would gain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from workbench.traces.trace import Trace, TraceError

__all__ = ["NAMES", "Trace", "TraceError", "read", "read_folder", "trace_files"]

NAMES = (".json", ".json.gz", ".sqlite", ".pt.trace.json", ".pt.trace.json.gz")


def read(path: str | Path) -> Trace:
    """Read one trace: Kineto .json or .json.gz, or an Nsight Systems .sqlite export (told by content, not by name).

    Raises:
        TraceError: the file is absent or no trace; the message names it and what was expected.
    """
    path = Path(path)
    if path.is_dir():
        raise TraceError(f"{path}: a folder; read_folder reads one trace per rank")
    if not path.is_file():
        raise TraceError(f"{path}: no such trace file")
    try:
        with path.open("rb") as f:
            magic = f.read(16)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    if magic.startswith(b"SQLite format 3"):
        from workbench.traces.nsys import read_nsys

        return read_nsys(path)
    from workbench.traces.kineto import read_kineto

    return read_kineto(path)


def trace_files(folder: str | Path) -> list[Path]:
    """Trace files of a folder (one per rank), in name order.

    Raises:
        TraceError: no such folder, or no trace file in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise TraceError(f"{folder}: no such folder")
    hidden = (".", "_")
    paths = sorted(p for p in folder.iterdir() if p.is_file() and p.name.endswith(NAMES) and p.name[0] not in hidden)
    if not paths:
        raise TraceError(f"{folder}: no trace files (.json, .json.gz, .sqlite) in this folder")
    return paths


def read_folder(folder: str | Path) -> Iterator[Trace]:
    """Traces of a folder (one per rank), in name order, one at a time.

    Raises:
        TraceError: no such folder, or no trace file in it.
    """
    for path in trace_files(folder):
        yield read(path)
