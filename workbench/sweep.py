"""One notebook over a grid of parameters, as Dask tasks: on this machine, or on any Dask cluster by address.

A run's folder is named by the hash of notebook, code, packages, data and parameters and appears by one rename, so that
runs are never done twice, however workers, scheduler or driver die, and never half there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.experiment import RESULT_MIME
from workbench.suite.catalog import Notebook
from workbench.suite.fingerprint import fingerprint
from workbench.suite.process import prepare_folder, run_one, write_json

RUNS = "runs"
ATTEMPTS = 3


def grid(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the given values, in order, the last name varying fastest."""
    return [dict(zip(values, combination)) for combination in itertools.product(*values.values())]


def run_task(notebook: str, params: dict[str, Any], root: str, mark: str, timeout_s: float) -> dict[str, Any]:
    """Run one point of a sweep on a worker, unless its folder is already there; return its outcome.

    Two workers may hold the same point when one was thought dead: each writes under its own name and the first rename
    wins.
    """
    runs = Path(root) / RUNS
    target = runs / mark[:16]
    if (found := finished(target)) is not None:
        return found
    temporary = runs / f".{mark[:16]}-{uuid.uuid4().hex[:8]}"
    try:
        outcome = run_one(notebook, params, temporary, timeout_s, fingerprint=mark)
        slug = Path(notebook).stem
        write_json(temporary / "outcome.json", outcome | {"rows": rows_of(temporary / f"{slug}.ipynb")})
        try:
            os.replace(temporary, target)
        except OSError:
            if (found := finished(target)) is not None:
                return found
            # What stands there is not finished (a failed run of before): this one takes its place.
            shutil.rmtree(target, ignore_errors=True)
            os.replace(temporary, target)
        return json.loads((target / "outcome.json").read_text(encoding="utf-8"))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def finished(folder: Path) -> dict[str, Any] | None:
    """Return the outcome of a run that passed (or whose claims failed), None where it must be run."""
    try:
        outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return outcome if outcome.get("status") in ("passed", "claim_failed") else None


def rows_of(executed: Path) -> list[dict[str, Any]]:
    """Return the table rows that an executed notebook reported."""
    try:
        cells = json.loads(executed.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        return []
    found: list[dict[str, Any]] = []
    for cell in cells:
        for output in cell.get("outputs", []):
            found = output.get("data", {}).get(RESULT_MIME, {}).get("table", found)
    return found


@contextlib.contextmanager
def cluster(address: str | None, workers: int, gpus: int) -> Iterator[Any]:
    """Yield a Dask client: of the cluster at `address`, or of one started here for the sweep.

    A local cluster has `workers` processes of one thread (notebooks depend on their process), and gives each GPU to
    one worker as the resource ``GPU``, so that two notebooks that measure never share one.
    """
    # Read when distributed is first imported, here and in the workers.
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "error")
    import dask
    from distributed import Client, Nanny, Scheduler, SpecCluster

    if address is not None:
        with Client(address, timeout="20s") as client:
            yield client
        return
    specification = {
        i: {
            "cls": Nanny,
            "options": {
                "nthreads": 1,
                "resources": {"GPU": 1} if i < gpus else {},
                "env": {"CUDA_VISIBLE_DEVICES": str(i)} if i < gpus else {},
            },
        }
        for i in range(max(workers, gpus))
    }
    # A worker that dies takes nothing with it but its own run; the scheduler must not give a point up too soon.
    dask.config.set({"distributed.scheduler.allowed-failures": 20, "distributed.worker.daemon": False})
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}}
    local = tempfile.mkdtemp(prefix="workbench-dask-")
    for spec in specification.values():
        spec["options"]["local_directory"] = local
    try:
        with (
            SpecCluster(workers=specification, scheduler=scheduler, silence_logs="ERROR") as started,
            Client(started) as client,
        ):
            yield client
    finally:
        shutil.rmtree(local, ignore_errors=True)


def pending(notebook: Notebook, points: Sequence[Mapping[str, Any]], out: Path) -> int:
    """Return how many of the points are not finished in `out`."""
    marks = {fingerprint(notebook, dict(p)) for p in points}
    return sum(finished(out / RUNS / m[:16]) is None for m in marks)


