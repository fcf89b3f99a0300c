"""Runs one notebook in a process of its own and turns whatever happens into an outcome."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.core.files import replace_file
from workbench.suite import verdict
from workbench.suite.catalog import Notebook, NotebookError

DEFAULT_TIMEOUT_S = 900.0
START_TIMEOUT_S = 60
GRACE_S = 10.0
EXPORT_TIMEOUT_S = 180.0
ATTEMPTS = 2
LOOK_S = 0.25

Event = Callable[[dict[str, Any]], None]


class OutputError(OSError):
    """Results cannot be written where they were asked for."""


def run_one(
    notebook: Path | str,
    params: Mapping[str, Any],
    out: Path | str,
    timeout: float = DEFAULT_TIMEOUT_S,
    *,
    fingerprint: str | None = None,
    back_link: str | None = None,
    on_event: Event = lambda event: None,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Execute one notebook and write ``<slug>.ipynb``, ``.html`` and ``.json`` into `out`.

    It may run in any process of any machine (a Dask worker, a nightly job) and in any thread: it starts a process for
    the notebook, waits for it, and leaves no kernel behind even if the caller is killed.

    Args:
        notebook: the ``.ipynb`` file.
        params: JSON values to inject, already checked (see `workbench.suite.parameters.check`).
        out: folder for the results; made if missing.
        timeout: limit for the whole notebook, in seconds.
        fingerprint: kept in the outcome, so that a later run can tell that nothing changed.
        back_link: address that the HTML page leads back to, relative to it.
        on_event: called with each progress event (``start``, ``ready``, ``cell``, ``retry``, ``end``).
        stopped: asked a few times a second; once true, the notebook is ended, its outcome is ``interrupted``, and
            earlier results stay whole.
    Returns:
        The outcome, as in ``<slug>.json``: ``slug, status, seconds, peak_memory_bytes, source, recording,
        badge, checks, error, params, attempts, ...``. A notebook that fails is an outcome, not an exception.
    Raises:
        OutputError: `out` cannot be written, or the output would replace the input.
    """
    source, out = Notebook(Path(notebook)), Path(out).absolute()
    began, started = time.monotonic(), datetime.datetime.now(datetime.UTC)
    prepare_folder(out)
    if (out / f"{source.slug}.ipynb").resolve() == source.path.resolve():
        raise OutputError(f"{source.slug}: the output folder is the notebook's own folder; choose another --out")
    on_event({"event": "start", "slug": source.slug})
    job = {
        "input": str(source.path), "back_link": back_link, "cwd": str(source.path.parent), "parameters": dict(params),
        "timeout_s": float(timeout), "start_timeout_s": START_TIMEOUT_S,
    }  # fmt: skip
    try:
        _ = source.content
    except NotebookError as error:
        refused = {"kind": "invalid_notebook", "message": str(error)}
        found = {"attempts": 1} | verdict.judge(Path(os.devnull), 0, refused, limit_s=timeout)
        _publish({}, out, source.slug)
    else:
        attempts = (_attempt(number, source.slug, job, out, on_event, stopped) for number in range(1, ATTEMPTS + 1))
        found = next(filter(None, attempts))
    outcome = {
        **nothing_run(source, params), "started": started.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began, 2), "fingerprint": fingerprint, **found,
    }  # fmt: skip
    if outcome["status"] != verdict.INTERRUPTED:
        write_json(out / f"{source.slug}.json", outcome)
        on_event({"event": "end", **outcome})
    return outcome


