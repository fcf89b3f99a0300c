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
    """What a reader's archive holds, or the recording in its place.

    Attributes:
        rows: its rows, or the recording's tables.
        told: what reading and stitching did, one line each; nothing of a recording.
    """

    rows: Any
    told: Sequence[str]


def opener(read: Callable[[Any], tuple[Any, Sequence[str]]]) -> Callable[[Any, Recording | None], Archive]:
    """Return `Experiment.opens` for an experiment whose `own` archive `read` turns into rows and what reading did."""
    return lambda params, recording: Archive(recording.tables(), ()) if recording else Archive(*read(params))


def archived(params: Any, origin: Archive) -> Any:
    """`Experiment.recorded` of such an experiment."""
    return origin.rows


def reading_report(result: Result) -> str:
    """Return what reading an archive did, line by line; one line where the table is ours."""
    if result.own:
        return "\n".join(map(plain, result.origin.told))
    return f"no archive: {result.badge}"
