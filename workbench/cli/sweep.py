"""``workbench sweep SLUG -p name=a,b,c``: notebooks over a grid of parameters, on Dask workers."""

from __future__ import annotations

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.options import Scheduler, Source, Timeout, Workers, default_jobs, refusing

app = typer.Typer()


@app.command("sweep")
def sweep_command(
    slugs: Annotated[
        list[str],
        typer.Argument(metavar="SLUG", help="Notebook to run at every point; several, or groups, run side by side."),
    ],
    param: Annotated[
        list[str] | None,
        typer.Option(
            "-p",
            "--param",
            metavar="NAME=A,B,C",
            help="Values of one parameter; for one that is itself a list, a JSON list of lists.",
        ),
    ] = None,
    source: Source = None,
    scheduler: Scheduler = None,
    resources: Annotated[
        str | None,
        typer.Option(
            help="Dask resources that one run takes; GPU=1 by itself for runs that may measure where workers offer GPU."
        ),
    ] = None,
    workers: Workers = None,
    timeout: Timeout = 900.0,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; on a shared file system for several machines.")
    ] = Path("out/sweep"),
    strict: Annotated[bool, typer.Option("--strict", help="Exit status 1 for a failed claim, too.")] = False,
) -> None:
    """Run notebooks over a grid of parameters; finished points are never run again.

    Several notebooks (or groups) each get a folder of their own under --out; all share the cluster.
    """
    from workbench.suite import select
    from workbench.suite.fingerprint import gpus
    from workbench.suite.sweep import FINISHED, cluster, pending

    with refusing(ValueError):
        notebooks = select(slugs)
        work = {n.slug: (n, parse_points(n, param or [], source)) for n in notebooks}
        needs = parse_resources(resources)
    folders = {slug: out / slug if len(work) > 1 else out for slug in work}
    everything = sum(len(points) for _, points in work.values())
    left = sum(pending(n, points, folders[n.slug]) for n, points in work.values())
    typer.echo(f"{everything} points, {left} to run")
    local_gpus = len(gpus()) if any(n.may_measure(p) for n, points in work.values() for p in points) else 0
    started = cluster(scheduler, workers or default_jobs(), local_gpus)
    stopped = f"; what is finished stays in {out}, run the same command to go on"
    with (
        refusing(OSError, TimeoutError, before="sweep stopped: ", after=stopped),
        started if left else contextlib.nullcontext() as client,
    ):
        if client is not None:
            typer.echo(f"running on {client.scheduler.address}; dashboard {client.dashboard_link}")
        summaries = run_all(work, folders, client, timeout, needs)
    good = FINISHED[:1] if strict else FINISHED
    bad = sum(r["status"] not in good for s in summaries for r in s["runs"])
    pages = ", ".join(str(folders[s["slug"]] / "index.html") for s in summaries[:3]) + ", …" * (len(summaries) > 3)
    claims = sum(r["status"] == "claim_failed" for s in summaries for r in s["runs"])
    if claims and not strict:
        typer.echo(
            f"claims of the report fail at {claims} of them, as may be with other parameters; --strict counts that"
        )
    typer.echo(f"{everything - bad} of {everything} points {'passed' if strict else 'finished'}; {pages}")
    if any(r["status"] == "lost" for s in summaries for r in s["runs"]):
        typer.echo("points were lost with the scheduler or with their workers: run the same command to go on", err=True)
    raise typer.Exit(int(bad > 0))


def run_all(work: dict, folders: dict[str, Path], client: Any, timeout_s: float, needs: dict | None) -> list[dict]:
    """Sweep every notebook over the one client, all at a time, behind one progress bar; return the summaries."""
    from workbench.suite.progress import bars
    from workbench.suite.sweep import FINISHED, default_resources, lacking, sweep

    with bars(sys.stderr) as bar:
        resources = {}
        for slug, (notebook, points) in work.items():
            resources[slug] = needs
            if needs is None:
                resources[slug] = default_resources(client, notebook, points) if client is not None else {}
            if client is not None and (why := lacking(client, resources[slug])) is not None:
                bar.console.print(f"{slug}: waiting, {why}", markup=False)

        def one(slug: str) -> dict:
            notebook, points = work[slug]
            task = bar.add_task(slug, total=len(points))

            def show(done: int, total: int, outcome: dict) -> None:
                bar.update(task, completed=done, total=total)
                if outcome["status"] not in FINISHED:
                    bar.console.print(describe_failure(outcome), markup=False)

            summary = sweep(
                notebook,
                points,
                folders[slug],
                client,
                timeout_s=timeout_s,
                resources=resources[slug],
                on_progress=show,
            )
            bar.update(task, completed=len(points), total=len(points))
            return summary

        if len(work) == 1:
            return [one(slug) for slug in work]
        with ThreadPoolExecutor(len(work)) as threads:
            return list(threads.map(one, work))


def describe_failure(outcome: dict) -> str:
    """One line about a run that did not pass."""
    error = outcome.get("error") or {}
    return f"{outcome['status']}: {outcome.get('params') or ''} {error.get('message', '')[:200]}"


def parse_points(notebook, items: list[str], source: str | None) -> list[dict]:
    """Return checked parameters for every combination, each once.

    Raises:
        ParameterError: an unknown name or a bad value.
    """
    import json

    from workbench.core.params import ParameterError
    from workbench.suite.parameters import assign, split_assignments
    from workbench.suite.sweep import grid

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
    points = [assign([notebook], point, {}, source)[notebook.slug] for point in grid(values)]
    return list({json.dumps(p, sort_keys=True): p for p in points}.values())


def parse_resources(text: str | None) -> dict[str, float] | None:
    """Read ``GPU=1,MEM=2``.

    Raises:
        ValueError: not of that form.
    """
    if text is None:
        return None
    found = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            name = ""
        if not name.strip():
            raise ValueError(f"--resources {text!r}: expected NAME=AMOUNT, e.g. GPU=1")
    return found
