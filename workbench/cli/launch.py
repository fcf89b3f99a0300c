"""``workbench launch SLUG --nproc N``: a program on several ranks through torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.options import refusing
from workbench.core.output import say

app = typer.Typer()


@app.command("launch")
def launch_command(
    slug: Annotated[
        str, typer.Argument(metavar="SLUG", help="op_routed_block, op_expert_parallel or fig74_submission_regimes.")
    ],
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Ranks on this machine.")] = 2,
    backend: Annotated[
        str | None, typer.Option(help="nccl (a GPU per rank, NVSHMEM) or gloo (CPU); default: by the GPUs there are.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="T[,T...]", help="Tokens per rank; a list gives each rank its own.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed, and as many that are profiled.")] = 5,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a rank waits for another.")] = 120.0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds for the whole run.")] = 900.0,
    out: Annotated[Path, typer.Option(help="Folder for rows, traces and logs.")] = Path("out/launch"),
) -> None:
    """Run the routed path or whole training steps on several ranks; per-rank rows, traces and skew.

    Exit status 1 when a rank fails or a parity budget is exceeded.
    """
    from workbench.measure.launch import RanksError, check, default_backend, launch, program_of
    from workbench.measure.ranks import Job

    with refusing(ValueError):
        chosen = backend or default_backend(nproc)
        cuda = chosen == "nccl"
        given = parse_tokens(tokens) if tokens else ((4096,) if cuda else (32,))
        job = Job(
            out=str(out),
            program=program_of(slug),
            backend=chosen,
            tokens=given,
            small=not cuda,
            steps=steps,
            timeout_s=timeout,
            limit_s=limit,
        )
        check(job, nproc)
    try:
        rows = launch(job, nproc)
    except RanksError as error:
        say(f"workbench launch: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(int(not show(rows, out)))


def parse_tokens(text: str) -> tuple[int, ...]:
    """Read ``4096`` or ``4096,4000``.

    Raises:
        ValueError: not whole numbers.
    """
    try:
        return tuple(int(t) for t in text.split(","))
    except ValueError:
        raise ValueError(f"--tokens {text!r}: expected whole numbers, e.g. 4096 or 4096,4000") from None


def show(rows: list[dict[str, Any]], out: Path) -> bool:
    """Print parity, times per rank and Table 51's skews; True where parity holds."""
    from workbench.models.metrics import busiest_over_mean
    from workbench.traces.folder import analyse_folder

    start = next(r for r in rows if r["section"] == "start")
    say(f"{start['ranks']} ranks on {start['device']}, transport {start['transport']}")
    parity = [r for r in rows if r["section"] == "parity"]
    if parity:
        worst = max(parity, key=lambda r: r["error"] / r["budget"])
        verdict = "holds" if all(r["holds"] for r in parity) else "FAILS"
        say(
            f"parity with one rank {verdict}: {len(parity)} tensors, worst {worst['path']} {worst['tensor']} on rank "
            f"{worst['rank']}, relative error {worst['error']:.1e} of {worst['budget']:.0e}"
        )
    for r in (r for r in rows if r["section"] == "step"):
        say(
            f"rank {r['rank']} {r['path']}: median {r['time_us_p50']:.1f} us (p20 {r['time_us_p20']:.1f}, "
            f"p80 {r['time_us_p80']:.1f}), {r['tokens']} tokens"
        )
    received = [r["received"] for r in rows if r["section"] == "routes" and r["path"] == "rowwise"]
    if received and sum(received):
        skew = busiest_over_mean(received)
        say(f"Table 51, rank skew of routes: busiest rank over mean {skew:.3f} (rows {received})")
    report = analyse_folder(out / "traces")
    for s in report.skew:
        say(
            f"Table 51, {s['step']}: {s['ranks']} ranks start within {s['start_spread_us']:.1f} us, durations differ "
            f"by {s['duration_spread_us']:.1f} us, slowest rank {s['slowest_rank']}"
        )
    say(f"rows {out / 'rows.json'}, traces {out / 'traces'}")
    return all(r["holds"] for r in parity)
