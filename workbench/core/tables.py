"""Named tidy tables: rows in any of their forms as polars frames, and an old union of kinds of rows taken apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

MAIN = "table"
"""Name of a table that has no other name."""


def tables_of(rows: Any) -> dict[str, pl.DataFrame]:
    """Return rows (a list of dicts, a polars DataFrame, or a mapping of name to one of these) as frames by name."""
    import polars as pl

    named = rows if isinstance(rows, Mapping) else {MAIN: rows}
    return {
        name: part if isinstance(part, pl.DataFrame) else pl.DataFrame(part, infer_schema_length=None)
        for name, part in named.items()
    }


def grouped(rows: Iterable[Mapping[str, Any]], by: str) -> dict[str, list[dict[str, Any]]]:
    """Give rows of several kinds, told apart by the field `by`, a table each; the field itself goes."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name = str(row[by]).replace(" ", "_")
        tables.setdefault(name, []).append({k: v for k, v in row.items() if k != by})
    return tables


def split(table: pl.DataFrame, by: str) -> dict[str, pl.DataFrame]:
    """Take a table of several kinds of rows apart: one table per value of the column `by`, in order of appearance.

    The column itself goes, and so does in each part every column that is null throughout.
    """
    parts = {str(key[0]): part.drop(by) for key, part in table.group_by(by, maintain_order=True)}
    return {
        name.replace(" ", "_"): part[[c.name for c in part if c.null_count() < len(c)]] for name, part in parts.items()
    }


def recorded_kinds(by: str) -> Any:
    """Return `Experiment.recorded` for recordings that were one table of several kinds of rows: it is taken apart."""

    def recorded(params: Any, recording: Any) -> dict[str, pl.DataFrame]:
        tables = recording.tables()
        return split(tables[MAIN], by) if list(tables) == [MAIN] else tables

    return recorded
