"""Folders with one trace per rank, read in parallel: a short summary per rank, skew between ranks, outlier ranks.

One trace is in memory per process; only summaries come back. A file that cannot be read, or whose reader dies, is
reported and the others finish.
"""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from workbench.traces import TraceError, read, trace_files
from workbench.traces.holes import lost_events
from workbench.traces.skew import by_name, spread_us

OK, PARTIAL, FAILED = "ok", "partial", "failed"
COMPARED = ("step_us", "busy_us", "idle_us", "wait_us", "exposed_us")
OUTLIER_DEVIATIONS, OUTLIER_SHARE = 5.0, 0.05
_RANK = re.compile(r"rank[-_]?(\d+)", re.I)


@dataclass(frozen=True)
class RankSummary:
    """What one rank's trace says; times in us, summed over the devices of the file.

    `status` is ``ok``, ``partial`` (read, but events were lost) or ``failed`` (`error` says why). `step_us` is the
    median of the profiler's steps, None where none is named; `steps` holds (name, start ns, duration ns).
    `exposed_us` is communication that no other device work hides.
    """

    file: str
    rank: int | None = None
    status: str = OK
    error: str = ""
    operations: int = 0
    window_us: float = 0.0
    busy_us: float = 0.0
    idle_us: float = 0.0
    idle_by_cause_us: dict[str, float] = field(default_factory=dict)
    headroom_mean_us: float = 0.0
    waits: int = 0
    wait_us: float = 0.0
    communication_us: float = 0.0
    exposed_us: float = 0.0
    step_us: float | None = None
    steps: tuple[tuple[str, int, int], ...] = ()
    seconds: float = 0.0
    reader_peak_bytes: int = 0


@dataclass(frozen=True)
class FolderReport:
    """Summaries in rank order, skew per step, and the ranks that stand out.

    `skew` has a row per step: ``step, ranks, start_spread_us`` (last start minus first), ``duration_spread_us,
    slowest_rank, slowest_over_median``. `outliers` has a row per rank and quantity that lies more than 5 robust
    deviations and 5 % from the median of the ranks. Only ranks of status ``ok`` are compared.
    """

    ranks: list[RankSummary]
    skew: list[dict[str, Any]]
    outliers: list[dict[str, Any]]
    seconds: float

    @property
    def damaged(self) -> list[RankSummary]:
        """Ranks whose file was damaged, in part or whole."""
        return [r for r in self.ranks if r.status != OK]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"schema": 1, **asdict(self)}


def summarise_rank(path: str, window: str | None = None) -> RankSummary:
    """Read one rank's trace and sum it up; a file that cannot be read is a summary of status ``failed``."""
    from workbench.traces.idle import Analysis
    from workbench.traces.ranges import parse_window, steps, table51
    from workbench.traces.summary import summarise

    began, unread = time.perf_counter(), _unread(path)
    try:
        trace = read(path)
        analysis = Analysis(trace)
        span = parse_window(trace, window)
        report = summarise(analysis, span)
        table = table51(analysis, span)
    except (TraceError, OSError, ValueError, MemoryError) as error:
        return replace(unread, error=str(error) or type(error).__name__, seconds=time.perf_counter() - began)
    devices, waits = report["devices"], [w for w in report["waits"] if w["blocking"]]
    named = steps(trace)
    lost = lost_events(trace)
    communication = [r for r in table if r["metric"] == "communication exposure"]
    return RankSummary(
        file=unread.file,
        rank=trace.rank if trace.rank is not None else unread.rank,
        status=PARTIAL if lost else OK,
        error=lost,
        operations=len(trace.ops),
        window_us=sum(d["window_ns"][1] - d["window_ns"][0] for d in devices) / 1e3,
        busy_us=sum(d["busy_ns"] for d in devices) / 1e3,
        idle_us=sum(d["idle_ns"] for d in devices) / 1e3,
        idle_by_cause_us=_summed([d["idle_by_cause_ns"] for d in devices]),
        headroom_mean_us=sum(d["headroom_us"]["mean"] for d in devices),
        waits=len(waits),
        wait_us=sum(w["duration_ns"] for w in waits) / 1e3,
        communication_us=sum(r["communication_us"] for r in communication),
        exposed_us=sum(r["exposed_us"] for r in communication),
        step_us=float(np.median([b - a for _, (a, b) in named])) / 1e3 if named else None,
        steps=tuple((name, a + trace.base_ns, b - a) for name, (a, b) in named),
        seconds=time.perf_counter() - began,
        reader_peak_bytes=_peak_bytes(),
    )


