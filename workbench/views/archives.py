"""A reader's own archived histories where a recording stands: its rows, and what reading it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core.experiment import Result
from workbench.core.output import plain
from workbench.core.record import Recording


@dataclass(frozen=True)
class Archive:
    """What a reader's archive holds.

    Attributes:
        rows: its rows.
        told: what reading and stitching did, one line each.
    """

    rows: Any
    told: Sequence[str]


def opener(read: Callable[[Any], tuple[Any, Sequence[str]]]) -> Callable[[Any, Recording | None], Archive | Recording]:
    """Return `Experiment.opens` for an experiment whose `own` archive `read` turns into rows and what reading did."""
    return lambda params, recording: recording or Archive(*read(params))


def archived(params: Any, origin: Archive | Recording) -> Any:
    """`Experiment.recorded` of such an experiment: the archive's rows, else the recording's tables."""
    return origin.rows if isinstance(origin, Archive) else origin.tables()


def reading_report(result: Result) -> str:
    """Return what reading an archive did, line by line; one line where the table is ours."""
    if isinstance(result.origin, Archive):
        return "\n".join(map(plain, result.origin.told))
    return f"no archive: {result.badge}"
