"""The routed paths over several GPUs of one host, one rank each: parity, bandwidth, times, captures, critical size.

`run` starts the rank processes and returns their rows; the same sections run on CPU ranks over gloo at small sizes.
Standard library, NumPy and torch only.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.files import replace_file
from workbench.measure.timing import summary

if TYPE_CHECKING:
    import torch
    from moe_kernels.block import BlockConfig, RoutedBlock
    from moe_kernels.transport import Transport

VARIANTS = (("synchronized", "stream"), ("synchronized", "before_wait"), ("rowwise", "stream"))


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run does.

    Attributes:
        out: folder for the ranks' rows and traces.
        sections: names of `SECTIONS`, in order.
        backend: `nccl` with one GPU per rank, or `gloo` on the CPU.
        small: sizes that a CPU runs in seconds.
        experts: routed experts per rank; 16 is one rank's share of 128 at EP8.
        layer_tokens: tokens per rank microbatch of the routed block.
        sequences, lengths: of the step's microbatch, on every rank.
        critical_tokens: tokens per rank of the layer whose submission and device times meet.
        repeats: timed calls: interleaved visits of each variant, or of each region over all rounds.
        visits: timed steps of each variant in each process start.
        limit_s: longest process start; a rank that takes longer prints where each of its threads is, and ends.
    """

    out: str
    sections: tuple[str, ...] = ("parity", "bandwidth", "layers")
    backend: str = "nccl"
    small: bool = False
    experts: int = 16
    layer_tokens: tuple[int, ...] = (1024, 4096, 16384)
    sequences: int = 2
    lengths: tuple[int, ...] = (8192, 1024)
    critical_tokens: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    repeats: int = 10
    visits: int = 2
    limit_s: float = 180.0


@dataclass
class Rank:
    """What every section needs on one rank."""

    options: Options
    rank: int
    ranks: int
    restart: int
    transport: Transport
    rows: list[dict[str, Any]]

    @property
    def device(self) -> torch.device:
        return self.transport.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def row(self, section: str, **values: Any) -> None:
        self.rows.append(
            {"section": section, "ranks": self.ranks, "rank": self.rank, "restart": self.restart, **values}
        )
        if self.rank == 0:
            print(json.dumps(self.rows[-1]), flush=True)

    def synchronize(self) -> None:
        import torch

        if self.cuda:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """All ranks' devices idle and all hosts here."""
        self.synchronize()
        self.transport.all_gather_host([0])

    @property
    def experts(self) -> int:
        """Routed experts over all ranks."""
        return (4 if self.options.small else self.options.experts) * self.ranks

    def time_us(self, call: Callable[[], object], repeats: int) -> list[float]:
        """Wall time of each call, all ranks starting together; a rank's time ends with its own device's work."""
        times = []
        for _ in range(repeats):
            self.meet()
            start = time.perf_counter_ns()
            call()
            self.synchronize()
            times.append((time.perf_counter_ns() - start) / 1e3)
        return times


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def parity(r: Rank) -> None:
    """Compare both paths with one rank that holds every row and expert: relative errors against the budgets.

    The experts' products are those of the reference: the ranks share them, and FP32 tensor-core tiles would take half a
    minute to compile.
    """
    import torch
    import torch.distributed as dist
    from moe_kernels.block import BlockConfig, RoutedBlock

    config = BlockConfig(width=512, expert_width=1024, num_experts=8, top_k=2, capacity_factor=8.0, shared_width=256)

    tokens = 64
    generator = torch.Generator().manual_seed(11)
    x, d_out = (torch.randn(r.ranks * tokens, config.width, generator=generator).to(r.device) for _ in range(2))
    common: dict[str, Any] = {"seed": 5, "device": r.device, "grouped_gemm": "reference"}
    one = RoutedBlock(config, **common)
    whole = _gradients(one, x, d_out)
    mine = slice(r.rank * tokens, (r.rank + 1) * tokens)
    for path in ("synchronized", "rowwise"):
        transport = r.transport if path == "rowwise" else None
        block = RoutedBlock(config, path=path, transport=transport, **common)
        got = _gradients(block, x[mine], d_out[mine])
        ids = torch.tensor(block.expert_ids, device=r.device)
        for name, tensor in got.items():
            expected = whole[name]
            if name in ("output", "x"):
                expected = expected[mine]
            elif name in ("up_gate", "down"):
                expected = expected[ids]
            else:
                tensor = tensor.clone()
                dist.all_reduce(tensor)
            error = ((tensor - expected).norm() / expected.norm()).item()
            budget = 5e-4 if name in ("output", "x") else 1e-3
            r.row("parity", path=path, tensor=name, error=error, budget=budget, holds=bool(error <= budget))
        if path == "rowwise":
            block.pool.close()


