"""A finished sweep, read back: one table over all its runs, and a figure that compares them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def load_sweep(folder: str | Path) -> dict[str, Any]:
    """Read a finished sweep's summary, as `workbench.suite.sweep.sweep` wrote it.

    Raises:
        FileNotFoundError: the folder holds no finished sweep.
        ValueError: its ``sweep.json`` is none.
    """
    path = Path(folder) / "sweep.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} holds no sweep.json; run: workbench sweep SLUG -p name=a,b --out FOLDER"
        )
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        whole = {"slug", "names", "runs"} <= summary.keys() and all(
            {"params", "status"} <= set(r) for r in summary["runs"]
        )
    except (ValueError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no summary of a sweep ({error})") from None
    if not whole:
        raise ValueError(f"{path}: no summary of a sweep (slug, names and runs expected)")
    return summary


def tidy(summary: Mapping[str, Any]) -> Any:
    """Return one polars table over all runs: a column per swept parameter, ``run, status``, then the rows' own columns.

    A column of a run's table that has a parameter's name becomes ``table_<name>``.
    """
    import polars as pl

    flat: list[dict[str, Any]] = []
    for run in summary["runs"]:
        keys = {n: _scalar(run["params"].get(n)) for n in summary["names"]}
        keys |= {"run": run.get("key"), "status": run["status"]}
        for row in run.get("rows") or [{}]:
            flat.append(keys | {(f"table_{k}" if k in keys else k): _scalar(v) for k, v in row.items()})
    for column in dict.fromkeys(name for row in flat for name in row):
        kinds = {type(v) for row in flat if (v := row.get(column)) is not None}
        # One column, one type: whole and broken numbers meet as float, everything else as text.
        if len(kinds) > 1:
            convert = float if kinds == {int, float} else str
            for row in flat:
                if row.get(column) is not None:
                    row[column] = convert(row[column])
    return pl.DataFrame(flat, infer_schema_length=None)


def _scalar(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def columns(summary: Mapping[str, Any], table: Any) -> tuple[list[str], list[str]]:
    """Return the swept parameters with more than one value, and the numeric columns that are not swept."""
    swept = [n for n in summary["names"] if n in table.columns and table[n].n_unique() > 1]
    numeric = [c for c in table.columns if table[c].dtype.is_numeric() and c not in summary["names"]]
    return swept, numeric


IDLE = "GPU idle time"


def _idle_by_panel(table: Any, names: Sequence[str]) -> Any:
    """Return one row a run and panel of a timeline: the summed length of its idle intervals."""
    import polars as pl

    length = pl.when(pl.col("kind") == "idle").then(pl.col("end") - pl.col("start")).otherwise(0.0)
    keys = ["run", *(n for n in names if n in table.columns), "panel"]
    found = table.filter(pl.col("panel").is_not_null()).group_by(keys, maintain_order=True)
    return found.agg(length.sum().alias(IDLE))


def compare(
    summary: Mapping[str, Any], *, x: str | None = None, y: str | None = None, colour: str | None = None
) -> Any:
    """Draw one numeric column of the swept tables against one swept parameter: every row, and the median as a line.

    Args:
        summary: of `load_sweep`.
        x: swept parameter; the first with more than one value when None.
        y: column; when None the GPU's idle time per panel where the runs' tables are timelines, else the first numeric
            column that is not swept.
        colour: column or parameter that tells the lines apart; the second swept parameter when None.
    Raises:
        ValueError: no such column, or one that is not numeric as y; the message lists those that are.
    """
    import polars as pl

    from workbench.core.colours import SERIES
    from workbench.views.plotting import figure

    table = tidy(summary)
    swept, numeric = columns(summary, table)
    x = x or (swept or [*summary["names"], "run"])[0]
    colour = colour or next((n for n in swept if n != x), None)
    timelines = {"panel", "kind"} <= set(table.columns) and {"start", "end"} <= set(numeric)
    if y is None and timelines and colour in (None, "panel", *swept):
        table, y = _idle_by_panel(table, summary["names"]), IDLE
        if colour in swept:
            table = table.with_columns(pl.format("{}, panel {}", colour, "panel").alias(colour))
        colour = colour or "panel"
    y = y or (numeric[0] if numeric else None)
    for column in (x, y, colour):
        if column is not None and column not in table.columns:
            raise ValueError(f"no column {column!r} in the sweep; it has {', '.join(table.columns)}")
    if y is not None and not table[y].dtype.is_numeric():
        raise ValueError(f"column {y!r} is not numeric; numeric are {', '.join(numeric) or 'none'}")
    fig = figure(f"{summary['slug']}: {y or 'no numeric column'} against {x}", height=460)
    if y is None:
        return fig
    groups = table.group_by(colour, maintain_order=True) if colour else [((None,), table)]
    for i, ((name,), part) in enumerate(groups):
        part = part.filter(pl.col(y).is_not_null() & pl.col(x).is_not_null()).sort(x)
        middle = part.group_by(x, maintain_order=True).agg(pl.col(y).median())
        tone = SERIES[i % len(SERIES)]
        common = {"legendgroup": str(name), "line": {"color": tone}, "marker": {"color": tone}}
        dots = {"mode": "markers", "opacity": 0.5, "showlegend": False, "hovertemplate": "%{x}: %{y}<extra></extra>"}
        fig.add_scatter(x=part[x].to_list(), y=part[y].to_list(), **dots, **common)
        label = f"{colour} = {name}" if colour else "median"
        line = {"mode": "lines+markers", "name": label, "showlegend": True}
        fig.add_scatter(x=middle[x].to_list(), y=middle[y].to_list(), **line, **common)
    fig.update_xaxes(title=x)
    fig.update_yaxes(title=y)
    return fig
