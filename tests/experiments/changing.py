"""Results with one table changed, to see claims fail."""

from __future__ import annotations

import dataclasses

import polars as pl

from workbench.core.experiment import Result


def changed(result: Result, table: str, *columns: pl.Expr, keep: pl.Expr | None = None) -> Result:
    """A copy in which `columns` of one table are replaced, and only its rows that `keep` names are left."""
    found = result.tables[table].with_columns(*columns)
    return dataclasses.replace(result, tables=result.tables | {table: found if keep is None else found.filter(keep)})
