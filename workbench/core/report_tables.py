"""The report's tables as typed data: Tables 12 to 14 and 45 to 51, each row with its anchor.

Numbers are kept as printed, so that a comparison can ask for agreement to half a unit of the last printed digit.

Source: report, Sections 8.1, 8.4, 8.5 and Appendix B.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Literal

from workbench.core.record import data_root

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

Kind = Literal["text", "int", "float", "quantity"]

# Columns of each file besides `anchor`, with their types. "quantity" keeps the printed text (its unit differs by row).
COLUMNS: dict[int, dict[str, Kind]] = {
    12: {"operations": "text", "effect": "text", "why": "text"},
    13: {"pattern": "text", "host_wait": "text", "reason": "text"},
    14: {"mechanism": "text", "host_dependency_removed": "text", "cost_accepted": "text"},
    45: {"item": "text", "quantity": "text", "value": "quantity", "unit": "text", "printed": "text"},
    46: {
        "role": "text",
        "blocks": "int",
        "routed_experts": "int",
        "top_k": "int",
        "d_model": "int",
        "sequence_tokens": "int",
        "global_batch_Mi": "float",
        "ep": "int",
        "nodes_min": "int",
        "nodes_max": "int",
        "precision": "text",
        "not_used": "text",
        "purpose": "text",
    },
    47: {"quantity": "text", "reference": "quantity", "profiling": "quantity", "unit": "text", "derived": "text"},
    48: {
        "rows_M": "int",
        "prequantized_eager": "float",
        "prequantized_graph": "float",
        "including_q_eager": "float",
        "including_q_graph": "float",
    },
    49: {
        "configuration": "text",
        "model": "text",
        "layers": "int",
        "routed_experts": "int",
        "active": "quantity",
        "total": "quantity",
        "global_batch_Mi": "float",
        "rank_microbatch_tokens": "int",
        "nodes": "int",
        "gpus": "int",
        "dense_dp": "int",
        "expert_dp": "int",
        "ep": "int",
        "pp": "int",
        "compute": "text",
        "transport": "text",
        "recompute": "text",
    },
    50: {"configuration": "text", "routing": "text", "TFLOPs_per_gpu": "float", "use": "text", "observation": "text"},
    51: {"metric": "text", "slug": "text", "key_terms": "text"},
}
_SCALE = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12, "Mi": 2**20}


@dataclass(frozen=True)
class Printed:
    """A number as printed: its value and half a unit of its last digit.

    Attributes:
        text: as printed, without thousands separators changed.
        value: the number.
        half_unit: half a unit of the last printed digit, same unit as `value`.
    """

    text: str
    value: float
    half_unit: float

    def agrees(self, computed: float) -> bool:
        """True where `computed` rounds to what is printed (half a unit of the last digit, bounds included)."""
        # A relative 1e-12 lets an exact half, such as 0.1875 printed from 0.1875, survive binary rounding.
        return abs(computed - self.value) <= self.half_unit + 1e-12 * max(abs(self.value), 1.0)

    @property
    def interval(self) -> tuple[float, float]:
        """Least and greatest number that would print like this."""
        return self.value - self.half_unit, self.value + self.half_unit


def parse_printed(text: str, unit: str = "") -> Printed:
    """Read a printed number such as ``"24,576"``, ``"10.89"``, ``"1.200T"``, ``"18 Mi"``.

    Args:
        text: number with an optional suffix K, M, B, T (powers of ten) or Mi (2**20).
        unit: suffix that is printed elsewhere, e.g. in the column head.

    Raises:
        ValueError: it is not such a number.
    """
    match = re.fullmatch(r"\s*(-?\d{1,3}(?:,\d{3})+|-?\d+)(\.\d+)?\s*(K|M|B|T|Mi|x|×|%)?\s*", text)
    if not match:
        raise ValueError(f"expected a printed number such as '24,576' or '1.200T', got {text!r}")
    whole, fraction, suffix = match.groups()
    scale = _SCALE.get(suffix or unit, 1)
    # Decimal, because 2.014 x 1e9 in binary is not the whole number that was printed.
    number = Decimal(whole.replace(",", "") + (fraction or ""))
    unit_of_last_digit = Decimal(1).scaleb(1 - len(fraction) if fraction else 0)
    return Printed(text.strip(), float(number * scale), float(unit_of_last_digit * scale / 2))


def table_path(number: int) -> Path:
    """Return the file of Table `number`.

    Raises:
        KeyError: the table is not transcribed; the message lists those that are.
    """
    if number not in COLUMNS:
        raise KeyError(f"Table {number} is not transcribed; present: {', '.join(map(str, COLUMNS))}")
    return data_root() / "report" / f"tab{number:02d}.csv"


def printed_rows(number: int) -> list[dict[str, str]]:
    """Return the rows of Table `number` as text, as printed.

    Raises:
        KeyError: the table is not transcribed.
        ValueError: the file's columns or a row's length disagree with `COLUMNS`.
    """
    path = table_path(number)
    with path.open(encoding="utf-8", newline="") as f:
        reader = csv.DictReader(f)
        rows = list(reader)
    expected = ["anchor", *COLUMNS[number]]
    if reader.fieldnames != expected:
        got = ", ".join(reader.fieldnames or [])
        raise ValueError(f"{path.name}: expected columns {', '.join(expected)}, got {got}")
    for line, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise ValueError(f"{path.name}, line {line}: expected {len(expected)} cells")
    return rows


def report_table(number: int) -> pl.DataFrame:
    """Return Table `number` as a typed DataFrame: its columns, `anchor` first, empty cells null.

    Raises:
        KeyError: the table is not transcribed.
        ValueError: a cell is not of its column's type; the message names file, anchor and column.
    """
    import polars as pl

    kinds = COLUMNS.get(number, {})
    types = {"int": pl.Int64, "float": pl.Float64, "text": pl.String, "quantity": pl.String}
    rows = [
        {"anchor": r["anchor"], **{c: _cell(number, r["anchor"], c, r[c], kind) for c, kind in kinds.items()}}
        for r in printed_rows(number)
    ]
    return pl.DataFrame(rows, schema={"anchor": pl.String, **{c: types[k] for c, k in kinds.items()}})


def _cell(number: int, anchor: str, column: str, text: str, kind: Kind) -> str | int | float | None:
    if text == "":
        return None
    try:
        if kind == "int":
            return int(text)
        return float(text) if kind == "float" else text
    except ValueError:
        raise ValueError(f"tab{number:02d}.csv, {anchor}, column {column}: expected {kind}, got {text!r}") from None


def table_47() -> dict[str, dict[str, Printed | None]]:
    """Return Table 47 and the derived values of Section B.4: quantity -> {``reference``, ``profiling``} as printed."""
    return {
        row["quantity"]: {c: parse_printed(row[c], row["unit"]) if row[c] else None for c in ("reference", "profiling")}
        for row in printed_rows(47)
    }


def run_sizes(row: Mapping[str, str]) -> tuple[Printed, Printed]:
    """Return (active, total) parameters of a row of Table 49."""
    return parse_printed(row["active"]), parse_printed(row["total"])
