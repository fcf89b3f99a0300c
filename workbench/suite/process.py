"""Runs one notebook in a process of its own and turns whatever happens into an outcome."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import select
import shutil
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
    on_event: Event | None = None,
) -> dict[str, Any]:
    """Execute one notebook and write ``<slug>.ipynb``, ``.html`` and ``.json`` into `out`.

    It may run in any process of any machine (a Dask worker, a nightly job): it starts a process for the notebook, waits
    for it, and leaves no kernel behind even if the caller is killed.

    Args:
        notebook: the ``.ipynb`` file.
        params: JSON values to inject, already checked (see `workbench.suite.parameters.check`).
        out: folder for the results; made if missing.
        timeout: limit for the whole notebook, in seconds.
        fingerprint: kept in the outcome, so that a later run can tell that nothing changed.
        on_event: called with each progress event (``start``, ``ready``, ``cell``, ``retry``, ``end``).
    Returns:
        The outcome, as in ``<slug>.json``: ``slug, status, seconds, peak_memory_bytes, source, recording,
        badge, checks, error, params, attempts, ...``. A notebook that fails is an outcome, not an exception.
    Raises:
        OutputError: `out` cannot be written, or the output would replace the input.
    """
    run = NotebookRun(Notebook(Path(notebook)), params, Path(out), timeout, fingerprint=fingerprint, on_event=on_event)
    try:
        run.start()
        while not run.step(0.5):
            pass
    except BaseException:
        run.stop()
        raise
    assert run.outcome is not None
    return run.outcome


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


class NotebookRun:
    """One notebook on its way: `start`, then `step` until it returns True; `stop` at any time.

    `back_link` is the address that the HTML page leads back to, relative to it.

    Attributes:
        outcome: what came of it, once `step` has returned True or after `stop`.
    """

    def __init__(
        self,
        notebook: Notebook,
        params: Mapping[str, Any],
        out: Path,
        timeout_s: float,
        *,
        fingerprint: str | None = None,
        back_link: str | None = None,
        on_event: Event | None = None,
    ) -> None:
        self.notebook, self.params, self.out = notebook, dict(params), out.absolute()
        self.timeout_s, self.fingerprint = float(timeout_s), fingerprint
        self.back_link = back_link
        self.outcome: dict[str, Any] | None = None
        self._emit = on_event or (lambda event: None)
        self._attempt = 0
        self._began = time.monotonic()
        self._started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._process: subprocess.Popen[bytes] | None = None
        self._forget()

    def _forget(self) -> None:
        """Begin without anything that an earlier attempt left."""
        self._buffer, self._executed = b"", False
        self._error: dict[str, Any] | None = None
        self._html_error: str | None = None
        self._kernel_pid: int | None = None
        self._peak: int | None = None
        self._cells: int | None = None
        self._tmp: dict[str, Path] = {}

    def start(self) -> None:
        """Start executing; a notebook that cannot be run is an outcome at once.

        Raises:
            OutputError: the folder cannot be written, or the output would replace the input.
        """
        prepare_folder(self.out)
        if self._final(".ipynb").resolve() == self.notebook.path.resolve():
            raise OutputError(
                f"{self.notebook.slug}: the output folder is the notebook's own folder; choose another --out"
            )
        self._emit({"event": "start", "slug": self.notebook.slug})
        try:
            _ = self.notebook.content
        except NotebookError as error:
            self._attempt = 1
            refused = {"kind": "invalid_notebook", "message": str(error)}
            self._finish(verdict.judge(Path(os.devnull), 0, refused, limit_s=self.timeout_s))
            return
        self._launch()

    def step(self, wait_s: float) -> bool:
        """Read what the process says for at most `wait_s` seconds; True once the outcome is there."""
        if self.outcome is not None:
            return True
        ended = False
        if select.select([self], [], [], wait_s)[0]:
            chunk = os.read(self.fileno(), 1 << 16)
            ended = not chunk
            self._hear(chunk)
        if ended or time.monotonic() > self._deadline:
            self._conclude(killed=not ended)
        return self.outcome is not None

    def fileno(self) -> int:
        """The pipe to wait on, for `select`."""
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def stop(self) -> None:
        """End the process and its kernel, keep earlier results whole, and make the outcome ``interrupted``."""
        if self.outcome is not None:
            return
        self._kill()
        self._clean()
        self.outcome = self._outcome(
            {"status": verdict.INTERRUPTED, "error": {"kind": "interrupted", "message": "interrupted"}}
        )

    def _launch(self) -> None:
        self._attempt += 1
        self._forget()
        self._sockets = _socket_folder()
        stem = f".{self.notebook.slug}.running-{os.getpid()}-{self._attempt}"
        self._tmp = {ending: self.out / (stem + ending) for ending in (".ipynb", ".html", ".log")}
        env = {**os.environ, "MPLBACKEND": "agg", "PYTHONUNBUFFERED": "1"}
        with self._tmp[".log"].open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workbench.suite.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=env,
            )
        job = {
            "input": str(self.notebook.path),
            "output": str(self._tmp[".ipynb"]),
            "html": str(self._tmp[".html"]),
            "back_link": self.back_link,
            "scratch": [str(p) for p in self._tmp.values()],
            "connection_file": str(self._sockets / "k.json"),
            "cwd": str(self.notebook.path.parent),
            "parameters": self.params,
            "timeout_s": self.timeout_s,
            "start_timeout_s": START_TIMEOUT_S,
        }
        self._deadline = time.monotonic() + self.timeout_s + GRACE_S
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def _hear(self, chunk: bytes) -> None:
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            self._heard(json.loads(line))

    def _heard(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if event.get("peak_bytes"):
            self._peak = max(self._peak or 0, event["peak_bytes"])
        if kind == "kernel":
            self._kernel_pid = event["pid"]
        elif kind == "error":
            self._error = event
        elif kind == "html_error":
            self._html_error = event["message"]
        elif kind == "executed":
            self._deadline = time.monotonic() + EXPORT_TIMEOUT_S
            self._executed = True
        if kind in ("ready", "cell"):
            self._cells = event.get("cells")
            self._emit({**event, "slug": self.notebook.slug})

    def _conclude(self, *, killed: bool) -> None:
        assert self._process is not None
        if not killed:
            self._process.wait()
        self._kill()
        status: int | None = self._process.returncode
        if killed:
            status = int(self._error is not None) if self._executed else None
        if self._error and self._error["kind"] == "kernel_start" and self._attempt < ATTEMPTS:
            self._emit({"event": "retry", "slug": self.notebook.slug, "message": self._error["message"]})
            self._clean()
            self._launch()
            return
        log = _tail(self._tmp[".log"])
        if status not in (0, 1, None) and self._error is None:
            message = f"the executing process ended with status {status}"
            self._error = {"kind": "runner", "message": message, "traceback": log}
        found = verdict.judge(self._tmp[".ipynb"], status, self._error, limit_s=self.timeout_s)
        if log and found["error"] and found["error"]["kind"] in ("kernel_died", "kernel_start", "runner"):
            found["error"]["log"] = log
        self._finish(found)

    def _finish(self, found: dict[str, Any]) -> None:
        readable = ".ipynb" in self._tmp and verdict.cells_of(self._tmp[".ipynb"]) is not None
        for ending in (".ipynb", ".html"):
            if readable and self._tmp[ending].exists():
                os.replace(self._tmp[ending], self._final(ending))
            else:
                self._final(ending).unlink(missing_ok=True)
        if readable and not self._final(".html").exists():
            found["html_error"] = self._html_error or "the HTML export did not finish"
        self._clean()
        self.outcome = self._outcome(found)
        write_json(self._final(".json"), self.outcome)
        self._emit({"event": "end", **self.outcome})

    def _outcome(self, found: dict[str, Any]) -> dict[str, Any]:
        return {
            **nothing_run(self.notebook, self.params),
            "started": self._started,
            "seconds": round(time.monotonic() - self._began, 2),
            "peak_memory_bytes": self._peak,
            "code_cells": self._cells,
            "attempts": self._attempt,
            "fingerprint": self.fingerprint,
            **found,
        }

    def _final(self, ending: str) -> Path:
        return self.out / (self.notebook.slug + ending)

    def _kill(self) -> None:
        """End the executing process, its kernel, and what the kernel started."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert process.stdout is not None and process.stdin is not None
        if not process.stdout.closed:  # the last events of a process that has ended: one may name the kernel
            os.set_blocking(self.fileno(), False)
            with contextlib.suppress(BlockingIOError):
                self._hear(process.stdout.read() or b"")
        if self._kernel_pid is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._kernel_pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def _clean(self) -> None:
        for path in self._tmp.values():
            path.unlink(missing_ok=True)
        if self._tmp:
            shutil.rmtree(self._sockets, ignore_errors=True)


def nothing_run(notebook: Notebook, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an outcome says of a notebook that has not run; its ``status`` and ``error`` are still to come."""
    return {
        "slug": notebook.slug,
        "group": notebook.group,
        "title": title_of(notebook),
        "seconds": 0.0,
        "peak_memory_bytes": None,
        "code_cells": None,
        "attempts": 0,
        "params": dict(params),
        **verdict.nothing_shown(),
        "html_error": None,
    }


def title_of(notebook: Notebook) -> str:
    """Return the experiment's title, else the notebook's first heading, else its slug."""
    with contextlib.suppress(NotebookError):
        if notebook.experiment is not None:
            return notebook.experiment.title
        for cell in notebook.content["cells"]:
            text = "".join(cell["source"]).lstrip()
            if cell["cell_type"] == "markdown" and text.startswith("#"):
                return text.splitlines()[0].lstrip("# ").strip()
    return notebook.slug


def _socket_folder() -> Path:
    """Make a folder whose socket paths fit the limit of 107 bytes for Unix sockets."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="wb-", dir=base if len(base) < 60 else "/tmp"))


def _tail(path: Path, limit: int = 2000) -> str:
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    return data[-limit:].decode("utf-8", "replace").strip()
