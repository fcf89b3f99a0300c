"""``workbench sweep SLUG -p name=a,b,c``: a grid of parameters over Dask workers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command("sweep")
def sweep_command(
    slug: Annotated[str, typer.Argument(help="Notebook to run at every point.")],
    param: Annotated[
        list[str] | None,
        typer.Option(
            "-p", "--param", metavar="NAME=A,B,C", help="Values of one parameter; list values as JSON lists of lists."
        ),
    ] = None,
    source: Annotated[str | None, typer.Option(help="auto, model, recorded, live or report.")] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Address of a Dask scheduler; a local cluster when absent.")
    ] = None,
    resources: Annotated[
        str | None,
        typer.Option(help="Dask resources that one run takes, e.g. GPU=1; chosen by itself for measuring runs here."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes of the local cluster; default: cores, at most 4.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Limit for each run, in seconds.")] = 900.0,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; on a shared file system for several machines.")
    ] = Path("out/sweep"),
) -> None:
    """Run one notebook over a grid of parameters; finished points are never run again."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from workbench.cli.suite import _refuse, default_jobs
    from workbench.suite import OutputError, ParameterError, SelectionError, select
    from workbench.suite.fingerprint import gpus
    from workbench.suite.runs import may_measure
    from workbench.sweep import cluster, pending, sweep

    try:
        notebook = select([slug])[0]
        points = parse_points(notebook, param or [], source)
        needs = parse_resources(resources)
    except (ParameterError, SelectionError, ValueError) as error:
        _refuse(str(error))
    if needs is None:
        needs = {"GPU": 1.0} if scheduler is None and any(may_measure(notebook, p) for p in points) else {}
    failed = 0
    left = pending(notebook, points, out)
    typer.echo(f"{len(points)} points, {len(points) - left} finished before")
    started = cluster(scheduler, workers or default_jobs(), len(gpus()) if needs.get("GPU") else 0)
    try:
        with started if left else contextlib.nullcontext() as client:
            if client is not None:
                typer.echo(f"running on {client.scheduler.address}; dashboard {client.dashboard_link}")
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=Console(stderr=True)) as bar:
                task = bar.add_task(slug, total=len(points))

                def show(done: int, total: int, outcome: dict) -> None:
                    bar.update(task, completed=done, total=total)
                    if outcome["status"] not in ("passed", "claim_failed"):
                        bar.console.print(describe_failure(outcome))

                summary = sweep(notebook, points, out, client, timeout_s=timeout, resources=needs, on_progress=show)
    except (OutputError, OSError, TimeoutError) as error:
        _refuse(f"sweep stopped: {error}; what is finished stays in {out}, run the same command to go on")
    failed = sum(r["status"] not in ("passed", "claim_failed") for r in summary["runs"])
    typer.echo(f"{len(summary['runs']) - failed} of {len(summary['runs'])} points finished; {out / 'index.html'}")
    raise typer.Exit(int(failed > 0))


def describe_failure(outcome: dict) -> str:
    """One line about a run that did not pass."""
    error = outcome.get("error") or {}
    return f"{outcome['status']}: {outcome.get('params') or ''} {error.get('message', '')[:200]}"


def parse_points(notebook, items: list[str], source: str | None) -> list[dict]:
    """Return checked parameters for every combination.

    Raises:
        ParameterError: an unknown name or a bad value.
    """
    import json

    from workbench.suite.parameters import ParameterError, assign, split_assignments
    from workbench.sweep import grid

    values = {}
    for name, text in split_assignments(items).items():
        if text.lstrip().startswith("["):
            try:
                values[name] = json.loads(text)
            except json.JSONDecodeError as error:
                raise ParameterError(f"parameter {name!r}: {text!r} is not a JSON list: {error}") from None
        else:
            values[name] = [part.strip() for part in text.split(",") if part.strip()]
        if not values[name]:
            raise ParameterError(f"parameter {name!r}: expected at least one value, got {text!r}")
    return [assign([notebook], point, {}, source)[notebook.slug] for point in grid(values)]


def parse_resources(text: str | None) -> dict[str, float] | None:
    """Read ``GPU=1,MEM=2``.

    Raises:
        ValueError: not of that form.
    """
    if text is None:
        return None
    found = {}
    for part in text.split(","):
        name, sep, amount = part.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            sep = ""
        if not sep or not name.strip():
            raise ValueError(f"--resources {text!r}: expected NAME=AMOUNT, e.g. GPU=1")
    return found
