"""``workbench trace``: where a real profiler trace waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.folder import folder_command
from workbench.cli.options import Json, Window, refusing
from workbench.core.output import refuse, say

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Where a real profiler trace waits, and what would help."
)

File = Annotated[Path, typer.Argument(help="Kineto .json or .json.gz, Nsight Systems .sqlite, or a folder of ranks.")]

app.command("folder")(folder_command)
LISTED = 40
# What ended the idle time, in words that leave a line within 80 columns.
MEANING = {
    "submission": "launched after it had run dry",
    "sync blocked": "the host is in a wait",
    "sync rebuild": "after the wait, nothing queued",
    "turnaround": "the next one queued, to 5 us",
    "dependency": "queued behind another stream",
    "unknown": "no launch recorded",
}


def _traces(path: Path) -> list[Any]:
    from workbench.traces import TraceError, read, read_folder

    with refusing(TraceError, OSError, group="trace"):
        return list(read_folder(path)) if path.is_dir() else [read(path)]


@app.command()
def summary(file: File, as_json: Json = False, window: Window = "all") -> None:
    """Idle time by cause, headroom, waits with their source, and what was dropped; of a folder, what `folder` says."""
    from workbench.traces import TraceError
    from workbench.traces.idle import Analysis
    from workbench.traces.ranges import parse_window, table51
    from workbench.traces.summary import summarise

    if file.is_dir():
        folder_command(file, window=window, as_json=as_json)
    (trace,) = _traces(file)
    analysis = Analysis(trace)
    with refusing(TraceError, group="trace"):
        chosen = parse_window(trace, window)
    report = summarise(analysis, chosen)
    if as_json:
        print(json.dumps(report, indent=1, allow_nan=False))
    else:
        _show(trace.source, report, table51(analysis, chosen))


def _show(source: str, report: dict[str, Any], table: list[dict[str, Any]]) -> None:
    """Short lines rather than a table: they fit 80 columns, and paths stay whole for copying."""
    say(source)
    for d in report["devices"]:
        low, high = d["window_ns"]
        of_process = "" if d["process"] is None else f" of process {d['process']}"
        say(f"\ndevice {d['device']}{of_process}: {d['ops']} operations by {d['launches']} launches")
        rows = [("window", high - low), ("busy", d["busy_ns"]), ("  copies alone", d["copy_only_ns"])]
        rows += [("idle", d["idle_ns"])]
        rows += [(f"  {k.replace('_', ' ')}", v) for k, v in d["idle_by_cause_ns"].items() if v]
        for name, ns in rows:
            share = f"{100 * ns / (high - low):6.1f} %" if high > low else ""
            say(f"  {name:<18}{ns / 1e3:14.1f} us {share}  {MEANING.get(name.strip(), '')}".rstrip())
        say(f"  headroom: mean {d['headroom_us']['mean']:.1f} us, most {d['headroom_us']['max']:.1f} us")
        distance = d["launch_to_start_us"]
        if distance["p50"] is not None:
            say(f"  launch to start: median {distance['p50']:.1f} us, 95th percentile {distance['p95']:.1f} us")
    _show_waits(report["waits"])
    if table:
        say("\nmetrics as the report's Table 51 defines them")
    for row in table:
        values = [f"{k.removesuffix('_us').replace('_', ' ')} {v:.1f} us" for k, v in row.items() if k.endswith("_us")]
        where = f", device {row['device']}" if "device" in row else ""
        say(f"  {row['metric']}{where}: " + (f"{row['count']} x" if row["count"] else "none"))
        if row["count"]:
            say(f"    {', '.join(values)}")
    if report["dropped"] or report["warnings"]:
        say("")
    for key, n in report["dropped"].items():
        say(f"dropped: {key} {n}")
    for note in report["warnings"]:
        say(f"note: {note}")


def _show_waits(waits: list[dict[str, Any]]) -> None:
    """One entry a source line, with its ranges; where no line or operator is known, one a range."""
    groups: dict[tuple[Any, ...], dict[Any, list[int]]] = {}
    for w in waits:
        if w["blocking"]:
            place = (w["line"], w["op"])
            key = (w["kind"], *place, None if any(place) else w["range"])
            groups.setdefault(key, {}).setdefault(w["range"], []).append(w["duration_ns"])
    if groups:
        say("\nhost waits, longest in sum first")
    ordered = sorted(groups.items(), key=lambda g: -sum(map(sum, g[1].values())))
    for (kind, line, op, _), ranges in ordered[:LISTED]:
        times = [t for of_range in ranges.values() for t in of_range]
        say(f"  {len(times)} x {kind}, {sum(times) / 1e3:.1f} us, longest {max(times) / 1e3:.1f} us")
        for word, text in (("at", line), ("by", op), ("in", _ranges(ranges))):
            if text:
                say(f"    {word} {text}")
    if len(groups) > LISTED:
        say(f"  and {len(groups) - LISTED} more places")


def _ranges(ranges: dict[Any, list[int]]) -> str:
    """Return the ranges that hold most of the time; how much each, where there are several."""
    sums = sorted(((name, sum(times)) for name, times in ranges.items() if name), key=lambda r: -r[1])
    if len(ranges) == 1:
        return "".join(name for name, _ in sums)
    text = ", ".join(f"{name} ({ns / 1e3:.1f} us)" for name, ns in sums[:3])
    return text + (f" and {len(sums) - 3} more" if len(sums) > 3 else "")


@app.command()
def verify(
    file: File,
    window: Window = "all",
    idle_threshold: Annotated[
        float, typer.Option("--idle-threshold", help="Longest tolerated submission-bound idle interval, us.")
    ] = 20.0,
    as_json: Json = False,
) -> None:
    """Is it synchronization-free? Exit status 0 yes, 1 no, 2 cannot tell (or unreadable)."""
    from workbench.traces.ranges import parse_window
    from workbench.traces.verify import verify_trace

    verdicts = []
    for trace in _traces(file):
        with refusing(ValueError, group="trace"):
            chosen = parse_window(trace, window)
            verdicts.append((trace, verify_trace(trace, window=chosen, idle_threshold_us=idle_threshold)))
    if as_json:
        rows = [{"source": t.source, "rank": t.rank, **v.as_dict()} for t, v in verdicts]
        print(json.dumps(rows[0] if not file.is_dir() else {"schema": 1, "ranks": rows}, indent=1, allow_nan=False))
    else:
        for trace, verdict in verdicts:
            say(f"{trace.source}: {verdict}")
    codes = [v.exit_code for _, v in verdicts]
    raise typer.Exit(1 if 1 in codes else max(codes))


@app.command()
def whatif(
    file: File,
    remove_waits: Annotated[bool, typer.Option("--remove-waits", help="Remove all host waits.")] = False,
    remove_wait: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINE", help="Remove those whose source line, operator, range or call contains LINE; repeatable."
        ),
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
    window: Window = "all",
    as_json: Json = False,
) -> None:
    """What would a change gain? Replays the trace in the queue model; the assumptions are printed with the answer."""
    from workbench.traces.ranges import parse_window
    from workbench.traces.replay import gain, spans, what_if

    traces = _traces(file)
    if len(traces) != 1:
        refuse("what-if replays one trace; give one file of the folder", "trace")
    if remove_waits and remove_wait:
        refuse("--remove-waits removes every wait: expected it or --remove-wait LINE, got both", "trace")
    if "" in (remove_wait or []):
        refuse("--remove-wait: expected text of a source line, operator, range or call, got an empty one", "trace")
    waits = remove_wait or remove_waits
    with refusing(ValueError, group="trace"):
        answer = what_if(
            traces[0],
            remove_waits=waits,
            host_scale=host_scale,
            device_scale=device_scale,
            merge_launches=launches,
            window=parse_window(traces[0], window),
        )
    if as_json:
        print(json.dumps(answer, indent=1, allow_nan=False))
        return
    say(gain(answer, bool(waits) or (host_scale, device_scale, launches) != (1, 1, 1)))
    for line in spans(answer):
        say(line)
    say("assumptions:")
    for text in answer["assumptions"]:
        say(f"- {text}")
