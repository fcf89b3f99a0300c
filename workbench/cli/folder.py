"""``workbench trace folder DIR``: one trace per rank, read in parallel."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.options import Json, Scheduler, Window, Workers, default_jobs, refusing
from workbench.core.output import refuse, say

APART_US = 60e6


def folder_command(
    folder: Annotated[Path, typer.Argument(help="Folder with one trace per rank.")],
    processes: Workers = None,
    scheduler: Scheduler = None,
    window: Window = "all",
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
) -> None:
    """Summarise every rank's trace, the skew between ranks and the ranks that stand out.

    Exit status 1 where a file was damaged; the others are reported all the same.
    """
    from rich.console import Console
    from rich.progress import track

    from workbench.suite.process import write_json
    from workbench.suite.sweep import cluster
    from workbench.traces import NAMES, TraceError, trace_files
    from workbench.traces.folder import analyse_folder

    console = Console(stderr=True)
    if out is not None and out.resolve().parent == folder.resolve() and out.name.endswith(NAMES):
        refuse(f"--out {out}: expected a file that is not read as one of the traces", "trace")
    with refusing(TraceError, OSError, group="trace"):
        ticks = iter(track(trace_files(folder), description="ranks", console=console))
        with cluster(scheduler, 1, 0) if scheduler else contextlib.nullcontext() as client:
            report = analyse_folder(
                folder,
                processes=processes or default_jobs(),
                client=client,
                window=window,
                on_rank=lambda _: next(ticks),
            )
        for _ in ticks:
            pass
        if out is not None:
            write_json(out, report.as_dict())
    if as_json:
        print(json.dumps(report.as_dict(), indent=1, allow_nan=False))
    else:
        show_report(report)
    raise typer.Exit(int(bool(report.damaged)))


def show_report(report: Any) -> None:
    """Print ranks (the first 64), skew per step, outliers and damaged files."""
    numbers = Counter(r.rank for r in report.ranks if r.rank is not None)
    shared = [n for n, count in numbers.items() if count > 1]
    say(" rank status      step us    busy us    idle us  waits   wait us  exposed comm. us")
    for r in report.ranks[:64]:
        rank, step = ("–" if v is None else v for v in (r.rank, r.step_us and f"{r.step_us:.1f}"))
        times = f"{step:>11}{r.busy_us:>11.1f}{r.idle_us:>11.1f}{r.waits:>7}{r.wait_us:>10.1f}{r.exposed_us:>18.1f}"
        say(f"{rank:>5} {r.status:<8}{times}" + (f"  {r.file}" if r.rank is None or r.rank in shared else ""))
    if len(report.ranks) > 64:
        say(f"… {len(report.ranks) - 64} more; --json prints all, with their files")
    read = [r for r in report.ranks if r.status != "failed"]
    if read and not any(r.steps for r in read):
        missing = "no profiler steps in these traces, so neither step times nor their skew"
        say(f"{missing}: record with a torch.profiler.schedule and call prof.step()")
    for number in shared:
        say(f"rank {number} is named by {numbers[number]} files: is this one run, with one trace per rank?")
    for s in [s for s in report.skew if s["ranks"] > 1][:20]:
        apart = f"within {s['start_spread_us']:.1f} us"
        if s["start_spread_us"] > APART_US:
            apart = "more than a minute apart (other clocks, or not one run)"
        slowest = s["slowest_rank"] if isinstance(s["slowest_rank"], str) else f"rank {s['slowest_rank']}"
        say(
            f"{s['step']}: {s['ranks']} ranks start {apart}; durations differ by {s['duration_spread_us']:.1f} us; "
            f"slowest is {slowest}, {s['slowest_over_median']:.2f} of the median"
        )
    for o in report.outliers[:20]:
        name = o["file"] if o["rank"] is None or o["rank"] in shared else f"rank {o['rank']}"
        say(f"stands out: {name}, {o['quantity']} {o['value']:.1f}, median {o['median']:.1f}")
    for r in report.damaged:
        say(f"damaged: {r.file}: {r.error}")
    good = len(report.ranks) - len(report.damaged)
    say(f"{good} of {len(report.ranks)} ranks whole, in {report.seconds:.1f} s")