def analyse_folder(
    folder: str | Path,
    *,
    processes: int = 1,
    client: Any = None,
    window: str | None = None,
    on_rank: Callable[[RankSummary], Any] | None = None,
) -> FolderReport:
    """Summarise every trace of a folder (one per rank) and compare the ranks.

    Args:
        folder: holds .json, .json.gz or .sqlite traces; with a `client`, on a file system that its workers see.
        processes: readers on this machine; each holds one trace at a time.
        client: Dask client to read through instead.
        window: as of `workbench.traces.ranges.parse_window`, applied to each rank.
        on_rank: called with each summary as it comes.
    Raises:
        TraceError: the folder does not exist or holds no trace.
        ValueError: processes < 1.
    """
    if processes < 1:
        raise ValueError(f"processes: expected 1 or more, got {processes}")
    began = time.perf_counter()
    paths = [str(p.resolve()) for p in trace_files(folder)]
    if client is not None:
        found = _through_dask(paths, client, window)
    elif processes == 1:
        found = (summarise_rank(p, window) for p in paths)
    else:
        found = _through_processes(paths, processes, window)
    ranks = []
    for summary in found:
        ranks.append(summary)
        if on_rank is not None:
            on_rank(summary)
    ranks.sort(key=lambda r: (r.rank is None, r.rank or 0, r.file))
    return FolderReport(ranks, step_skew(ranks), outlier_ranks(ranks), time.perf_counter() - began)


def step_skew(ranks: Sequence[RankSummary]) -> list[dict[str, Any]]:
    """Return per step how far the ranks' starts and durations lie apart; one clock over the ranks is assumed."""
    good = [r for r in ranks if r.status == OK]
    rows = []
    for name, found in by_name([{name: (start, lasts) for name, start, lasts in r.steps} for r in good]).items():
        starts, durations = zip(*found.values())
        slowest = good[list(found)[int(np.argmax(durations))]]
        rows.append(
            {
                "step": name,
                "ranks": len(found),
                "start_spread_us": spread_us(starts),
                "duration_spread_us": spread_us(durations),
                "slowest_rank": slowest.rank if slowest.rank is not None else slowest.file,
                "slowest_over_median": max(durations) / max(float(np.median(durations)), 1.0),
            }
        )
    return rows


def outlier_ranks(ranks: Sequence[RankSummary]) -> list[dict[str, Any]]:
    """Return the quantities in which a rank stands out, the furthest first.

    A rank stands out where it is further than 5 robust deviations (1.4826 times the median absolute deviation) and
    5 % from the median. Where ranks meet in every step, the slow one shows least exposed communication, not the
    longest step.
    """
    rows = []
    good = [r for r in ranks if r.status == OK]
    for quantity in COMPARED:
        values = [(r, float(v)) for r in good if (v := getattr(r, quantity)) is not None]
        if len(values) < 3:
            continue
        numbers = np.array([v for _, v in values])
        middle = float(np.median(numbers))
        deviation = 1.4826 * float(np.median(np.abs(numbers - middle)))
        for rank, value in values:
            distance = abs(value - middle)
            if distance > OUTLIER_SHARE * abs(middle) and distance > OUTLIER_DEVIATIONS * deviation:
                rows.append({
                    "rank": rank.rank, "file": rank.file, "quantity": quantity, "value": value, "median": middle,
                    "deviations": distance / deviation if deviation else None,
                })  # fmt: skip
    return sorted(rows, key=lambda r: -abs(r["value"] - r["median"]) / max(abs(r["median"]), 1e-9))


def _through_processes(paths: list[str], processes: int, window: str | None) -> Iterator[RankSummary]:
    """Yield summaries as they come. Where a reader dies, the files then being read are read again, one per process."""
    left, suspects = paths[::-1], []
    while left:
        reading: dict[Any, str] = {}
        with _pool(processes) as pool:
            try:
                while left or reading:
                    while left and len(reading) < 2 * processes:
                        reading[pool.submit(summarise_rank, left[-1], window)] = left[-1]
                        left.pop()
                    done, _ = wait(reading, return_when=FIRST_COMPLETED)
                    for future in done:
                        summary = future.result()
                        del reading[future]
                        yield summary
            except BrokenProcessPool:
                suspects += reading.values()
    for path in suspects:
        with _pool(1) as pool:
            try:
                yield pool.submit(summarise_rank, path, window).result()
            except BrokenProcessPool:
                yield _unread(path, "the process that read it died (out of memory?)")


def _through_dask(paths: list[str], client: Any, window: str | None) -> Iterator[RankSummary]:
    from distributed import as_completed

    futures = {client.submit(summarise_rank, p, window, pure=False): p for p in paths}
    waiting = as_completed(list(futures))
    for future in waiting:
        path = futures.pop(future)
        try:
            yield future.result()
        except Exception as error:
            yield _unread(path, f"{type(error).__name__}: {error}"[:300])


def _pool(processes: int) -> ProcessPoolExecutor:
    # Forked children would inherit the locks of a notebook's threads.
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))


def _summed(parts_ns: Sequence[dict[str, int]]) -> dict[str, float]:
    return {cause: sum(part[cause] for part in parts_ns) / 1e3 for cause in (parts_ns[0] if parts_ns else ())}


def _unread(path: str, why: str = "") -> RankSummary:
    numbered = _RANK.search(Path(path).name)
    return RankSummary(Path(path).name, int(numbered[1]) if numbered else None, FAILED, why)


def _peak_bytes() -> int:
    """Largest resident size of this process so far; 0 where the system does not tell."""
    try:
        import resource
        import sys
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
