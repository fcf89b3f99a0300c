"""The two experiments' runs: checkpoint branches over seeds, and batch schedules in restarted segments.

Source: report, Appendix B.7 (branch protocol) and B.8 (26 stitched segments).
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbench.training.config import RunConfig
from workbench.training.run import branch, train

Progress = Callable[[str], None]


def _round(rows: list[dict[str, float]], **keys: Any) -> list[dict[str, Any]]:
    return [keys | {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in r.items()} for r in rows]


def _say(label: str, progress: Progress | None) -> Callable[[dict[str, float]], None] | None:
    if progress is None:
        return None
    return lambda row: progress(
        f"{label}: step {row['step']}, ce {row['ce']:.3f}, lbl {row['lbl']:.3f}, {row['tokens_per_s']:.0f} tokens/s"
    )


def lbl_branch(
    config: RunConfig,
    folder: Path,
    *,
    at_step: int,
    coefficient: float,
    device: str,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Train an original run, branch it at `at_step` with another LBL coefficient, train both to the end.

    Returns:
        History rows with ``seed`` and ``arm`` (``original`` or ``branch``).
    """
    original, branched = folder / "original", folder / "branch"
    train(config, original, device=device, steps=at_step, progress=_say("original", progress))
    changed = branch(original, at_step, branched, lbl_coefficient=coefficient)
    first = train(config, original, device=device, progress=_say("original", progress))
    second = train(changed, branched, device=device, progress=_say("branch", progress))
    return _round(first, seed=config.seed, arm="original") + _round(second, seed=config.seed, arm="branch")


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
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Train one run as `segments` restarted pieces whose steps overlap.

    Returns:
        History rows with ``schedule`` and ``segment`` (1 is the oldest); overlapping steps occur in two segments.
    """
    from workbench.training.run import Trainer

    rows: list[dict[str, Any]] = []
    total = steps_of(config)
    trainer = Trainer(config, device)
    spent = 0.0
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
            if trainer.step_count == boundary:
                # Writing a checkpoint and training the overlap again are the archive's doing, not the schedule's.
                spent = now
                trainer.save(folder)
                began = time.perf_counter()
        if progress:
            progress(f"{schedule}: segment {number} of {segments}, step {trainer.step_count} of {total}")
    return rows


def _job(work: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    kind, options = work
    config = RunConfig.from_dict(options.pop("config"))
    with tempfile.TemporaryDirectory(prefix="workbench-training-") as scratch:
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
