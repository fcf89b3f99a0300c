"""Figure 32 and Equation 12 over several GPUs: where each rank's device time meets its submission time."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.core.tables import MAIN
from workbench.views.crossover import crossover_checks, curves, draw_crossovers, interval, recorded, said
from workbench.views.ranks import of_rank, on_every_rank, ranks_of

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

AGREE = 1.25
"""Factor within which the ranks' crossovers count as one: their hosts share one machine, not one core."""


@dataclass(frozen=True, kw_only=True)
class CriticalRanksParams(Params):
    """Sizes of the measurement, and what-ifs on top of it."""

    ranks: int = param(0, "ranks, one per GPU; 0: as many as there are GPUs", min=0, max=64)
    tokens: tuple[int, ...] = param(
        (256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
        "tokens per rank microbatch",
        unit="tokens",
        min=64,
        max=131072,
    )
    experts: int = param(16, "routed experts per rank: one rank's share of 128 at EP8", min=8, max=128)
    repeats: int = param(12, "timed calls of each region, over all rounds", min=6, max=200)
    rank: int = param(0, "rank that is shown", min=0, max=63, analysis=True)
    device_speed: float = param(1.0, "device faster by", min=0.25, max=8.0, step=0.05, log=True, analysis=True)
    host_cost: float = param(1.0, "submission time scaled by", min=0.1, max=4.0, step=0.05, log=True, analysis=True)

    # What the one-GPU figure's panels also ask for, and this measurement does not have.
    memory_scale = activation_scale = 1.0
    replay = False


def measure(params: CriticalRanksParams, recorder: Any) -> None:
    """Measure the routed layer on both paths, all ranks together, behind a spin kernel on every device."""
    from workbench.measure.multi_gpu import Options, run

    with tempfile.TemporaryDirectory() as folder:
        options = Options(out=folder, sections=("critical",), experts=params.experts, critical_tokens=params.tokens,
                          repeats=params.repeats)  # fmt: skip
        keep(params, recorder, run(options, params.ranks))


def keep(params: CriticalRanksParams, recorder: Any, found: Sequence[dict[str, Any]]) -> None:
    """Write what the ranks returned."""
    from workbench.measure.multi_gpu import CRITICAL_ROUNDS

    ranks = found[0]["ranks"]
    recorder.set(
        "protocol",
        timer="submission: perf_counter_ns behind a spin kernel on every rank's device, the host wait of the "
        "synchronized path left out; device: CUDA events around the queued region, which all devices begin behind one "
        "barrier; wall: perf_counter_ns over back-to-back calls",
        warmup="3 calls of each region and size, 1 in later rounds",
        repeats=params.repeats,
        rounds=CRITICAL_ROUNDS,
        order="sizes ascending, layers in turn at each size, all of it once a round",
        l2="warm for small sizes: inputs of one region are reused",
        idle="torch.profiler, device activities only, back-to-back calls of which the first 2 are left out; a device "
        "that waits for a peer inside a collective is busy",
    )
    recorder.set("precision", parameter="bfloat16", activation="bfloat16", accumulation="float32",
                 communication="bfloat16")  # fmt: skip
    recorder.set("topology", nodes=1, gpus=ranks, dp=ranks, ep_mp=ranks)
    recorder.set("workload", experts=params.experts * ranks, top_k=8, shared_experts=1, layers=1, seeds=[0],
                 capacity="capacity factor 1.25", sequence_tokens=8192,
                 router="learned: its routes are those of the input, the same in every call")  # fmt: skip
    for section, table in (("critical", MAIN), ("repeats", "repeats")):
        for row in found:
            if row["section"] == section:
                recorder.row(table, **{k: v for k, v in row.items() if k not in ("section", "restart")})


def checks(result: Result) -> Iterator[Check]:
    """Claims of the one-GPU figure on every rank, and that the ranks agree."""
    by_rank = [crossover_checks(of_rank(result, rank)) for rank in ranks_of(result)]
    for same in zip(*by_rank):
        check = on_every_rank(same)
        if check.holds is False and "runs dry" in check.claim and any(c.holds for c in same):
            waits = "a device that waits in a collective for a rank that submits more slowly counts as busy"
            check = dataclasses.replace(check, known=check.known or waits)
        yield check
    found = [curves(of_rank(result, rank)) for rank in ranks_of(result)]
    for same in zip(*found):
        at = [c["critical"] for c in same]
        yield Check(f"{same[0]['layer']}, {same[0]['passes']}: the ranks' crossovers agree within {AGREE - 1:.0%}",
                    max(at) <= AGREE * min(at) if max(at) < float("inf") else None,
                    ", ".join(interval(c) for c in same) + " tokens")  # fmt: skip


def beside_one_gpu(result: Result) -> pl.DataFrame:
    """Return the crossover of each routed layer and pass: every rank's, and that of the one-GPU recording."""
    import polars as pl

    from workbench.experiments.fig32_critical_microbatch import EXPERIMENT as ONE

    tables = {f"{len(ranks_of(result))} GPUs, rank {r}": curves(of_rank(result, r)) for r in ranks_of(result)}
    if ONE.recording:
        tables["one GPU (recorded)"] = [
            c for c in curves(ONE.run("recorded")) if c["mode"] == "eager" and c["layer"] != "dense"
        ]
    return pl.DataFrame(
        [
            {"layer": c["layer"], "passes": c["passes"], "where": where, "crossover (tokens)": interval(c),
             "device idle above 5 % below (tokens)": said(c["idle"], c) if c["idle"] is not None else None,
             "submission (ms)": round(float(c["submit"].min()) / 1e3, 2)}
            for where, found in tables.items() for c in found
        ]
    ).sort("layer", "passes", maintain_order=True)  # fmt: skip


def draw(result: Result) -> go.Figure:
    """Draw one rank's device and submission times as the one-GPU figure does."""
    rank, ranks = result.params.rank, len(ranks_of(result))
    fig = draw_crossovers(of_rank(result, rank))
    fig.update_layout(title_text=f"Device time against submission time of one layer on {ranks} GPUs: rank {rank}")
    return fig


EXPERIMENT = Experiment(
    slug="fig32_critical_microbatch_ep",
    group="s08_sync_free",
    title="Critical microbatch over several GPUs: both expert-parallel paths",
    claim="Over NVLink each rank still has a size below which its GPU runs dry; the wait of the synchronized path "
    "leaves the device idle beyond it.",
    kind="measured",
    anchor="Section 8.3, Equation 12 and Figure 32; Section 8.4",
    params=CriticalRanksParams,
    figure=draw,
    checks=checks,
    measure=measure,
    recorded=recorded,
    tests=(
        "tests/measure/test_multi_gpu.py",
        "tests/experiments/test_expert_parallel.py",
        "tests/kernels/test_transport.py",
        "tests/kernels/test_block.py",
        "tests/kernels/test_block_gpu.py",
    ),
    recording="2026-11-29_h200_3d77586",
    needs="CUDA GPUs of one host with peer access, NCCL and nvshmem4py",
)
