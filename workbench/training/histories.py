"""Archived metric histories of anybody's runs: read, stitched and reported on.

A history is a table with an integer step column and numeric metric columns; a run may come as several segments.

Source: report, Appendix B.7 and B.8 (at an overlapping step the newest segment wins).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

STEP_NAMES = ("step", "_step", "global_step", "trainer/global_step", "iteration", "iter")
LONG_NAMES = ({"metric", "value"}, {"tag", "value"}, {"key", "value"})
DRAWN_POINTS = 4000
"""Points of a curve from which on it is drawn thinned, after smoothing."""
READERS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")


@dataclass(frozen=True)
class History:
    """One segment, tidied.

    Attributes:
        name: segment name, the file's stem.
        table: ``step`` int64, sorted and unique, then float64 metric columns.
        notes: what the reader did to it, in words.
    """

    name: str
    table: pl.DataFrame
    notes: tuple[str, ...] = field(default=())


def read_table(path: Path) -> tuple[pl.DataFrame, list[str]]:
    """Read an exported table as it is, and say what had to be left out; categories become words.

    Args:
        path: CSV, TSV, JSON lines or parquet; wide (a column per metric) or long (``metric``/``tag``, ``value``).
    Raises:
        ValueError: unknown format, or the file cannot be read as it; the message names the file.
        FileNotFoundError: the file is not there.
    """
    import polars as pl

    if not path.is_file():
        raise FileNotFoundError(f"history {path.name!r} does not exist")
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise ValueError(f"history {path.name!r}: expected one of {', '.join(READERS)}, got {suffix or 'no suffix'!r}")
    notes: list[str] = []
    # glob=False: a file's name is no pattern, whatever brackets and stars it has.
    try:
        if suffix == ".parquet":
            raw = pl.read_parquet(path, glob=False)
        elif suffix in (".jsonl", ".ndjson"):
            raw, notes = _read_json_lines(path)
        else:
            raw = pl.read_csv(
                path,
                separator="\t" if suffix == ".tsv" else ",",
                infer_schema_length=None,
                ignore_errors=True,
                encoding="utf8-lossy",
                glob=False,
            )
    # A damaged parquet file can make polars panic, which is no Exception.
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise ValueError(f"history {path.name!r} cannot be read as {suffix}: {error}") from error
    return raw.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String)), notes


def _read_json_lines(path: Path) -> tuple[pl.DataFrame, list[str]]:
    """Read line by line: Python writes NaN and Infinity, and a killed run ends in half a line."""
    import polars as pl

    rows, skipped = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip():
            skipped += 1
    if not rows:
        raise ValueError(f"history {path.name!r}: expected a JSON object a line, got none in {skipped} lines")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [_column(name, [row.get(name) for row in rows]) for name in names]
    return pl.DataFrame(columns), [f"skipped {skipped} lines that are no JSON object"] if skipped else []


def _column(name: str, values: list[Any]) -> pl.Series:
    """Return integers as integers, numbers as floats, anything else as text."""
    import polars as pl

    given = [v for v in values if v is not None]
    if given and all(isinstance(v, int) and abs(v) < 2**63 for v in given):
        return pl.Series(name, [None if v is None else int(v) for v in values], dtype=pl.Int64)
    if given and all(isinstance(v, float) or (isinstance(v, int) and abs(v) < 2**63) for v in given):
        return pl.Series(name, [None if v is None else float(v) for v in values], dtype=pl.Float64)
    words = [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
    return pl.Series(name, words, dtype=pl.String)


def step_column(columns: Sequence[str], step: str | None = None) -> str | None:
    """Return the step column: `step` where the table has it, else the first of the usual names, else None."""
    names = {c.strip().lower(): c for c in columns}
    return step if step in columns else next((names[n] for n in STEP_NAMES if n in names), None)


def tidy(raw: pl.DataFrame, name: str, *, step: str | None = None, notes: Sequence[str] = ()) -> History:
    """Turn a table of `read_table` into a `History`.

    Args:
        raw: the table.
        name: of the history.
        step: name of the step column; found among the usual names when None.
        notes: what reading the table did; the history's notes begin with it.
    Raises:
        ValueError: no step column, or no numeric metric; names what was found.
    """
    import polars as pl

    notes = list(notes)
    names = {c.strip().lower(): c for c in raw.columns}
    column = step_column(raw.columns, step)
    if column is None:
        raise ValueError(
            f"history {name!r}: no step column; expected one of {', '.join(STEP_NAMES)}, got {', '.join(raw.columns)}"
        )
    if raw[column].dtype.is_temporal():
        raise ValueError(f"history {name!r}: expected integer steps in {column!r}, got {raw[column].dtype}")
    for pair in LONG_NAMES:
        if pair <= set(names):
            key = names[next(iter(pair - {"value"}))]
            raw = raw.filter(pl.col(key).cast(pl.String, strict=False) != column)  # the step itself, logged as a metric
            metrics = raw[key].n_unique()
            raw = raw.pivot(on=key, index=column, values=names["value"], aggregate_function="last")
            notes.append(f"pivoted a long table of {metrics} metrics")
            break
    if column != "step" and "step" in raw.columns:
        raw = raw.drop("step")
        notes.append(f"left out the column or metric 'step': the step is {column!r}")
    raw = raw.rename({column: "step"})
    numeric = []
    for c in raw.columns:
        if c == "step":
            continue
        no_number = raw[c].dtype.is_nested() or raw[c].dtype.is_temporal() or raw[c].dtype == pl.Binary
        if no_number or not c.strip():  # a table's index is exported without a name
            continue
        # Trackers write NaN and Infinity as words; a text column that holds numbers is one.
        as_float = raw[c].cast(pl.Float64, strict=False) if raw[c].dtype != pl.Boolean else raw[c].cast(pl.Float64)
        if as_float.null_count() < raw.height:
            numeric.append(as_float.alias(c))
    left = [c for c in raw.columns if c != "step" and c not in {s.name for s in numeric}]
    if left:
        notes.append(f"left out {len(left)} columns without numbers: {', '.join(left[:5])}")
    if not numeric:
        raise ValueError(f"history {name!r}: no numeric metric beside {column!r}; columns are {', '.join(raw.columns)}")
    table = pl.DataFrame([raw["step"].cast(pl.Float64, strict=False).alias("step"), *numeric])
    # Beyond 2^53 a float step is no longer one integer.
    good = (pl.col("step").is_finite() & (pl.col("step").abs() < 2**53)).fill_null(False)
    before = table.height
    table = table.filter(good)
    if table.height < before:
        notes.append(f"dropped {before - table.height} rows without a step")
    if not table.height:
        raise ValueError(f"history {name!r}: expected integer steps in {column!r}, got {before} rows without any")
    fractional = table.filter(pl.col("step") != pl.col("step").floor()).height
    if fractional:
        raise ValueError(f"history {name!r}: {fractional} steps in {column!r} are no integers")
    table = table.with_columns(pl.col("step").cast(pl.Int64))
    before = table.height
    # Trackers log metrics of one step in several rows: keep the last value of each metric.
    table = table.group_by("step", maintain_order=True).agg(pl.all().drop_nulls().last()).sort("step")
    if table.height < before:
        notes.append(f"merged {before - table.height} rows of repeated steps, last value of each metric kept")
    if table.height > 1:
        first, last = int(table["step"][0]), int(table["step"][-1])
        apart = table["step"].diff().drop_nulls().unique()
        if table.height > 2 and len(apart) == 1 and apart[0] > 1:
            notes.append(f"one row every {apart[0]} steps, {first} to {last}")
        elif missing := last - first + 1 - table.height:
            notes.append(f"{missing} steps without a row between {first} and {last}")
    return History(name, table, tuple(notes))


@dataclass(frozen=True)
class MergeReport:
    """What stitching did.

    Attributes:
        segments: per segment, oldest first: name, rows, first_step, last_step, kept, replaced.
        overlaps: steps that more than one segment has.
        gaps: pairs of steps between which no segment has a row; the usual distance of two rows is none.
    """

    segments: tuple[dict[str, Any], ...]
    overlaps: int
    gaps: tuple[tuple[int, int], ...]

    def lines(self) -> list[str]:
        """Return the report in words, the segments first."""
        told = [
            f"{s['segment']}: {s['rows']} rows, steps {s['first_step']} to {s['last_step']}, "
            f"{s['kept']} kept, {s['replaced']} replaced by newer segments"
            for s in self.segments
        ]
        told.append(f"{len(self.segments)} segments, {self.overlaps} overlapping steps, {len(self.gaps)} gaps")
        return told + [f"gap: no row between steps {a} and {b}" for a, b in self.gaps[:20]]


def stitch(segments: Sequence[History]) -> tuple[pl.DataFrame, MergeReport]:
    """Merge segments given oldest first: at an overlapping step the newest segment's row is kept.

    Args:
        segments: at least one.
    Returns:
        The stitched table with a ``segment`` column, and what was done; metrics called ``segment`` or ``order`` come
        back as ``metric_segment`` and ``metric_order``.
    Raises:
        ValueError: no segment.
    """
    import polars as pl

    if not segments:
        raise ValueError("nothing to stitch: no segment was given")
    parts = [
        s.table.rename({c: f"metric_{c}" for c in ("segment", "order") if c in s.table.columns}).with_columns(
            pl.lit(i).alias("order"), pl.lit(s.name).alias("segment")
        )
        for i, s in enumerate(segments)
    ]
    everything = pl.concat(parts, how="diagonal")
    merged = everything.sort("step", "order").group_by("step", maintain_order=True).last()
    kept = dict(merged.group_by("order").len().iter_rows())
    rows = tuple(
        {
            "segment": s.name,
            "rows": s.table.height,
            "first_step": int(s.table["step"][0]) if s.table.height else None,
            "last_step": int(s.table["step"][-1]) if s.table.height else None,
            "kept": kept.get(i, 0),
            "replaced": s.table.height - kept.get(i, 0),
        }
        for i, s in enumerate(segments)
    )
    steps = merged["step"].to_list()
    # Metrics may be logged every n steps, with a few extra rows: the usual distance is no gap.
    distances = Counter(b - a for a, b in itertools.pairwise(steps))
    stride = max(distances, key=lambda d: (distances[d], -d), default=1)
    gaps = tuple((a, b) for a, b in itertools.pairwise(steps) if b - a > stride)
    return merged.drop("order"), MergeReport(rows, everything.height - merged.height, gaps)


def window_median(
    table: pl.DataFrame, metric: str, first: int, last: int, *, level: float = 0.95, draws: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Return the median of a metric over steps `first` to `last` inclusive, with a block-bootstrap interval.

    Neighbouring steps of a history are correlated, so blocks of about the cube root of the window are resampled.

    Args:
        table: a history.
        metric: column.
        first: first step of the window.
        last: last step.
    Returns:
        ``median, low, high, rows``; NaN where the window holds no value.
    Raises:
        ValueError: no such metric (the message lists those that are), or one of words.
    """
    import numpy as np
    import polars as pl

    _require(metric, table)
    if not table[metric].dtype.is_numeric():
        raise ValueError(f"metric {metric!r}: expected numbers, got {table[metric].dtype}")
    values = table.filter(pl.col("step").is_between(first, last))[metric].drop_nulls().drop_nans().to_numpy()
    n = len(values)
    if not n:
        return {"median": float("nan"), "low": float("nan"), "high": float("nan"), "rows": 0}
    block = max(1, round(n ** (1 / 3)))
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, n - block + 1, size=(draws, -(-n // block)))
    index = (starts[:, :, None] + np.arange(block)).reshape(draws, -1)[:, :n]
    medians = np.median(values[index], axis=1)
    tail = 100 * (1 - level) / 2
    with np.errstate(invalid="ignore"):  # between two infinite medians there is no number
        low, high = np.percentile(medians, [tail, 100 - tail])
    return {"median": float(np.median(values)), "low": float(low), "high": float(high), "rows": n}


def _require(metric: str, *tables: pl.DataFrame) -> None:
    for t in tables:
        if metric not in t.columns:
            raise ValueError(f"no metric {metric!r}; the history has {', '.join(c for c in t.columns if c != 'step')}")


def paired_difference(
    table: pl.DataFrame, baseline: pl.DataFrame, metric: str, first: int, last: int, **options: Any
) -> dict[str, Any]:
    """Return the median over a window of a metric's difference to a baseline at the same step, with its interval.

    Two runs that see the same batch at the same step share that batch's noise, which cancels in the difference.

    Args:
        table: a history.
        baseline: the history that is subtracted.
        metric: column of both.
        first: first step of the window.
        last: last step.
        **options: level, draws, seed of `window_median`.
    Returns:
        ``median, low, high, rows`` over the steps that both have.
    Raises:
        ValueError: no such metric.
    """
    import polars as pl

    _require(metric, table, baseline)
    both = table.select("step", metric).join(baseline.select("step", pl.col(metric).alias("baseline")), on="step")
    both = both.sort("step").select("step", (pl.col(metric) - pl.col("baseline")).alias("difference"))
    return window_median(both, "difference", first, last, **options)


def smooth(values: Any, span: int) -> Any:
    """Return the centred running median of a 1-d array over `span` points (odd), fewer at the ends."""
    import numpy as np

    values = np.asarray(values, dtype=float)
    half = max(0, span // 2)
    if half == 0:
        return values
    # Repeating the end values would make them the median there: a spike of one step.
    padded = np.pad(values, half, constant_values=np.nan)
    return np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)


def thinned(values: Any) -> Any:
    """Return a 1-d array or Series as it is drawn: every n-th point where it has more than `DRAWN_POINTS`."""
    return values[:: max(1, -(-len(values) // DRAWN_POINTS))]
