"""Progress per notebook and cell: bars on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import threading
from typing import Any, TextIO

from workbench.core.output import plain
from workbench.suite.verdict import STANDINGS, standing

WORDS = {
    "passed": ("passed", "green"),
    "claim_failed": ("CLAIM FAILED", "red"),
    "failed": ("FAILED", "red"),
    "interrupted": ("interrupted", "yellow"),
    "skipped": ("skipped", "yellow"),
}


class Progress:
    """Shows the events of `total` notebooks on `stream`."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._total, self._done = total, 0
        self._tasks: dict[str, Any] = {}
        self._bars: Any = None
        self._lock = threading.Lock()

    def __enter__(self) -> Progress:
        if self._stream.isatty():
            self._bars = bars(self._stream, transient=True)
            self._bars.start()
            self._overall = self._bars.add_task("notebooks", total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def event(self, event: dict[str, Any]) -> None:
        """Show one event of `run_one`, from any thread."""
        with self._lock:
            self._show(event)

    def _show(self, event: dict[str, Any]) -> None:
        slug, kind = event["slug"], event["event"]
        if kind == "end":
            self._done += 1
        text = self._text(slug, kind, event)
        if self._bars is None:
            if text:
                print(text, file=self._stream, flush=True)
        elif kind == "start":
            self._tasks[slug] = self._bars.add_task(slug, total=None)
        elif kind == "cell" and slug in self._tasks:
            self._bars.update(self._tasks[slug], total=event["cells"], completed=(event["cell"] or 1) - 1)
        elif kind == "retry":
            self._bars.console.print(text, markup=False)
        elif kind == "end":
            if slug in self._tasks:
                self._bars.remove_task(self._tasks.pop(slug))
            self._bars.console.print(text, style=WORDS[event["status"]][1], markup=False, highlight=False)
            self._bars.advance(self._overall)

    def _text(self, slug: str, kind: str, event: dict[str, Any]) -> str:
        if kind == "start":
            return f"{slug}: starts"
        if kind == "cell":
            return f"{slug}: cell {event['cell']}/{event['cells']}"
        if kind == "retry":
            return f"{slug}: kernel did not start, once more: {event['message']}"
        return f"[{self._done}/{self._total}] {describe_outcome(event)}" if kind == "end" else ""


def bars(stream: TextIO, transient: bool = False) -> Any:
    """Return progress bars of rich on `stream`, with what they stand for, how much is done and for how long."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    return progress.Progress(*columns, console=Console(file=stream), transient=transient)


def describe_outcome(outcome: dict[str, Any]) -> str:
    """Return one line (more for a failure) that says how a notebook ended."""
    standings = [standing(c) for c in outcome["checks"]]
    counts = [f"{standings.count(s)} {s}" for s in STANDINGS if s in standings]
    parts = [f"{outcome['slug']}: {WORDS[outcome['status']][0]}"]
    if outcome.get("reused"):
        parts.append("(unchanged since the last run)")
    else:
        parts.append(f"in {outcome['seconds']:.1f} s")
    if outcome.get("peak_memory_bytes") and not outcome.get("reused"):
        parts.append(f"{outcome['peak_memory_bytes'] / 2**20:.0f} MiB")
    if outcome["checks"]:
        parts.append(f"claims: {', '.join(counts)}")
    if outcome["badge"]:
        parts.append(" ".join(outcome["badge"].split()))
    lines = [" · ".join([" ".join(parts[:2]), *parts[2:]])]
    lines += [f"    fails: {c['claim']} [{c.get('value')}]" for c in outcome["checks"] if standing(c) == "failed"]
    if outcome["error"]:
        lines.append(f"    {outcome['error']['message']}")
        lines += [f"    | {line}" for line in outcome["error"].get("excerpt", "").splitlines()[-8:]]
    if outcome.get("html_error"):
        lines.append(f"    no HTML: {outcome['html_error']}")
    return plain("\n".join(lines))