def sweep(
    notebook: Notebook,
    points: Sequence[Mapping[str, Any]],
    out: Path,
    client: Any,
    *,
    timeout_s: float = 900.0,
    resources: Mapping[str, float] | None = None,
    on_progress: Callable[[int, int, dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run every point that is not finished yet and write ``sweep.json``, ``table.csv`` and ``index.html``.

    Args:
        notebook: what is run.
        points: checked parameters of each run.
        out: folder, shared by all workers.
        client: Dask client; None where nothing is pending.
        timeout_s: limit for each run.
        resources: Dask resources that a run takes, e.g. ``{"GPU": 1}``.
        on_progress: called with (finished, all, outcome).
    Returns:
        The summary as in ``sweep.json``: ``slug, runs`` (one a point: ``key, params, status, ...``).
    """
    from distributed import as_completed

    prepare_folder(out)
    prepare_folder(out / RUNS)
    marks = [fingerprint(notebook, dict(p)) for p in points]
    outcomes: dict[str, dict[str, Any]] = {}
    futures: dict[Any, str] = {}
    for mark, point in dict(zip(marks, points)).items():
        if (found := finished(out / RUNS / mark[:16])) is not None:
            outcomes[mark] = found
            continue
        future = client.submit(
            run_task,
            str(notebook.path.resolve()),
            dict(point),
            str(out.resolve()),
            mark,
            timeout_s,
            key=f"{notebook.slug}-{mark[:16]}-{uuid.uuid4().hex[:6]}",
            pure=False,
            retries=ATTEMPTS - 1,
            resources=dict(resources or {}),
        )
        futures[future] = mark
    total = len(outcomes) + len(futures)
    for future in as_completed(list(futures)):
        mark = futures[future]
        try:
            outcomes[mark] = future.result()
        except Exception as error:
            # The folder decides: a run may have finished although its worker died before it could answer.
            outcomes[mark] = finished(out / RUNS / mark[:16]) or {
                "status": "lost",
                "error": {"kind": type(error).__name__, "message": str(error)[:500]},
            }
        if on_progress is not None:
            on_progress(len(outcomes), total, outcomes[mark])
    runs = [
        {"key": m[:16], "params": dict(p)}
        | {k: v for k, v in outcomes[m].items() if k not in ("params", "fingerprint")}
        for m, p in zip(marks, points)
    ]
    summary = {"slug": notebook.slug, "names": sorted({n for p in points for n in p}), "runs": runs}
    write_json(out / "sweep.json", summary)
    table = tidy(summary)
    temporary = out / ".table.csv.tmp"
    table.write_csv(temporary)
    os.replace(temporary, out / "table.csv")
    write_page(summary, out)
    return summary


def tidy(summary: Mapping[str, Any]) -> Any:
    """Return one polars table over all runs: a column per swept parameter, ``status``, then the rows' own columns."""
    import polars as pl

    flat = []
    for run in summary["runs"]:
        keys = {n: _scalar(run["params"].get(n)) for n in summary["names"]} | {
            "run": run["key"],
            "status": run["status"],
        }
        for row in run.get("rows") or [{}]:
            flat.append(keys | {(f"table_{k}" if k in keys else k): _scalar(v) for k, v in row.items()})
    return pl.DataFrame(flat, infer_schema_length=None)


def _scalar(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def load_sweep(folder: str | Path) -> dict[str, Any]:
    """Read a finished sweep's summary.

    Raises:
        FileNotFoundError: the folder holds no sweep.
    """
    path = Path(folder) / "sweep.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{Path(folder).name!r} holds no sweep.json; run: workbench sweep SLUG -p name=a,b --out FOLDER"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def compare(
    summary: Mapping[str, Any], *, x: str | None = None, y: str | None = None, colour: str | None = None
) -> Any:
    """Draw one numeric column of the swept tables against one swept parameter.

    Args:
        summary: of `load_sweep`.
        x: swept parameter; the first with more than one value when None.
        y: column; the first numeric one that is not swept when None.
        colour: column or parameter that tells the lines apart; the second swept parameter when None.
    Raises:
        ValueError: no such column; the message lists those that are.
    """
    import plotly.graph_objects as go
    import polars as pl

    from workbench.plotting import SERIES, figure

    table = tidy(summary)
    names = [n for n in summary["names"] if table[n].n_unique() > 1] or list(summary["names"]) or ["run"]
    x = x or names[0]
    numeric = [c for c in table.columns if table[c].dtype.is_numeric() and c not in summary["names"]]
    y = y or (numeric[0] if numeric else None)
    colour = colour or (names[1] if len(names) > 1 else None)
    for column in (x, y, colour):
        if column is not None and column not in table.columns:
            raise ValueError(f"no column {column!r} in the sweep; it has {', '.join(table.columns)}")
    fig = figure(f"{summary['slug']}: {y or 'no numeric column'} against {x}", height=460)
    if y is None:
        return fig
    groups = table.group_by(colour, maintain_order=True) if colour else [((None,), table)]
    for i, ((name,), part) in enumerate(groups):
        part = part.filter(pl.col(y).is_not_null()).sort(x)
        middle = part.group_by(x, maintain_order=True).agg(pl.col(y).median())
        common = {
            "legendgroup": str(name),
            "line": {"color": SERIES[i % len(SERIES)]},
            "marker": {"color": SERIES[i % len(SERIES)]},
        }
        fig.add_trace(
            go.Scatter(
                x=part[x].to_list(), y=part[y].to_list(), mode="markers", opacity=0.5, showlegend=False, **common
            )
        )
        label = f"{colour} = {name}" if colour else "median"
        fig.add_trace(
            go.Scatter(x=middle[x].to_list(), y=middle[y].to_list(), mode="lines+markers", name=label, **common)
        )
    fig.update_xaxes(title=x)
    fig.update_yaxes(title=y)
    return fig


def write_page(summary: Mapping[str, Any], out: Path) -> None:
    """Write ``index.html``: the comparison figure, and each run with its parameters, claims and executed notebook."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("workbench", "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    figure = compare(summary).to_html(full_html=False, include_plotlyjs="directory")
    from plotly.offline import get_plotlyjs

    script = out / "plotly.min.js"
    if not script.is_file():
        temporary = out / ".plotly.min.js.tmp"
        temporary.write_text(get_plotlyjs(), encoding="utf-8")
        os.replace(temporary, script)
    text = environment.get_template("sweep.html.j2").render(summary=summary, figure=figure)
    temporary = out / ".index.html.tmp"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, out / "index.html")
