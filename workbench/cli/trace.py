"""``workbench trace``: where a real profiler trace waits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.folder import folder_command

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Where a real profiler trace waits, and what would help."
)

File = Annotated[Path, typer.Argument(help="Kineto .json or .json.gz, Nsight Systems .sqlite, or a folder of ranks.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; times are integer nanoseconds.")]
WindowText = Annotated[
    str,
    typer.Option(
        "--window", help="all, steps, step:N, a range's name, or A:B (ns, or +1ms:+5ms from the first operation)."
    ),
]

app.command("folder")(folder_command)


def _fail(message: object, code: int = 2) -> typer.Exit:
    typer.echo(f"workbench trace: {message}", err=True)
    return typer.Exit(code)


def _traces(path: Path) -> list[Any]:
    from workbench.traces import TraceError, read, read_folder

    try:
        return list(read_folder(path)) if path.is_dir() else [read(path)]
    except (TraceError, OSError) as error:
        raise _fail(error) from error


def _window(trace: Any, text: str) -> Any:
    from workbench.traces import TraceError
    from workbench.traces.ranges import parse_window

    try:
        return parse_window(trace, text)
    except TraceError as error:
        raise _fail(error) from error


def _print(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1, allow_nan=False)
    sys.stdout.write("\n")


@app.command()
def summary(file: File, as_json: AsJson = False, window: WindowText = "all") -> None:
    """Idle time by cause, headroom, waits with their source, and what was dropped."""
    from workbench.traces.idle import Analysis
    from workbench.traces.ranges import rank_skew, table51
    from workbench.traces.summary import summarise

    found = _traces(file)
    reports, tables = [], []
    for trace in found:
        analysis = Analysis(trace)
        chosen = _window(trace, window)
        reports.append(summarise(analysis, chosen))
        tables.append(table51(analysis, chosen))
    if as_json:
        if file.is_dir():
            named = [{"source": t.source, "rank": t.rank, **r} for t, r in zip(found, reports)]
            _print({"schema": 1, "ranks": named, "rank_skew": rank_skew(found)})
        else:
            _print(reports[0])
        return
    for trace, report, table in zip(found, reports, tables):
        _show(trace.source, report, table)
    if file.is_dir():
        for row in rank_skew(found):
            typer.echo(
                f"rank {row['rank']} {row['step']}: {row['duration_ns'] / 1e3:.1f} us, starts "
                f"{row['start_skew_ns'] / 1e3:.1f} us "
                f"after the first rank, {row['duration_skew_ns'] / 1e3:.1f} us longer than the shortest"
            )


def _show(source: str, report: dict[str, Any], table: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(source, style="bold"))
    view = Table(
        "device",
        "window us",
        "busy us",
        "idle us",
        "idle by cause, us",
        "headroom us (mean, max)",
        "launch to start us (p50, p95)",
    )
    for d in report["devices"]:
        causes = "\n".join(f"{k} {v / 1e3:.1f}" for k, v in d["idle_by_cause_ns"].items() if v)
        distance = d["launch_to_start_us"]
        view.add_row(
            f"{d['process']} / {d['device']}",
            f"{(d['window_ns'][1] - d['window_ns'][0]) / 1e3:.1f}",
            f"{d['busy_ns'] / 1e3:.1f}",
            f"{d['idle_ns'] / 1e3:.1f}",
            causes,
            f"{d['headroom_us']['mean']:.1f}, {d['headroom_us']['max']:.1f}",
            "–" if distance["p50"] is None else f"{distance['p50']:.1f}, {distance['p95']:.1f}",
        )
    console.print(view)
    waits = [w for w in report["waits"] if w["blocking"]]
    if waits:
        listing = Table("wait", "count", "total us", "line", "op", "range", title="Host waits", title_justify="left")
        groups: dict[tuple[Any, ...], list[int]] = {}
        for w in waits:
            groups.setdefault((w["kind"], w["line"], w["op"], w["range"]), []).append(w["duration_ns"])
        for key, times in sorted(groups.items(), key=lambda g: -sum(g[1]))[:40]:
            listing.add_row(
                *(Text(str(v)) for v in (key[0], len(times), f"{sum(times) / 1e3:.1f}", *(k or "–" for k in key[1:])))
            )
        console.print(listing)
    for row in table:
        console.print(
            Text(
                "Table 51: " + ", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
            )
        )
    for key, n in report["dropped"].items():
        console.print(Text(f"dropped: {key} {n}"))
    for note in report["warnings"]:
        console.print(Text(f"note: {note}"))


@app.command()
def verify(
    file: File,
    window: WindowText = "all",
    idle_threshold: Annotated[
        float, typer.Option("--idle-threshold", help="Longest tolerated submission-bound idle interval, us.")
    ] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Is it synchronization-free? Exit status 0 yes, 1 no, 2 cannot tell (or unreadable)."""
    from workbench.traces.verify import verify_trace

    verdicts = []
    for trace in _traces(file):
        try:
            verdicts.append(
                (trace, verify_trace(trace, window=_window(trace, window), idle_threshold_us=idle_threshold))
            )
        except ValueError as error:
            raise _fail(error) from error
    if as_json:
        rows = [{"source": t.source, "rank": t.rank, **v.as_dict()} for t, v in verdicts]
        _print(rows[0] if not file.is_dir() else {"schema": 1, "ranks": rows})
    else:
        for trace, verdict in verdicts:
            typer.echo(f"{trace.source}: {verdict}")
    codes = [v.exit_code for _, v in verdicts]
    raise typer.Exit(1 if 1 in codes else max(codes))


@app.command()
def whatif(
    file: File,
    remove_waits: Annotated[
        bool, typer.Option("--remove-waits", help="Remove host waits; those of LINE only, where it is given.")
    ] = False,
    line: Annotated[
        str | None, typer.Argument(metavar="[LINE]", help="Text of a source line, operator or range.")
    ] = None,
    host_scale: Annotated[
        float, typer.Option("--host-scale", help="Factor on host cost (0.5: a path twice as fast).")
    ] = 1.0,
    device_scale: Annotated[
        float, typer.Option("--device-scale", help="Factor on device time (0.5: a GPU twice as fast).")
    ] = 1.0,
    launches: Annotated[
        int,
        typer.Option("--merge-launches", help="Merge this many successive launches of a stream into one submission."),
    ] = 1,
    window: WindowText = "all",
    as_json: AsJson = False,
) -> None:
    """What would a change gain? Replays the trace in the queue model; the assumptions are printed with the answer."""
    from workbench.traces import TraceError
    from workbench.traces.replay import what_if

    traces = _traces(file)
    if len(traces) != 1:
        raise _fail("what-if replays one trace; give one file of the folder")
    waits: bool | str = line if remove_waits and line else remove_waits
    try:
        answer = what_if(
            traces[0],
            remove_waits=waits,
            host_scale=host_scale,
            device_scale=device_scale,
            merge_launches=launches,
            window=_window(traces[0], window),
        )
    except (TraceError, ValueError) as error:
        raise _fail(error) from error
    if as_json:
        _print(answer)
        return
    typer.echo(
        f"measured {answer['measured_us']:.1f} us, replayed unchanged {answer['replayed_us']:.1f} us, "
        f"predicted {answer['predicted_us']:.1f} us"
    )
    typer.echo(
        f"device idle: measured {answer['measured_idle_us']:.1f} us, predicted {answer['predicted_idle_us']:.1f} us"
    )
    typer.echo("assumptions:")
    for text in answer["assumptions"]:
        typer.echo(f"- {text}")
