"""The two experiments' runs: checkpoint branches over seeds, and batch schedules in restarted segments.

Source: report, Appendix B.7 (branch protocol) and B.8 (26 stitched segments).
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbench.training.config import RunConfig
from workbench.training.run import branch, train

SCRATCH_BYTES = 16 << 30
"""Free space from which on checkpoints of a campaign go to memory: three runs keep two of about 0.6 GB each."""

Progress = Callable[[str], None]


def _round(rows: list[dict[str, Any]], **keys: Any) -> list[dict[str, Any]]:
    return [keys | {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in r.items()} for r in rows]


def _say(label: str, progress: Progress | None, rates: dict[int, float]) -> Callable[[dict[str, float]], None]:
    """Return a callback that keeps each read-back's tokens per second by step, and tells of it."""

    def say(row: dict[str, float]) -> None:
        rates[int(row["step"])] = row["tokens_per_s"]
        if progress:
            progress(
                f"{label}: step {row['step']}, ce {row['ce']:.3f}, lbl {row['lbl']:.3f}, "
                f"{row['tokens_per_s']:.0f} tokens/s"
            )

    return say


def lbl_branch(
    config: RunConfig,
    folder: Path,
    *,
    at_step: int,
    coefficient: float,
    device: str,
    graphs: bool = False,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Train an original run, branch it at `at_step` with another LBL coefficient, train both to the end.

    Returns:
        History rows with ``seed`` and ``arm`` (``original`` or ``branch``), tokens per second where metrics were read.
    """
    original, branched = folder / "original", folder / "branch"
    how: dict[str, Any] = {"device": device, "graphs": graphs}
    rates: dict[str, dict[int, float]] = {"original": {}, "branch": {}}
    tell = {arm: _say(f"seed {config.seed} {arm}", progress, rates[arm]) for arm in rates}
    train(config, original, steps=at_step, progress=tell["original"], **how)
    changed = branch(original, at_step, branched, lbl_coefficient=coefficient)
    histories = {
        "original": train(config, original, progress=tell["original"], **how),
        "branch": train(changed, branched, progress=tell["branch"], **how),
    }
    rows = []
    for arm, history in histories.items():
        timed = [r | {"tokens_per_s": rates[arm].get(int(r["step"]))} for r in history]
        rows += _round(timed, seed=config.seed, arm=arm)
    return rows


def segment_bounds(steps: int, segments: int, overlap: int) -> list[tuple[int, int]]:
    """Return (first step restarted from, last step) of each segment: each ends `overlap` steps into the next.

    Args:
        steps: optimizer steps of the whole run.
        segments: how many.
        overlap: steps that a segment trains past the checkpoint from which the next one restarts.
    """
    edges = [round(steps * i / segments) for i in range(segments + 1)]
    return [(a, min(b + overlap, steps)) for a, b in itertools.pairwise(edges)]


def steps_of(config: RunConfig) -> int:
    """Return the optimizer steps that the configuration's tokens take."""
    sequences = steps = 0
    while sequences * config.sequence < config.total_tokens:
        sequences += config.at(sequences * config.sequence)[0]
        steps += 1
    return steps


def segmented(
    config: RunConfig,
    folder: Path,
    *,
    schedule: str,
    segments: int,
    overlap: int,
    device: str,
    graphs: bool = False,
    partial: Path | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Train one run as `segments` restarted pieces whose steps overlap.

    Args:
        partial: JSON lines file to which rows are appended at each message, for a run that may be killed.
        progress: called with a message at the end of each segment, and after each tenth of the steps.
    Returns:
        History rows with ``schedule`` and ``segment`` (1 is the oldest); overlapping steps occur in two segments.
    """
    from workbench.training.run import Trainer

    rows: list[dict[str, Any]] = []
    total = steps_of(config)
    trainer = Trainer(config, device, graphs=graphs)
    spent, told = 0.0, 0
    for number, (start, end) in enumerate(segment_bounds(total, segments, overlap), start=1):
        if start:
            trainer.restore(folder, start)
        trainer.rows = []
        boundary = round(total * number / segments)
        began, known = time.perf_counter(), len(rows)
        while trainer.step_count < end:
            trainer.step()
            if trainer.step_count % 25 == 0 or trainer.step_count in (boundary, end):
                trainer.read_back()
                now = spent + time.perf_counter() - began
                for row in trainer.rows[len(rows) - known :]:
                    rows.append({"schedule": schedule, "segment": number, **_round([row])[0], "seconds": round(now, 4)})
                if trainer.step_count == end or 10 * len(rows[told:]) >= total:
                    _tell(rows[told:], f"{schedule}: segment {number} of {segments}", total, partial, progress)
                    told = len(rows)
            if trainer.step_count == boundary and number < segments:
                # Writing a checkpoint and training the overlap again are the archive's doing, not the schedule's.
                spent = now
                trainer.save(folder)
                began = time.perf_counter()
    return rows


def _tell(new: list[dict[str, Any]], what: str, total: int, partial: Path | None, progress: Progress | None) -> None:
    """Append new rows to the partial file and say where the run stands."""
    if partial:
        with partial.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in new)
    if progress:
        last = new[-1]
        progress(
            f"{what}, step {last['step']} of {total}, {last['tokens']} tokens, ce {last['ce']:.3f}, "
            f"{last['seconds']:.1f} s, {last['tokens'] / last['seconds']:.0f} tokens/s"
        )


def _scratch() -> Path | None:
    """Return memory-backed storage where there is plenty: a campaign's checkpoints need not outlive it."""
    memory = Path("/dev/shm")
    try:
        return memory if shutil.disk_usage(memory).free > SCRATCH_BYTES and os.access(memory, os.W_OK) else None
    except OSError:
        return None


def _job(work: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    kind, options = work
    config = RunConfig.from_dict(options.pop("config"))
    with tempfile.TemporaryDirectory(prefix="workbench-training-", dir=_scratch()) as scratch:
        run = {"lbl_branch": lbl_branch, "segmented": segmented}[kind]
        return run(config, Path(scratch), progress=lambda text: print(text, flush=True), **options)


def run_all(jobs: Sequence[tuple[str, dict[str, Any]]], *, processes: int) -> list[dict[str, Any]]:
    """Run campaign jobs in spawned processes (one GPU is far from full with one small run) and join their rows.

    Args:
        jobs: (``lbl_branch`` or ``segmented``, its keyword arguments with the configuration as a dict).
        processes: at once; 1 runs them here.
    """
    if processes == 1:
        return [row for job in jobs for row in _job(job)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return [row for rows in pool.imap(_job, jobs) for row in rows]
