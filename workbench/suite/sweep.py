"""One notebook over a grid of parameters, as Dask tasks: on this machine, or on any Dask cluster by address.

A run's folder is named by the hash of notebook, code, packages, data and parameters and appears by one rename, so that
runs are never done twice, however workers, scheduler or driver die, and never half there. Runs that failed lie apart:
nothing ever replaces or removes a finished run.
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

from workbench.core.files import replace_file
from workbench.suite.catalog import Notebook
from workbench.suite.fingerprint import code_hash, fingerprint
from workbench.suite.pages import plotly_script, raw, rendered
from workbench.suite.process import prepare_folder, run_one, write_json
from workbench.suite.verdict import cells_of, results_of
from workbench.views.sweep import compare, tidy

RUNS, FAILED_RUNS = "runs", "failed"
FINISHED = ("passed", "claim_failed")
ATTEMPTS = 3
DEATHS_ALLOWED = 20


class OtherCodeError(RuntimeError):
    """A worker would run other code than the driver, so that its result would carry a false name."""


def grid(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the given values, in order, the last name varying fastest."""
    return [dict(zip(values, combination)) for combination in itertools.product(*values.values())]


def run_task(
    notebook: str, params: dict[str, Any], root: str, mark: str, code: str, timeout_s: float
) -> dict[str, Any]:
    """Run one point of a sweep on a worker, unless it is finished already; return its outcome.

    Two workers may hold the same point when one was thought dead: each writes under its own name and the first rename
    wins.

    Raises:
        OtherCodeError: this worker's code is not the driver's.
        OutputError: the folder cannot be written.
    """
    target = Path(root) / RUNS / mark[:16]
    here = code_hash()  # slow once in each worker: before the look at what is finished, so that nothing follows it
    if (found := finished(target)) is not None:
        return found
    if here != code:
        raise OtherCodeError("this worker has another version of workbench or moe_kernels than the driver")
    temporary = Path(root) / RUNS / f".{mark[:16]}-{uuid.uuid4().hex[:8]}"
    try:
        outcome = run_one(notebook, params, temporary, timeout_s, fingerprint=mark)
        outcome["rows"] = rows_of(temporary / Path(notebook).name)
        write_json(temporary / "outcome.json", outcome)
        if outcome["status"] in FINISHED:
            try:
                os.rename(temporary, target)
            except OSError:
                if (found := finished(target)) is None:
                    raise
                return found
        else:
            _keep_failed(temporary, Path(root) / FAILED_RUNS / mark[:16])
        return outcome
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _keep_failed(temporary: Path, target: Path) -> None:
    """Show the newest failure; another worker that fails at the same moment may win."""
    shutil.rmtree(target, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rename(temporary, target)


def finished(folder: Path) -> dict[str, Any] | None:
    """Return the outcome of a run that passed (or whose claims failed), None where it must be run."""
    try:
        outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return outcome if outcome.get("status") in FINISHED else None


def rows_of(executed: Path) -> list[dict[str, Any]]:
    """Return the table rows that an executed notebook reported."""
    tables = [result["table"] for result in results_of(cells_of(executed) or []) if "table" in result]
    return tables[-1] if tables else []


@contextlib.contextmanager
def cluster(address: str | None, workers: int, gpus: int) -> Iterator[Any]:
    """Yield a Dask client: of the cluster at `address` (or whose scheduler wrote that file), or of one started here.

    A local cluster has `workers` processes of one thread (notebooks depend on their process), and gives each GPU to
    one worker as the resource ``GPU``, so that two notebooks that measure never share one.

    Raises:
        OSError: nothing answers at `address`.
    """
    # Read when distributed is first imported, here and in the workers.
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "critical")
    import dask
    from distributed import Client, Nanny, Scheduler, SpecCluster

    if address is not None:
        where: dict[str, Any] = {"scheduler_file": address} if Path(address).is_file() else {"address": address}
        try:
            client = Client(**where, timeout="20s")
        except (ValueError, TypeError, AssertionError) as error:  # no address, or a file that no scheduler wrote
            raise OSError(f"scheduler {address!r}: expected an address or a scheduler's file ({error})") from error
        with client:
            yield client
        return
    _remove_folders_of_the_dead()
    local = tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-")
    options = {"nthreads": 1, "local_directory": local, "resources": {}, "env": {}}
    specification = {i: {"cls": Nanny, "options": options} for i in range(max(workers, gpus))}
    for i in range(gpus):
        own = {"resources": {"GPU": 1}, "env": {"CUDA_VISIBLE_DEVICES": str(i)}}
        specification[i] = {"cls": Nanny, "options": options | own}
    # A worker that dies takes nothing with it but its own run; the scheduler must not give a point up too soon.
    dask.config.set({"distributed.scheduler.allowed-failures": DEATHS_ALLOWED, "distributed.worker.daemon": False})
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}}
    try:
        with (
            SpecCluster(workers=specification, scheduler=scheduler, silence_logs=True) as started,
            Client(started) as client,
        ):
            yield client
    finally:
        shutil.rmtree(local, ignore_errors=True)