def _gradients(block: RoutedBlock, x: torch.Tensor, d_out: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    out = block(x)
    out.backward(d_out)
    grads = {n: p.grad for n, p in block.named_parameters() if p.grad is not None}
    return {"output": out.detach(), "x": x.grad if x.grad is not None else x, **grads}


def bandwidth(r: Rank) -> None:
    """Dispatch and combine over the ranks against a local copy and a peer copy of as many bytes."""
    import torch
    from moe_kernels.combine import combine, combine_backward
    from moe_kernels.dispatch import dispatch
    from moe_kernels.route_map import capacity_rows, route_map

    tokens, top_k, width = (64, 2, 32) if r.options.small else (16384, 8, 2560)
    experts = 8 * r.ranks
    dtype = torch.bfloat16 if r.cuda else torch.float32
    capacity = capacity_rows(tokens, top_k, 1.25)
    table = r.transport.allocate(capacity, width, dtype)
    x = torch.randn(tokens, width, device=r.device).to(dtype)
    index = torch.stack([torch.randperm(experts, device=r.device)[:top_k] for _ in range(64)])
    index = index.repeat(tokens // 64, 1).to(torch.int32)
    counts = index.flatten().bincount(minlength=experts)
    requested = r.transport.all_gather_counts([counts])
    route = route_map(index, requested, rank=r.rank, capacity=capacity)
    weights = torch.rand(tokens, top_k, device=r.device)
    row_bytes = width * dtype.itemsize
    placed = route.dst_rank >= 0
    routed = int(placed.sum()) * row_bytes
    remote = int((placed & (route.dst_rank != r.rank)).sum()) * row_bytes
    peer = table.tensors[(r.rank + 1) % r.ranks]
    source = torch.randn(min(capacity, tokens * top_k), width, device=r.device).to(dtype)
    local = torch.empty_like(source)
    maps = (route.dst_rank, route.dst_row)
    # (call, bytes that it moves, those of them that cross to a peer); a combine's backward reads a row and writes it.
    calls: dict[str, tuple[Callable[[], object], int, int]] = {
        "local copy": (lambda: local.copy_(source), 2 * source.nbytes, 0),
        "peer copy, write": (lambda: peer[: source.shape[0]].copy_(source), source.nbytes, source.nbytes),
        "peer copy, read": (lambda: local.copy_(peer[: source.shape[0]]), source.nbytes, source.nbytes),
        "dispatch": (lambda: dispatch(x, *maps, table), routed, remote),
        "combine": (lambda: combine(table, *maps, weights), routed, remote),
        "dispatch, backward": (lambda: combine(table, *maps), routed, remote),
        "combine, backward": (lambda: combine_backward(x, table, *maps, weights, table), 2 * routed, 2 * remote),
    }
    for name, (call, moved, crossing) in calls.items():
        for _ in range(3):
            call()
        repeated = 5 if r.cuda else 1
        several = functools.partial(_repeat, call, repeated)
        times = [t / repeated for t in r.time_us(several, r.options.repeats)]
        r.meet()
        us = statistics.median(times)
        r.row(
            "bandwidth", call=name, bytes=moved, remote_bytes=crossing, **summary(times),
            GBps=round(moved / us / 1e3, 1), remote_GBps=round(crossing / us / 1e3, 1), samples_us=_rounded(times),
        )  # fmt: skip
    r.transport.free(table)


def _rounded(values: list[float]) -> list[float]:
    return [round(v, 2) for v in values]


def layers(r: Rank) -> None:
    """Time forward + backward of one routed block per path over microbatch sizes, interleaved."""
    import torch
    from moe_kernels.block import RoutedBlock

    sizes = (16, 32) if r.options.small else r.options.layer_tokens
    config = _config(r)
    dtype = torch.bfloat16 if r.cuda else torch.float32
    for tokens in sizes:
        x = torch.randn(tokens, config.width, device=r.device).to(dtype).requires_grad_()
        d_out = torch.randn(tokens, config.width, device=r.device).to(dtype)
        calls: dict = {}
        for path, shared_mode in VARIANTS:
            block = RoutedBlock(
                replace(config, shared_mode=shared_mode), path=path, device=r.device, dtype=dtype,
                transport=r.transport if path == "rowwise" else None,
            )  # fmt: skip
            calls[path, shared_mode] = functools.partial(_forward_and_backward, block, x, d_out)
        # The last variant is the rowwise one. Until its dry run has ended, ranks agree on T through their hosts.
        _time_variants(r, "layer", calls, tokens, batch=4, freeze=block.freeze)
        block.pool.close()


def _forward_and_backward(block: RoutedBlock, x: torch.Tensor, d_out: torch.Tensor) -> None:
    import torch

    torch.autograd.grad(block(x), [x, *block.parameters()], d_out)


def _config(r: Rank) -> BlockConfig:
    from moe_kernels.model import development_config, small_config

    return (small_config if r.options.small else development_config)(num_experts=r.experts).block


def _time_variants(r: Rank, section: str, calls: dict, tokens: int, batch: int, freeze: Callable[[], None]) -> None:
    times: dict = {key: [] for key in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    freeze()
    for visit in range(r.options.repeats):
        order = list(calls) if visit % 2 == 0 else list(calls)[::-1]
        for key in order:
            several = functools.partial(_repeat, calls[key], batch)
            times[key] += [t / batch for t in r.time_us(several, 1)]
    for (path, shared_mode), measured in times.items():
        r.row(section, path=path, shared_mode=shared_mode, tokens=tokens, **summary(measured),
              **_waits(r, calls[path, shared_mode]), samples_us=_rounded(measured))  # fmt: skip


def _waits(r: Rank, call: Callable[[], object]) -> Mapping[str, int | None]:
    """Host waits and launches of one call, by the profiler; None on CPU ranks, which have neither."""
    from workbench.measure.capture import host_waits

    if not r.cuda:
        return {"waits": None, "pageable_d2h": None, "launches": None}
    r.meet()
    return host_waits(call, warmup=1).row()


def regimes(r: Rank) -> None:
    """Time whole training steps per variant; the first start also counts waits and captures every rank's step."""
    from workbench.measure.regimes import Bench, packed, trace_name

    o = r.options
    lengths = (16,) if o.small else o.lengths
    bench = Bench(experts=r.experts, grouped_gemm=None, transport=r.transport, small=o.small, meet=r.meet)
    if r.restart == 0:
        config = bench.config
        r.row("model", layers=config.layers, experts=config.block.num_experts, top_k=config.block.top_k,
              total_params=config.parameters, active_params=config.active_parameters)  # fmt: skip
    for length in lengths:
        for variant, times in bench.times_ms(1, o.sequences, length, o.visits).items():
            r.row("step", variant=variant, length=length, samples_ms=[round(t, 4) for t in times])
        if r.restart > 0:
            continue
        variants = bench.steps if length == lengths[0] else ("synchronized", "rowwise")
        for variant in variants:
            step = functools.partial(bench.steps[variant], bench.batch(1, o.sequences, length))
            r.row("waits", variant=variant, length=length, **_waits(r, step))
            metrics = bench.models[variant].routed_blocks[0].metrics
            r.row("metrics", variant=variant, length=length, offered=int(metrics["offered"]),
                  dropped=int(metrics["dropped"]), capacity_use=float(metrics["capacity_use"].max()),
                  received=int(metrics["received_load"].sum()))  # fmt: skip
            if r.cuda:
                trace = bench.capture(variant, o.sequences, length)
                trace["distributedInfo"] = {"rank": r.rank, "world_size": r.ranks}
                (Path(o.out) / trace_name(variant, length, r.rank)).write_bytes(packed(trace))
    if r.restart == 0:
        pool = bench.models["rowwise"].pool
        r.row("pool", slots=pool.slots, high_water=pool.high_water, bytes_per_rank=pool.bytes_per_rank)
    bench.close()


def critical(r: Rank) -> None:
    """Measure submission and device time of the routed layer on both paths over sizes, on every rank at once.

    Behind a spin kernel on every device and a device barrier, so that no rank's device time holds a late start of a
    peer.
    """
    import torch

    from workbench.measure.blocks import PASSES, Layers
    from workbench.measure.critical import Key, SizeSweep
    from workbench.measure.regions import measure_region, spin_cycles_per_us

    o = r.options
    sizes = (8, 16, 32) if o.small else o.critical_tokens
    if r.cuda:
        measure: Callable[..., Any] = functools.partial(measure_region, align=r.transport.barrier)
        sweep = SizeSweep(spin_cycles_per_us(), measure)
    else:
        sweep = SizeSweep(1.0, functools.partial(_host_region, r))
    layers_of = Layers(r.experts, None, transport=r.transport, router_mode="learned", small=o.small)
    for _ in range(CRITICAL_ROUNDS):
        for tokens in sizes:
            for layer in ("routed, rowwise", "routed, synchronized"):
                for passes in PASSES:
                    key, region = Key(layer, passes, "eager", tokens), layers_of.region(layer, passes, tokens)
                    first = key not in sweep.notes
                    r.meet()
                    sweep.add(key, region.submit_call, max(2, o.repeats // CRITICAL_ROUNDS), count=first)
                    if not first:
                        continue
                    if r.cuda:
                        sweep.add_idle(key, region.call, batch=4)
                    dropped = int(layers_of.layers[layer].feed_forward.metrics["dropped"])
                    sweep.note(key, waits="synchronized" in layer, dropped=dropped)
            if r.cuda:
                torch.cuda.empty_cache()
    for section, found in (("critical", sweep.rows()), ("repeats", sweep.repeats())):
        for row in found:
            r.row(section, **row)
    layers_of.pool.close()


def _host_region(r: Rank, fn: Callable[[], object], *, repeats: int, warmup: int, **_: Any) -> Any:
    """A region on a CPU rank, whose submission is its execution."""
    from workbench.measure.regions import Region

    for _call in range(warmup):
        fn()
    times = r.time_us(fn, repeats)
    return Region(submit_us=times, device_us=times)


CRITICAL_ROUNDS = 3
SECTIONS: dict[str, Callable[[Rank], None]] = {
    "parity": parity, "bandwidth": bandwidth, "layers": layers, "regimes": regimes, "critical": critical,
}  # fmt: skip


def join(backend: str, gpu: int, **group: Any) -> Transport:
    """Join the group, on GPU number `gpu` or as a CPU rank, and return the transport of its symmetric memory.

    Args:
        **group: arguments of `torch.distributed.init_process_group`.
    """
    import torch
    import torch.distributed as dist
    from moe_kernels.transport import NvshmemTransport, SharedMemoryTransport

    if backend == "gloo":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **group)
        return SharedMemoryTransport()
    device = torch.device("cuda", gpu % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **group)
    host: Any = dist.new_group(backend="gloo", timeout=group.get("timeout"))
    return NvshmemTransport(device, host_group=host)


def run_rank(rank: int, ranks: int, init: str, options: Options, restart: int) -> None:
    """Join the group, run the sections, gather the rows on rank 0."""
    import torch
    import torch.distributed as dist

    # Ranks that wait for each other for ever would otherwise say nothing until somebody ends them.
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    started = time.perf_counter()
    transport = join(options.backend, rank, rank=rank, world_size=ranks, init_method=f"file://{init}")
    if getattr(transport, "host_barriers", False):
        raise RuntimeError(f"{ranks} ranks share GPUs: timing would mean nothing; use one rank per GPU")
    r = Rank(options, rank, ranks, restart, transport, [])
    peer = r.cuda and ranks > 1 and torch.cuda.can_device_access_peer(rank, (rank + 1) % ranks)
    name = torch.cuda.get_device_name(r.device) if r.cuda else "cpu"
    r.row(
        "start", seconds=round(time.perf_counter() - started, 2), transport=transport.name, device=name,
        peer_access=peer,
    )  # fmt: skip
    for section in options.sections:
        begun = time.perf_counter()
        SECTIONS[section](r)
        r.row("section", name=section, seconds=round(time.perf_counter() - begun, 2))
        _write(r)
    transport.close()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # All rows are written. While an interpreter winds down, threads of its process group have aborted the process.
    os._exit(0)


def _write(r: Rank) -> None:
    """Rank 0 rewrites the file after each section, so that a run that is stopped keeps what it had."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * r.ranks
    dist.all_gather_object(gathered, r.rows)
    if r.rank != 0:
        return
    rows = [row for rows in gathered for row in rows]
    replace_file(Path(r.options.out) / f"rows_restart{r.restart}.json", json.dumps(rows, indent=0))


def run(options: Options, ranks: int, restarts: int = 1) -> list[dict[str, Any]]:
    """Start `ranks` processes (0 with nccl: one per GPU) `restarts` times and return every rank's rows.

    Raises:
        ValueError: fewer than one rank, more than GPUs, or an unknown section.
        RuntimeError: a rank failed.
    """
    import torch
    import torch.multiprocessing as mp

    if not ranks and options.backend == "nccl":
        ranks = torch.cuda.device_count()
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}; no GPU is visible?")
    if unknown := sorted(set(options.sections) - set(SECTIONS)):
        raise ValueError(f"sections: expected some of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    if options.backend == "nccl" and ranks > torch.cuda.device_count():
        raise ValueError(f"ranks: expected at most one per GPU ({torch.cuda.device_count()}), got {ranks}")
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(24 << 30))
    Path(options.out).mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for restart in range(restarts):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (ranks, f"{folder}/init", options, restart)
            mp.start_processes(run_rank, arguments, nprocs=ranks, start_method="spawn")
        rows += json.loads((Path(options.out) / f"rows_restart{restart}.json").read_text())
    return rows
