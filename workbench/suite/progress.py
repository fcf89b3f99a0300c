"""Progress per notebook and cell: bars on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
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

    def __enter__(self) -> Progress:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bars = Bars(*columns, console=Console(file=self._stream), transient=True)
            self._bars.start()
            self._overall = self._bars.add_task("notebooks", total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def event(self, event: dict[str, Any]) -> None:
        """Show one event of `NotebookRun`."""
        slug, kind = event["slug"], event["event"]
        if kind == "end":
            self._done += 1
        if self._bars is None:
            self._line(slug, kind, event)
            return
        if kind == "start":
            self._tasks[slug] = self._bars.add_task(slug, total=None)
        elif kind == "cell" and slug in self._tasks:
            self._bars.update(self._tasks[slug], total=event["cells"], completed=(event["cell"] or 1) - 1)
        elif kind == "retry":
            self._bars.console.print(f"{slug}: kernel did not start, once more: {event['message']}", markup=False)
        elif kind == "end":
            if slug in self._tasks:
                self._bars.remove_task(self._tasks.pop(slug))
            self._bars.console.print(
                self._end_text(event), style=WORDS[event["status"]][1], markup=False, highlight=False
            )
            self._bars.advance(self._overall)

    def _line(self, slug: str, kind: str, event: dict[str, Any]) -> None:
        if kind == "start":
            text = f"{slug}: starts"
        elif kind == "cell":
            text = f"{slug}: cell {event['cell']}/{event['cells']}"
        elif kind == "retry":
            text = f"{slug}: kernel did not start, once more: {event['message']}"
        elif kind == "end":
            text = self._end_text(event)
        else:
            return
        print(text, file=self._stream, flush=True)

    def _end_text(self, outcome: dict[str, Any]) -> str:
        return f"[{self._done}/{self._total}] " + describe_outcome(outcome)


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
