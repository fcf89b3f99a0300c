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
from typing import TYPE_CHECKING

from workbench.core.record import data_root

if TYPE_CHECKING:
    import polars as pl

# Columns of each file besides `anchor`.
COLUMNS: dict[int, list[str]] = {
    12: ["operations", "effect", "why"],
    13: ["pattern", "host_wait", "reason"],
    14: ["mechanism", "host_dependency_removed", "cost_accepted"],
    45: ["item", "quantity", "value", "unit", "printed"],
    46: ["role", "blocks", "routed_experts", "top_k", "d_model", "sequence_tokens", "global_batch_Mi", "ep",
         "nodes_min", "nodes_max", "precision", "not_used", "purpose"],
    47: ["quantity", "reference", "profiling", "unit", "derived"],
    48: ["rows_M", "prequantized_eager", "prequantized_graph", "including_q_eager", "including_q_graph"],
    49: ["configuration", "model", "layers", "routed_experts", "active", "total", "global_batch_Mi",
         "rank_microbatch_tokens", "nodes", "gpus", "dense_dp", "expert_dp", "ep", "pp", "compute", "transport",
         "recompute"],
    50: ["configuration", "routing", "TFLOPs_per_gpu", "use", "observation"],
    51: ["metric", "slug", "key_terms"],
}  # fmt: skip
# All others are text, printed numbers whose unit differs by row among them.
INTEGERS = {
    "blocks", "layers", "routed_experts", "top_k", "d_model", "sequence_tokens", "rank_microbatch_tokens", "rows_M",
    "nodes", "nodes_min", "nodes_max", "gpus", "dense_dp", "expert_dp", "ep", "pp",
}  # fmt: skip
FLOATS = {"global_batch_Mi", "TFLOPs_per_gpu", *COLUMNS[48][1:]}
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


def printed_rows(number: int) -> list[dict[str, str]]:
    """Return the rows of Table `number` as text, as printed.

    Raises:
        KeyError: the table is not transcribed; the message lists those that are.
        ValueError: the file's columns or a row's length disagree with `COLUMNS`.
    """
    if number not in COLUMNS:
        raise KeyError(f"Table {number} is not transcribed; present: {', '.join(map(str, COLUMNS))}")
    path = data_root() / "report" / f"tab{number:02d}.csv"
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

    def kind(column: str) -> type[int] | type[float] | type[str]:
        return int if column in INTEGERS else float if column in FLOATS else str

    def cell(row: dict[str, str], column: str) -> int | float | str | None:
        text = row[column]
        try:
            return kind(column)(text) if text else None
        except ValueError:
            where = f"tab{number:02d}.csv, {row['anchor']}, column {column}"
            raise ValueError(f"{where}: expected {kind(column).__name__}, got {text!r}") from None

    rows = [{c: cell(r, c) for c in r} for r in printed_rows(number)]
    return pl.DataFrame(rows, schema={c: kind(c) for c in ("anchor", *COLUMNS[number])})


def table_47() -> dict[str, dict[str, Printed | None]]:
    """Return Table 47 and the derived values of Section B.4: quantity -> {``reference``, ``profiling``} as printed."""
    return {
        row["quantity"]: {c: parse_printed(row[c], row["unit"]) if row[c] else None for c in ("reference", "profiling")}
        for row in printed_rows(47)
    }


def run_sizes(row: Mapping[str, str]) -> tuple[Printed, Printed]:
    """Return (active, total) parameters of a row of Table 49."""
    return parse_printed(row["active"]), parse_printed(row["total"])