_SCRATCH = "workbench-dask-"


def _remove_folders_of_the_dead() -> None:
    """Remove scratch folders of drivers that were killed outright."""
    import psutil

    for path in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        owner = path.name.removeprefix(_SCRATCH).split("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def default_resources(client: Any, notebook: Notebook, points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return ``{"GPU": 1}`` for runs that may measure, where workers offer GPUs; nothing otherwise."""
    offered = any(resources.get("GPU") for resources in _offers(client))
    return {"GPU": 1.0} if offered and any(map(notebook.may_measure, points)) else {}


def lacking(client: Any, resources: Mapping[str, float]) -> str | None:
    """Say why no run can start now, None where one can: no worker, or none that offers the resources."""
    offers = _offers(client)
    if not offers:
        return "the cluster has no worker yet"
    if any(all(offer.get(n, 0) >= v for n, v in resources.items()) for offer in offers):
        return None
    wanted = ", ".join(f"{n}={v:g}" for n, v in resources.items())
    return f"no worker offers {wanted} (start them with: dask worker --resources {wanted!r})"


def _offers(client: Any) -> list[dict[str, float]]:
    """Return the resources of each worker."""
    return [w.get("resources", {}) for w in client.scheduler_info(n_workers=-1)["workers"].values()]


def pending(notebook: Notebook, points: Sequence[Mapping[str, Any]], out: Path) -> int:
    """Return how many different points are not finished in `out`."""
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
        The summary as in ``sweep.json``: ``slug, runs`` (one a point: ``key, params, status, folder, ...``).
    Raises:
        OutputError: `out` cannot be written.
        OSError: the scheduler is gone.
    """
    from distributed import as_completed

    for folder in (out, out / RUNS, out / FAILED_RUNS):
        prepare_folder(folder)
    by_mark = {fingerprint(notebook, dict(p)): p for p in points}
    outcomes: dict[str, dict[str, Any]] = {}
    futures: dict[Any, str] = {}
    how = {"pure": False, "retries": ATTEMPTS - 1, "resources": dict(resources or {})}
    for mark, point in by_mark.items():
        if (found := finished(out / RUNS / mark[:16])) is not None:
            outcomes[mark] = found
            continue
        task = (str(notebook.path.resolve()), dict(point), str(out.resolve()), mark, code_hash(), timeout_s)
        key = f"{notebook.slug}-{mark[:16]}-{uuid.uuid4().hex[:6]}"
        futures[client.submit(run_task, *task, key=key, **how)] = mark
    total = len(outcomes) + len(futures)
    for future in as_completed(list(futures)) if futures else ():
        mark = futures[future]
        outcomes[mark] = _outcome_of(future, out / RUNS / mark[:16])
        if on_progress is not None:
            on_progress(len(outcomes), total, outcomes[mark])
    _remove_leftovers(out, [m for m in outcomes if outcomes[m]["status"] in FINISHED])
    runs = []
    for mark, point in by_mark.items():
        outcome = outcomes[mark]
        kept = None if outcome["status"] == "lost" else RUNS if outcome["status"] in FINISHED else FAILED_RUNS
        folder = f"{kept}/{mark[:16]}" if kept and (out / kept / mark[:16]).is_dir() else None
        rest = {k: v for k, v in outcome.items() if k not in ("params", "fingerprint")}
        runs.append({"key": mark[:16], "folder": folder, "params": dict(point)} | rest)
    summary = {"slug": notebook.slug, "names": sorted({n for p in points for n in p}), "runs": runs}
    write_json(out / "sweep.json", summary)
    replace_file(out / "table.csv", tidy(summary).write_csv())
    write_page(summary, out)
    return summary


def _outcome_of(future: Any, folder: Path) -> dict[str, Any]:
    """Return what became of a task; the folder decides, for a worker may die before it can answer."""
    try:
        return future.result()
    except Exception as error:
        # A cancelled future is how a lost scheduler shows.
        return finished(folder) or {
            "status": "lost",
            "error": {"kind": type(error).__name__, "message": str(error)[:500] or "the scheduler is gone"},
        }


def _remove_leftovers(out: Path, marks: Sequence[str]) -> None:
    """Remove what killed workers left of runs that others finished, and failures since overcome."""
    for mark in marks:
        for path in (out / RUNS).glob(f".{mark[:16]}-*"):
            shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(out / FAILED_RUNS / mark[:16], ignore_errors=True)


def write_page(summary: Mapping[str, Any], out: Path) -> None:
    """Write ``index.html``: the comparison figure, and each run with its parameters, claims and executed notebook."""
    figure = compare(summary).to_html(
        full_html=False,
        include_plotlyjs="directory",
        post_script="Plotly.relayout('{plot_id}', {'font.color': getComputedStyle(document.body).color, "
        "paper_bgcolor: 'transparent'});",
    )
    plotly_script(out)
    replace_file(out / "index.html", rendered("sweep", summary=summary, figure=raw(figure)))
