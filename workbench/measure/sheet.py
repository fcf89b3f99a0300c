"""Timing of one op's cases, interleaved, beside the ceilings of the same card: copy bandwidth and dense BF16 rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core.params import Params, param
from workbench.models.moe_cost import Cost

ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class OpSheetParams(Params):
    """Sizes of the development model's routed layer, on one GPU."""

    tokens: int = param(16384, "T, tokens per microbatch", min=128, max=65536, log=True)
    top_k: int = param(8, "K, experts per token", min=1, max=16)
    experts: int = param(128, "E, routed experts", min=1, max=512)
    width: int = param(2560, "D, model width", min=64, max=8192)
    expert_width: int = param(1280, "F, expert width", min=64, max=8192)
    repeats: int = param(20, "timed graph replays per case", min=5, max=200)
    seed: int = param(0, "seed of the routes and data", min=0)


@dataclass(frozen=True)
class Case:
    """One row of the sheet.

    Attributes:
        impl: implementation, as the op's `impl=` names it, or a library's name.
        shape: what is varied, in words.
        direction: `forward`, `backward`, `dgrad` or `wgrad`.
        call: the work; must be capturable unless `waits`.
        cost: its fewest bytes and operations.
        waits: the host waits inside, which no capture can hold: it is timed eagerly.
        copies: calls in one captured graph.
    """

    impl: str
    shape: str
    direction: str
    call: Callable[[], Any]
    cost: Cost
    waits: bool = False
    copies: int = 5


def dense_rate_TFLOPs(size: int = 8192) -> float:
    """Return the rate of a size^3 BF16 product on random data, in TFLOP/s, median of ten."""
    import torch

    from workbench.measure.timing import eager_device_us, percentile

    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / percentile(eager_device_us(lambda: a @ b, repeats=10), 0.5) / 1e6


def measure_sheet(
    cases: Callable[[OpSheetParams], Sequence[Case]], params: OpSheetParams, recorder: Any
) -> list[dict[str, Any]]:
    """Make the cases on inputs of the seed, time them in interleaved rounds and record one row each."""
    import torch

    from workbench.measure.capture import host_waits
    from workbench.measure.timing import (
        captured_graph,
        copy_bandwidth_GBps,
        eager_device_us,
        interleaved,
        percentile,
        submit_us,
        summary,
    )

    copy_GBps, dense_TFLOPs = copy_bandwidth_GBps(), dense_rate_TFLOPs()
    recorder.set(
        "protocol",
        timer="CUDA events around replays of a graph that holds several calls; eager events where the host waits",
        warmup="1 call, then 1 replay a visit",
        repeats=params.repeats,
        order=f"cases interleaved, {ROUNDS} rounds, direction alternating",
        l2="warm, but each case moves more than the L2 holds unless its bytes say otherwise",
        synchronization="submit_us is the host's time inside one call on an idle device",
    )
    recorder.set("precision", activation="bfloat16", accumulation="float32", communication="none")
    recorder.set("topology", nodes=1, gpus=1)
    recorder.set("workload", experts=params.experts, top_k=params.top_k)
    each = max(1, -(-params.repeats // ROUNDS))
    runs: dict[str, tuple[Case, Callable[[], Any], int]] = {}
    torch.manual_seed(params.seed)
    for case in cases(params):
        name = f"{case.impl}, {case.shape}, {case.direction}"
        if case.waits:
            runs[name] = (case, case.call, 1)
        else:
            runs[name] = (case, captured_graph([case.call] * case.copies, warmup=1).replay, case.copies)
    times = interleaved(
        {name: run for name, (_, run, _) in runs.items()},
        rounds=ROUNDS,
        timer=lambda run: eager_device_us(run, repeats=each, warmup=1),
    )
    for name, (case, _, copies) in runs.items():
        samples = [t / copies for t in times[name]]
        recorder.samples(f"{name} time_us", samples)
        submitted, found = submit_us(case.call, repeats=10), host_waits(case.call)
        recorder.samples(f"{name} submit_us", submitted)
        median = percentile(samples, 0.5)
        floor = case.cost.floor_us(copy_GBps, dense_TFLOPs)
        recorder.row(
            impl=case.impl, shape=case.shape, direction=case.direction, **summary(samples),
            submit_us_p50=round(percentile(submitted, 0.5), 3), launches=found.launches, host_waits=len(found),
            bytes=case.cost.bytes, flop=case.cost.flop, GBps=round(case.cost.bytes / median / 1e3, 2),
            TFLOPs=round(case.cost.flop / median / 1e6, 3), floor_us=round(floor, 3),
            percent_of_floor=round(100 * floor / median, 2), copy_GBps=round(copy_GBps, 1),
            dense_TFLOPs=round(dense_TFLOPs, 1),
        )  # fmt: skip
    return recorder.rows
