"""Runs many notebooks: side by side, resumable, interruptible, with one summary and one report page."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import itertools
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workbench.core.audit import cpu
from workbench.core.record import tree_state
from workbench.suite import verdict
from workbench.suite.catalog import Notebook
from workbench.suite.fingerprint import fingerprint, gpus
from workbench.suite.pages import FOLDER
from workbench.suite.process import DEFAULT_TIMEOUT_S, OutputError, nothing_run, prepare_folder, run_one, write_json
from workbench.suite.progress import Progress


def run_suite(
    notebooks: Sequence[Notebook],
    params: Mapping[str, Mapping[str, Any]],
    out: Path,
    *,
    jobs: int = 1,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    force: bool = False,
    skipped: Mapping[str, str] | None = None,
    page: bool = True,
) -> dict[str, Any]:
    """Execute `notebooks` and write ``run.json``, ``index.html`` and ``notebooks/<slug>.{ipynb,html,json}`` into `out`.

    Notebooks that may measure on a GPU run alone, one after the other: neighbours would change what they measure.

    Args:
        notebooks: the selection.
        params: checked parameters by slug.
        out: folder for the results.
        jobs: notebooks at a time.
        timeout_s: limit for each notebook.
        force: run even what finished before with the same notebook, parameters, code, packages and data.
        skipped: slug to reason, for notebooks that are left out.
        page: write the report page.
    Returns:
        The summary, as in ``run.json``; ``exit_status`` is 0 when every notebook and claim passed, 1 when one failed,
        130 or 143 after Ctrl-C or SIGTERM.
    Raises:
        OutputError: `out` cannot be written, another run is writing there, or it is the notebooks' own folder.
    """
    prepare_folder(out)
    folder = out / FOLDER
    prepare_folder(folder)
    for notebook in notebooks:
        if (folder / f"{notebook.slug}.ipynb").resolve() == notebook.path.resolve():
            raise OutputError(f"{notebook.slug}: the results would replace the notebook itself; choose another --out")
    skipped = dict(skipped or {})
    began, started = time.monotonic(), datetime.datetime.now(datetime.UTC)
    commit, dirty = tree_state()
    with _lock(out), _Signals() as signals:
        caught = signals.caught
        outcomes = _execute(notebooks, params, folder, jobs, timeout_s, force, skipped, caught)
        summary = {
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - began, 2),
            "jobs": jobs,
            "timeout_s": timeout_s,
            "commit": commit,
            "dirty": dirty,
            "machine": machine(),
            "exit_status": exit_status(outcomes, caught),
            "counts": {s: sum(o["status"] == s for o in outcomes) for s in sorted({o["status"] for o in outcomes})},
            "peak_memory_bytes": max((o["peak_memory_bytes"] or 0 for o in outcomes), default=0) or None,
            "notebooks": outcomes,
        }
        write_json(out / "run.json", summary)
        if page:
            from workbench.suite.report_page import write_page

            signals.at_once = True
            write_page(out, summary, thumbnails=not caught)
    return summary


def machine() -> dict[str, Any]:
    """Return what the notebooks run on, without naming the machine: GPUs, processor, memory in MiB, system, Python."""
    found = cpu()
    return {
        "gpus": list(gpus()), "cpu": found["model"], "cores": found["usable_cores"],
        "memory_MiB": found["memory_MiB"], "system": platform.system(), "python": platform.python_version(),
    }  # fmt: skip


def exit_status(outcomes: Sequence[Mapping[str, Any]], caught: Sequence[int] = ()) -> int:
    """Return 0 when everything passed, 1 when a notebook, a claim or an export failed, 128 + signal when stopped."""
    if caught:
        return 128 + caught[0]
    bad = (verdict.FAILED, verdict.CLAIM_FAILED, verdict.INTERRUPTED)
    return int(any(o["status"] in bad or o["html_error"] for o in outcomes))


def _execute(
    notebooks: Sequence[Notebook],
    params: Mapping[str, Mapping[str, Any]],
    folder: Path,
    jobs: int,
    timeout_s: float,
    force: bool,
    skipped: Mapping[str, str],
    caught: list[int],
) -> list[dict[str, Any]]:
    preparing, given_up = threading.Lock(), threading.Event()

    def measures(notebook: Notebook) -> bool:
        return bool(gpus()) and notebook.may_measure(params.get(notebook.slug, {}))

    def run(notebook: Notebook) -> dict[str, Any]:
        mine, mark = dict(params.get(notebook.slug, {})), None
        if caught or given_up.is_set():
            return _skip(notebook, mine, "the run was stopped before it began", verdict.INTERRUPTED)
        if notebook.slug in skipped:
            done = _skip(notebook, mine, skipped[notebook.slug])
        else:
            with preparing:  # the first one reads all code and data for its fingerprint, the others wait for that
                mark, done = _previous(notebook, mine, folder, force)
        if done is not None:
            progress.event({"event": "end", **done})
            return done
        return run_one(notebook.path, mine, folder, timeout_s, fingerprint=mark, back_link="../index.html",
                       on_event=progress.event, stopped=lambda: bool(caught) or given_up.is_set())  # fmt: skip

    outcomes: list[dict[str, Any]] = []
    with Progress(len(notebooks)) as progress, ThreadPoolExecutor(max(1, jobs)) as pool:
        try:
            for alone, some in itertools.groupby(notebooks, measures):
                outcomes += (map if alone else pool.map)(run, some)
        except BaseException:
            given_up.set()
            raise
    return outcomes


def _previous(
    notebook: Notebook, params: dict[str, Any], folder: Path, force: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """Return the fingerprint, and the outcome of an equal run that passed before."""
    try:
        mark = fingerprint(notebook, params)
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
    if force or not all((folder / (notebook.slug + ending)).is_file() for ending in (".ipynb", ".html")):
        return mark, None
    try:
        outcome = json.loads((folder / f"{notebook.slug}.json").read_text(encoding="utf-8"))
        same = (outcome["fingerprint"], outcome["status"]) == (mark, verdict.PASSED) and not outcome["html_error"]
    except (OSError, ValueError, KeyError, TypeError):
        return mark, None
    return mark, {**outcome, "reused": True} if same else None


def _skip(notebook: Notebook, params: Mapping[str, Any], reason: str, status: str = verdict.SKIPPED) -> dict[str, Any]:
    error = {"kind": "skipped", "message": reason, "cell": None, "excerpt": ""}
    return {**nothing_run(notebook, params), "status": status, "error": error}


@contextlib.contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Keep a second run out of this folder; the system drops the lock of a run that died."""
    with (out / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise OutputError(f"another run (process {file.read().strip() or '?'}) is writing to {out}") from None
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        for path in (out / FOLDER).glob(".*.running-*"):  # of a run that was killed outright
            path.unlink(missing_ok=True)
        yield


class _Signals:
    """Notes SIGINT, SIGTERM and SIGHUP instead of dying; a second SIGINT, or any while `at_once`, leaves right away."""

    def __init__(self) -> None:
        self.caught: list[int] = []
        self.at_once = False

    def __enter__(self) -> _Signals:
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        if self.at_once or (self.caught and number == signal.SIGINT):
            raise SystemExit(128 + number)
        self.caught.append(number)
