"""What ``workbench show`` prints: source, claims, and the table by kinds of rows, in lines that fit."""

from __future__ import annotations

import difflib
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Column, Table
from rich.text import Text

from workbench.cli.table import elided, flowed, overview, rendered, rounded, whole
from workbench.core.output import line_width, plain, say
from workbench.suite.verdict import STANDINGS, standing

if TYPE_CHECKING:
    from workbench.core.experiment import Check, Result


def show(result: Result, part: str | None = None, everything: bool = False) -> None:
    """Print a result for reading: some rows of each table, all of table `part`, or everything."""
    width = line_width()
    rows = whole(result.tables, width, part) if everything or part is not None else overview(result.tables, width)
    for line in [*_heading(result, width), "", *_claims(result, width), "", *rows, *_summary(result, width)]:
        say(line)


def require_part(result: Result, part: str) -> None:
    """Refuse a table that the result does not have.

    Raises:
        ValueError: it has none of that name; the message lists those that it has.
    """
    known = list(result.tables)
    if len(known) == 1:
        raise ValueError(f"{result.slug}: it has one table; --all prints it")
    if part not in known:
        near = difflib.get_close_matches(part, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{result.slug}: no table {part!r}: expected {', '.join(known)}{hint}")


def _heading(result: Result, width: int) -> Iterator[str]:
    experiment = result.experiment
    yield from _filled(experiment.title, width)
    yield from _filled(experiment.claim, width)
    yield from _filled(f"source: {result.badge}", width, "  ")
    yield from _filled(f"report: {experiment.anchor}", width, "  ")
    values = [
        f"{k}={elided(plain(v), width * 2 // 3)}" for k, v in result.params.as_dict().items() if v not in ("", [])
    ]
    if values:
        yield from flowed("parameters: ", values, width)


def _claims(result: Result, width: int) -> Iterator[str]:
    """Yield each claim after its standing; what decided it follows on the same line where it fits."""
    word = max(map(len, STANDINGS))
    table = Table.grid(Column(justify="right", min_width=word), Column(), padding=(0, 2, 0, 0))
    for check in result.checks:
        value = _decided_by(check)
        between = "  " if len(check.claim) + len(value) + 2 <= width - word - 2 else "\n"
        told = f"{check.claim}{between}{value}".rstrip()
        table.add_row(standing(check.as_dict()), Text(plain("\n".join(filter(None, (told, check.known))))))
    return rendered(table, width)


def _summary(result: Result, width: int) -> Iterator[str]:
    """Yield the last lines, which a terminal shows without scrolling: how the claims stand, and those that fail."""
    counts = Counter(standing(c.as_dict()) for c in result.checks)
    told = ", ".join(f"{counts[s]} {s}" for s in STANDINGS if counts[s])
    yield from _filled(f"claims (above the table): {told}; {result.badge}" if told else result.badge, width, "  ")
    for check in result.checks:
        if check.fails:
            yield from _filled(f"failed: {check.claim}  {_decided_by(check)}", width, "  ")
    yield from _filled("numbers are rounded and long texts cut; --json prints every row in full", width, "  ")


def _decided_by(check: Check) -> str:
    value = rounded([check.value])[0] if isinstance(check.value, float) else check.value
    return "" if value is None else f"[{value}]"


def _filled(text: str, width: int, below: str = "") -> list[str]:
    return textwrap.wrap(plain(text), width, subsequent_indent=below, break_on_hyphens=False)
