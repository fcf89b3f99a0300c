"""What the sheets of several GPUs share: the tables of one rank, and a claim that was checked on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from workbench.core.experiment import Check, Result

WORDS = {True: "holds", False: "fails", None: "undecided"}


def ranks_of(result: Result) -> list[int]:
    """Return the ranks that the tables tell apart."""
    return sorted({rank for table in result.tables.values() if "rank" in table.columns for rank in table["rank"]})


def of_rank(result: Result, rank: int) -> Result:
    """Return one rank's rows of every table that tells ranks apart, in the form of one GPU's result.

    Raises:
        ValueError: there are none.
    """
    import polars as pl

    if rank not in ranks_of(result):
        raise ValueError(f"rank {rank} was not measured: expected one of {ranks_of(result)}")
    tables = {n: t.filter(pl.col("rank") == rank) if "rank" in t.columns else t for n, t in result.tables.items()}
    return dataclasses.replace(result, tables=tables)


def on_every_rank(checks: Sequence[Check]) -> Check:
    """Return one claim over the checks of all ranks, in rank order; its value names the ranks where they differ.

    It fails where it fails on one rank, else it is undecided where it is undecided on one.
    """
    found = [c.holds for c in checks]
    apart = len(set(found)) > 1
    values = [f"rank {rank}{f' {WORDS[c.holds]}' * apart}: {c.value}" for rank, c in enumerate(checks)]
    same = not apart and len({c.value for c in checks}) == 1
    # A reason known on one rank excuses no other.
    reasons = [c.known for c in checks if c.holds is False]
    return Check(
        f"{checks[0].claim}, on every rank",
        False if False in found else None if None in found else True,
        str(checks[0].value) if same else " | ".join(values),
        reasons[0] if all(reasons) and reasons else "",
    )