def prepare_folder(out: Path) -> None:
    """Make `out` and prove that files can be written there.

    Raises:
        OutputError: it cannot be made or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OutputError(f"cannot write results to {out}: {error.strerror or error}") from None


def write_json(path: Path, content: Any) -> None:
    """Write JSON, whole or not at all."""
    replace_file(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _attempt(
    number: int, slug: str, job: dict[str, Any], out: Path, on_event: Event, stopped: Callable[[], bool]
) -> dict[str, Any] | None:
    """Execute a notebook once; return what came of it, None where its kernel did not start and may be tried again."""
    stem = f".{slug}.running-{os.getpid()}-{number}"
    files = {ending: out / (stem + ending) for ending in (".ipynb", ".html", ".log")}
    base = tempfile.gettempdir()  # paths of Unix sockets have a limit of 107 bytes
    sockets = tempfile.TemporaryDirectory(
        prefix="wb-", dir=base if len(base) < 60 else "/tmp", ignore_cleanup_errors=True
    )
    with contextlib.ExitStack() as at_end:
        connection = Path(at_end.enter_context(sockets)) / "k.json"
        for path in files.values():
            at_end.callback(path.unlink, missing_ok=True)
        job |= {
            "output": str(files[".ipynb"]),
            "html": str(files[".html"]),
            "scratch": [str(path) for path in files.values()],
            "connection_file": str(connection),
        }
        process = _Process(job, files[".log"], lambda event: on_event({**event, "slug": slug}))
        ended = process.follow(stopped)
        told = {"attempts": number, "peak_memory_bytes": process.peak_bytes, "code_cells": process.cells}
        if ended == "stopped":
            return told | {"status": verdict.INTERRUPTED, "error": {"kind": "interrupted", "message": "interrupted"}}
        error, status = process.error, process.status
        if error and error["kind"] == "kernel_start" and number < ATTEMPTS:
            on_event({"event": "retry", "slug": slug, "message": error["message"]})
            return None
        log = _tail(files[".log"])
        if ended == "limit":
            status = int(error is not None) if process.executed else None
        elif status not in (0, 1) and error is None:
            message = f"the executing process ended with status {status}"
            error = {"kind": "runner", "message": message, "traceback": log}
        found = verdict.judge(files[".ipynb"], status, error, limit_s=job["timeout_s"])
        if log and found["error"] and found["error"]["kind"] in ("kernel_died", "kernel_start", "runner"):
            found["error"]["log"] = log
        if _publish(files, out, slug) == [".ipynb"]:
            found["html_error"] = process.html_error or "the HTML export did not finish"
        return told | found


def _publish(files: Mapping[str, Path], out: Path, slug: str) -> list[str]:
    """Put a readable executed notebook and its page in place of earlier ones; return the endings of what is there."""
    readable = ".ipynb" in files and verdict.cells_of(files[".ipynb"]) is not None
    placed = []
    for ending in (".ipynb", ".html"):
        if readable and files[ending].exists():
            os.replace(files[ending], out / (slug + ending))
            placed.append(ending)
        else:
            (out / (slug + ending)).unlink(missing_ok=True)
    return placed


class _Process:
    """The process that executes a notebook, see `workbench.suite.child`, and what it has said so far.

    Args:
        job: what it reads from its stdin.
        log: file for what it prints.
        on_event: called with its events ``ready`` and ``cell``.
    """

    def __init__(self, job: Mapping[str, Any], log: Path, on_event: Event) -> None:
        self.error: dict[str, Any] | None = None
        self.html_error: str | None = None
        self.peak_bytes: int | None = None
        self.cells: int | None = None
        self.executed = False
        self._buffer, self._kernel_pid, self._emit = b"", None, on_event
        self._deadline = time.monotonic() + job["timeout_s"] + GRACE_S
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workbench.suite.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
                start_new_session=True,
                env={**os.environ, "MPLBACKEND": "agg", "PYTHONUNBUFFERED": "1"},
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._job = json.dumps(job).encode() + b"\n"

    @property
    def status(self) -> int:
        """Its exit status, after `follow`."""
        return self._process.returncode

    def follow(self, stopped: Callable[[], bool]) -> str:
        """Give it its job and listen; return ``ended``, ``limit`` or ``stopped``, with nothing of it left running."""
        try:
            with contextlib.suppress(BrokenPipeError):
                self._stdin.write(self._job)
            while time.monotonic() < self._deadline:
                if stopped():
                    return "stopped"
                if select.select([self._stdout], [], [], LOOK_S)[0]:
                    chunk = os.read(self._stdout.fileno(), 1 << 16)
                    if not chunk:
                        self._process.wait()
                        return "ended"
                    self._hear(chunk)
            return "limit"
        finally:
            self._end()

    def _hear(self, chunk: bytes) -> None:
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for event in map(json.loads, lines):
            kind = event["event"]
            self.peak_bytes = max(self.peak_bytes or 0, event.get("peak_bytes") or 0) or None
            if kind == "kernel":
                self._kernel_pid = event["pid"]
            elif kind == "error":
                self.error = event
            elif kind == "html_error":
                self.html_error = event["message"]
            elif kind == "executed":
                self._deadline = time.monotonic() + EXPORT_TIMEOUT_S
                self.executed = True
            elif kind in ("ready", "cell"):
                self.cells = event.get("cells")
                self._emit(event)

    def _end(self) -> None:
        """End the executing process, its kernel, and what the kernel started."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(3)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._hear(self._stdout.read())  # the last events of a process that has ended: one may name the kernel
        if self._kernel_pid is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._kernel_pid, signal.SIGKILL)
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def nothing_run(notebook: Notebook, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an outcome says of a notebook that has not run; its ``status`` and ``error`` are still to come."""
    return {
        "slug": notebook.slug, "group": notebook.group, "title": notebook.title, "seconds": 0.0,
        "peak_memory_bytes": None, "code_cells": None, "attempts": 0, "params": dict(params),
        **verdict.nothing_shown(), "html_error": None,
    }  # fmt: skip


def _tail(path: Path, limit: int = 2000) -> str:
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    return data[-limit:].decode("utf-8", "replace").strip()
