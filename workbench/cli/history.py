"""``workbench history``: what archived metric histories hold, stitched, and medians over windows of steps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.options import Json, refusing
from workbench.core.output import plain, refuse

if TYPE_CHECKING:
    from workbench.training.archive import Run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Archived metric histories (CSV, TSV, JSON lines, parquet; tracker exports): stitch them, compare windows.",
)
Archive = Annotated[Path, typer.Argument(help="A file, or a folder of files; a subfolder is a run.")]
Step = Annotated[str | None, typer.Option(help="Name of the step column; found among the usual names by default.")]
Order = Annotated[str, typer.Option(help="Which segment is newer: the later one by 'name', or by first step: 'start'.")]


@app.command("stitch")
def stitch(
    archive: Archive,
    out: Annotated[Path | None, typer.Option(help="Write the stitched rows here, .csv or .parquet.")] = None,
    step: Step = None,
    order: Order = "name",
    as_json: Json = False,
) -> None:
    """Stitch each run's segments, newest winning at an overlapping step, and say what was done."""
    import polars as pl

    from workbench.core.files import replacing

    if out is not None and out.suffix.lower() not in (".csv", ".parquet"):
        refuse(f"--out {out}: expected .csv or .parquet", "history")
    if out is not None and archive.resolve() in (out.resolve(), *out.resolve().parents):
        refuse(f"--out {out}: expected a file outside the archive, where it would be read as a segment", "history")
    runs = _read(archive, step, order)
    tables, report = [], []
    for run in runs:
        table, merged = run.stitched()
        keys = {"run": run.title, "seed": run.seed}
        table = table.rename({c: f"metric_{c}" for c in keys if c in table.columns})
        tables.append(table.select(*(pl.lit(v).alias(k) for k, v in keys.items()), pl.all()))
        report.append(
            keys
            | {"metrics": [c for c in table.columns if c not in ("step", "segment")], "segments": list(merged.segments)}
            | {"overlaps": merged.overlaps, "gaps": [list(g) for g in merged.gaps], "notes": run.notes}
        )
        if not as_json:
            print(f"run {plain(run.title)}, seed {run.seed}")
            for line in (*merged.lines(), *run.notes, f"metrics: {', '.join(report[-1]['metrics'])}"):
                print(f"  {plain(line)}")
    if out is not None:
        stitched = pl.concat(tables, how="diagonal")
        write = stitched.write_csv if out.suffix.lower() == ".csv" else stitched.write_parquet
        with refusing(OSError, group="history", before=f"--out {out}: "), replacing(out) as temporary:
            write(temporary)
        if not as_json:
            print(f"wrote {len(stitched)} rows to {plain(str(out))}")
    if as_json:
        print(json.dumps(report, indent=1))


@app.command("window")
def window(
    archive: Archive,
    metric: Annotated[list[str], typer.Option("--metric", "-m", help="Metric column; repeatable.")],
    first: Annotated[int, typer.Option(help="First step of the window.")],
    last: Annotated[int, typer.Option(help="Last step of the window, inclusive.")],
    step: Step = None,
    order: Order = "name",
    as_json: Json = False,
) -> None:
    """Medians over a window of steps, with 95 % block-bootstrap intervals, per run."""
    from workbench.training.histories import window_median

    if first > last:
        refuse(f"--first {first}: expected at most --last ({last})", "history")
    rows: list[dict[str, Any]] = []
    for run in _read(archive, step, order):
        table, _ = run.stitched()
        for name in metric:
            with refusing(ValueError, group="history", before=f"run {run.title!r}: "):
                found = window_median(table, name, first, last)
            rows.append({"run": run.title, "seed": run.seed, "metric": name, "first": first, "last": last} | found)
    if as_json:
        # JSON has neither NaN (no value) nor infinity (a loss that diverged).
        finite = [{k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in r.items()} for r in rows]
        print(json.dumps(finite, indent=1, allow_nan=False))
        return
    for r in rows:
        where = f"{plain(r['run'])}, seed {r['seed']}, {plain(r['metric'])}"
        found = "no value"
        if r["rows"]:
            found = f"median {r['median']:.6g}, 95 % interval {r['low']:.6g} to {r['high']:.6g},"
        print(f"{where}: {found} over {r['rows']} rows of steps {first} to {last}")


def _read(archive: Path, step: str | None, order: str) -> list[Run]:
    from workbench.training.archive import read_archive

    with refusing(ValueError, OSError, group="history"):
        runs = read_archive(archive, step=step, order=order)  # type: ignore[arg-type]
    return runs or refuse(f"{archive.name}: expected a run with metrics, found none", "history")
