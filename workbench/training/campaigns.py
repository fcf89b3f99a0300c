"""The two experiments' runs: checkpoint branches over seeds, and batch schedules in restarted segments.

Source: report, Appendix B.7 (branch protocol) and B.8 (26 stitched segments).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.training.config import TINY, RunConfig
from workbench.training.corpus import load_corpus
from workbench.training.run import branch

READ_EVERY = 25
"""Steps between reads of the metrics, the only host waits."""
SCRATCH_BYTES = 16 << 30
"""Free space from which on checkpoints of a campaign go to memory: six runs keep one of about 0.8 GB each."""

Progress = Callable[[str], None]
Run = tuple[int, str]
"""Seed and arm of one run of a branch campaign."""


def say(text: str) -> None:
    """Print a message at once: a campaign takes minutes and its output may be piped."""
    print(text, flush=True)


def place(tiny: bool, graphs: bool) -> dict[str, Any]:
    """Return where a campaign runs, as `lbl_branch` and `segmented` take it: the GPU where there is one.

    Args:
        tiny: the model is one that a CPU trains in a minute.
        graphs: replay steps as CUDA graphs on a GPU.
    Raises:
        ValueError: a model of full size on a machine without a GPU.
    """
    import torch

    gpu = torch.cuda.is_available()
    if not (gpu or tiny):
        raise ValueError("tiny: expected True on a machine without a GPU, where the full size would take hours")
    return {"device": "cuda" if gpu else "cpu", "graphs": gpu and graphs}


def base_config(where: dict[str, Any], tiny: bool, **fields: Any) -> RunConfig:
    """Return the configuration that the runs of a campaign change: BF16 on a GPU, `TINY` sizes where asked for."""
    dtype = "bfloat16" if where["device"] == "cuda" else "float32"
    return RunConfig(**{**(TINY if tiny else {}), "dtype": dtype, **fields})


def describe(recorder: Any, where: dict[str, Any], base: RunConfig, workload: dict[str, Any], **protocol: Any) -> None:
    """Tell a recorder what a campaign runs on what: workload with its corpus, precision, topology and protocol."""
    recorder.set("workload", corpus=load_corpus(base.corpus).provenance, **workload)
    recorder.set("precision", parameters=base.dtype, masters="float32", moments="float32", router="float32")
    recorder.set("topology", nodes=1, gpus=int(where["device"] == "cuda"), processes=1)
    steps = "CUDA graph replays" if where["graphs"] else "eager"
    recorder.set("protocol", steps=steps, exclusions="none", **protocol)


def _round(rows: list[dict[str, Any]], **keys: Any) -> list[dict[str, Any]]:
    return [keys | {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in r.items()} for r in rows]


def _advance(
    trainers: dict[Run, Any], steps: int, rates: dict[Run, dict[int, float]], progress: Progress | None
) -> None:
    """Step runs in turn until each has done `steps`; runs with graphs have a stream each, which the GPU overlaps."""
    since = time.perf_counter(), {name: t.tokens for name, t in trainers.items()}
    while active := {name: t for name, t in trainers.items() if t.step_count < steps}:
        for trainer in active.values():
            trainer.step()
        done = max(t.step_count for t in active.values())
        if done % READ_EVERY and done < steps:
            continue
        for trainer in active.values():
            trainer.read_back()
        now = time.perf_counter()
        for name, trainer in active.items():
            rate = (trainer.tokens - since[1][name]) / (now - since[0])
            rates[name][trainer.step_count] = rate
            if progress:
                last, (seed, arm) = trainer.rows[-1], name
                now_at = f"step {last['step']}, ce {last['ce']:.3f}, lbl {last['lbl']:.3f}"
                progress(f"seed {seed} {arm}: {now_at}, {rate:.0f} tokens/s")
        since = now, {name: t.tokens for name, t in trainers.items()}


def lbl_branch(
    configs: Sequence[RunConfig],
    folder: Path,
    *,
    at_step: int,
    coefficient: float,
    device: str,
    graphs: bool = False,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Train original runs, branch each at `at_step` with another LBL coefficient, train all to the end.

    Args:
        configs: of the originals, which differ in their seeds.
        folder: where the checkpoints go.
    Returns:
        History rows with ``seed`` and ``arm`` (``original`` or ``branch``), tokens per second where metrics were read.
    """
    from workbench.training.run import Trainer

    rates: dict[Run, dict[int, float]] = defaultdict(dict)
    runs: dict[Run, Trainer] = {(c.seed, "original"): Trainer(c, device, graphs=graphs) for c in configs}
    _advance(runs, at_step, rates, progress)
    for config in configs:
        saved, branched = folder / f"{config.seed}-original", folder / f"{config.seed}-branch"
        runs[config.seed, "original"].save(saved)
        changed = branch(saved, at_step, branched, lbl_coefficient=coefficient)
        runs[config.seed, "branch"] = Trainer(changed, device, graphs=graphs)
        runs[config.seed, "branch"].restore(branched)
    _advance(runs, steps_of(configs[0]), rates, progress)
    rows = []
    for (seed, arm), trainer in sorted(runs.items(), key=lambda r: (r[0][0], r[0][1] == "branch")):
        timed = [r | {"tokens_per_s": rates[seed, arm].get(int(r["step"]))} for r in trainer.rows]
        rows += _round(timed, seed=seed, arm=arm)
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
            if trainer.step_count % READ_EVERY == 0 or trainer.step_count in (boundary, end):
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


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a temporary folder, in memory where there is plenty: a campaign's checkpoints need not outlive it."""
    memory = Path("/dev/shm")
    try:
        roomy = shutil.disk_usage(memory).free > SCRATCH_BYTES and os.access(memory, os.W_OK)
    except OSError:
        roomy = False
    with tempfile.TemporaryDirectory(prefix="workbench-training-", dir=memory if roomy else None) as folder:
        yield Path(folder)
