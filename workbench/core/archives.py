"""Experiments whose table may be a reader's own archived histories instead of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core.experiment import Experiment, Result, _frame
from workbench.core.params import check_names
from workbench.core.record import Recording
from workbench.training.archive import printable


@dataclass(frozen=True)
class Archive(Recording):
    """A reader's own archive standing where a recording stands, so that the badge says whose numbers they are.

    Attributes:
        told: what reading and stitching did, one line each.
    """

    told: tuple[str, ...] = ()

    def badge(self, source: str) -> str:
        """Name the file or folder as the reader's."""
        return f"your archive: {self.name}"

    def __str__(self) -> str:
        return "\n".join(self.told)


@dataclass(frozen=True, kw_only=True)
class ArchiveExperiment(Experiment):
    """An experiment whose parameter `archive` may name a file or folder of the reader's own histories.

    Attributes:
        read: params -> (rows, what reading did).
    """

    read: Callable[[Any], tuple[Any, list[str]]]

    def run(self, source: str = "auto", **params: Any) -> Result:
        """Like `Experiment.run`; a non-empty `archive` is read whatever the source, and the badge names it."""
        if not params.get("archive"):
            return super().run(source, **params)
        check_names(self.params, params)
        values = self.params(**params)
        rows, told = self.read(values)
        path = Path(params["archive"])
        recording = Archive(self.slug, path.name or str(path), {}, path, (), tuple(map(printable, told)))
        return Result(experiment=self, params=values, source="recorded", table=_frame(rows), recording=recording)


def reading_report(result: Result) -> str:
    """Return what reading an archive did, line by line; one line where the table is ours."""
    if isinstance(result.recording, Archive):
        return str(result.recording)
    return f"no archive: {result.badge}"
