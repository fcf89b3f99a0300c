"""The routed paths over several GPUs of one host, one rank each: start, parity, bandwidth, times, waits, captures.

`run` starts the rank processes and returns their rows; the same sections run on CPU ranks over gloo at small sizes.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.measure.timing import summary

if TYPE_CHECKING:
    import torch
    from moe_kernels.block import BlockConfig, RoutedBlock
    from moe_kernels.model import DevelopmentModel
    from moe_kernels.transport import Transport

VARIANTS = (("synchronized", "stream"), ("synchronized", "before_wait"), ("rowwise", "stream"))


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run does.

    Attributes:
        out: folder for the ranks' rows and traces.
        backend: `nccl` with one GPU per rank, or `gloo` on the CPU.
        small: sizes that a CPU runs in seconds.
        experts: routed experts over all ranks; 0: 16 per rank, one rank's share of 128 at EP8.
        layer_tokens: tokens per rank microbatch of the layer.
        sequence: tokens per sequence of the step, two a microbatch.
        grouped_gemm: grouped GEMM of the experts on the GPU.
        repeats: interleaved visits of each variant.
        traces: capture one step per path on every rank of the first start.
    """

    out: str
    backend: str = "nccl"
    small: bool = False
    experts: int = 0
    layer_tokens: tuple[int, ...] = (1024, 4096, 16384)
    sequence: tuple[int, ...] = (1024, 2048, 8192)
    grouped_gemm: str = "triton"
    repeats: int = 10
    traces: bool = True


@dataclass
class Rank:
    """What every section needs on one rank."""

    options: Options
    rank: int
    ranks: int
    restart: int
    device: torch.device
    transport: Transport
    rows: list[dict[str, Any]]

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
    """Compare both paths with one rank that holds every row and expert: relative errors against the budgets."""
    import torch
    import torch.distributed as dist
    from moe_kernels.block import BlockConfig, RoutedBlock

    config = BlockConfig(width=512, expert_width=1024, num_experts=8, top_k=2, capacity_factor=8.0, shared_width=256)

    tokens = 64
    generator = torch.Generator().manual_seed(11)
    x, d_out = (torch.randn(r.ranks * tokens, config.width, generator=generator).to(r.device) for _ in range(2))
    one = RoutedBlock(config, seed=5, device=r.device)
    whole = _gradients(one, x, d_out)
    mine = slice(r.rank * tokens, (r.rank + 1) * tokens)
    for path in ("synchronized", "rowwise"):
        transport = r.transport if path == "rowwise" else None
        block = RoutedBlock(config, path=path, transport=transport, seed=5, device=r.device)
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
    from moe_kernels.combine import combine
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
    counts = torch.zeros(experts, dtype=torch.int64, device=r.device)
    counts.scatter_add_(0, index.long().flatten(), torch.ones(index.numel(), dtype=torch.int64, device=r.device))
    requested = r.transport.all_gather_counts([counts])
    route = route_map(index, requested, rank=r.rank, capacity=capacity)
    weights = torch.rand(tokens, top_k, device=r.device)
    row_bytes = width * dtype.itemsize
    sent = tokens * top_k * row_bytes
    remote = float(((route.dst_rank >= 0) & (route.dst_rank != r.rank)).float().mean())
    peer = table.tensors[(r.rank + 1) % r.ranks]
    source = torch.randn(min(capacity, tokens * top_k), width, device=r.device).to(dtype)
    local = torch.empty_like(source)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "local copy": (lambda: local.copy_(source), 2 * source.nbytes),
        "peer copy, write": (lambda: peer[: source.shape[0]].copy_(source), source.nbytes),
        "peer copy, read": (lambda: local.copy_(peer[: source.shape[0]]), source.nbytes),
        "dispatch": (lambda: dispatch(x, route.dst_rank, route.dst_row, table), sent),
        "combine": (lambda: combine(table, route.dst_rank, route.dst_row, weights), sent),
    }
    for name, (call, moved) in calls.items():
        for _ in range(3):
            call()
        repeated = 5 if r.cuda else 1

        several = functools.partial(_repeat, call, repeated)
        times = [t / repeated for t in r.time_us(several, r.options.repeats)]
        r.meet()
        us = statistics.median(times)
        share = round(remote, 3) if name in ("dispatch", "combine") else None
        r.row(
            "bandwidth", call=name, bytes=moved, remote_share=share, **summary(times), GBps=round(moved / us / 1e3, 1)
        )
    r.transport.free(table)


def _model(r: Rank, path: str, shared_mode: str) -> DevelopmentModel:
    import torch
    from moe_kernels.model import DevelopmentModel, development_config, small_config

    if r.options.small:
        config = small_config(num_experts=4 * r.ranks, router_mode="random", shared_mode=shared_mode)
    else:
        config = development_config(r.options.experts or 16 * r.ranks, shared_mode=shared_mode)
    return DevelopmentModel(
        config, path=path, transport=r.transport if path == "rowwise" else None, device=r.device,
        dtype=torch.bfloat16 if r.cuda else torch.float32,
        grouped_gemm=r.options.grouped_gemm if r.cuda else None,
    )  # fmt: skip


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
        calls, pools = {}, []
        for path, shared_mode in VARIANTS:
            block = RoutedBlock(
                replace(config, shared_mode=shared_mode), path=path, device=r.device, dtype=dtype,
                transport=r.transport if path == "rowwise" else None,
                grouped_gemm=r.options.grouped_gemm if r.cuda else None,
            )  # fmt: skip
            calls[path, shared_mode] = functools.partial(_forward_and_backward, block, x, d_out)
            if path == "rowwise":
                pools.append(block)
        _time_variants(r, "layer", calls, tokens, batch=4)
        for block in pools:
            block.pool.close()


def _forward_and_backward(block: RoutedBlock, x: torch.Tensor, d_out: torch.Tensor) -> None:
    import torch

    torch.autograd.grad(block(x), [x, *block.parameters()], d_out)


def _config(r: Rank) -> BlockConfig:
    from moe_kernels.model import development_config, small_config

    if r.options.small:
        return small_config(num_experts=4 * r.ranks).block
    return development_config(r.options.experts or 16 * r.ranks).block


def _time_variants(r: Rank, section: str, calls: dict, tokens: int, batch: int) -> None:
    from moe_kernels.waits import count_host_waits

    times: dict = {key: [] for key in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for block_call in range(r.options.repeats):
        order = list(calls) if block_call % 2 == 0 else list(calls)[::-1]
        for key in order:
            several = functools.partial(_repeat, calls[key], batch)
            times[key] += [t / batch for t in r.time_us(several, 1)]
    for (path, shared_mode), measured in times.items():
        waits = None
        if r.cuda:
            r.meet()
            waits = count_host_waits(calls[path, shared_mode], warmup=1)
        r.row(section, path=path, shared_mode=shared_mode, tokens=tokens, **summary(measured),
              waits=waits.total if waits else None, pageable_d2h=waits.pageable_d2h if waits else None,
              launches=waits.launches if waits else None, samples_us=[round(t, 1) for t in measured])  # fmt: skip


def steps(r: Rank) -> None:
    """Time whole training steps per path, count waits per step, and capture one step per path on every rank."""
    import torch
    import torch.distributed as dist
    from moe_kernels.model import TrainStep, make_optimizer
    from moe_kernels.waits import count_host_waits

    sizes = ((2, 16),) if r.options.small else tuple((2, s) for s in r.options.sequence)
    for sequences, length in sizes:
        calls, models = {}, []
        vocabulary = 64 if r.options.small else 100352
        generator = torch.Generator(device=r.device).manual_seed(r.rank)
        tokens, targets = (
            torch.randint(0, vocabulary, (sequences, length), device=r.device, generator=generator) for _ in range(2)
        )
        for path, shared_mode in VARIANTS:
            model = _model(r, path, shared_mode)
            step = TrainStep(model, make_optimizer(model), group=dist.group.WORLD)
            calls[path, shared_mode] = functools.partial(step, [(tokens, targets)])
            models.append(model)
        _time_variants(r, "step", calls, sequences * length, batch=1)
        for model in models:
            for index, block in enumerate(model.routed_blocks[:1]):
                metrics = block.metrics
                r.row("metrics", path=block.path, block=index, tokens=sequences * length,
                      offered=int(metrics["offered"]), dropped=int(metrics["dropped"]),
                      capacity_use=float(metrics["capacity_use"].max()),
                      received=int(metrics["received_load"].sum()))  # fmt: skip
            if model.pool is not None:
                r.row("pool", tokens=sequences * length, slots=model.pool.slots, high_water=model.pool.high_water,
                      bytes_per_rank=model.pool.bytes_per_rank)  # fmt: skip
        if r.cuda and (sequences, length) == sizes[-1] and r.restart == 0 and r.options.traces:
            for path, shared_mode in (VARIANTS[0], VARIANTS[2]):
                r.meet()
                trace = count_host_waits(calls[path, shared_mode], warmup=1).trace
                target = Path(r.options.out) / f"trace_{path}_rank{r.rank}.json.gz"
                target.write_bytes(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), 6))
        for model in models:
            if model.pool is not None:
                model.pool.close()
        del calls, models
        if r.cuda:
            torch.cuda.empty_cache()


def run_rank(rank: int, ranks: int, init: str, options: Options, restart: int) -> None:
    """Join the group, run every section, gather the rows on rank 0."""
    import torch
    import torch.distributed as dist
    from moe_kernels.transport import NvshmemTransport, SharedMemoryTransport

    started = time.perf_counter()
    method = f"file://{init}"
    if options.backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device, init_method=method)
        transport: Transport = NvshmemTransport(device)
        if transport.host_barriers:
            raise RuntimeError(f"{ranks} ranks share GPUs: timing would mean nothing; use one rank per GPU")
    else:
        torch.set_num_threads(1)
        device = torch.device("cpu")
        dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=method)
        transport = SharedMemoryTransport()
    r = Rank(options, rank, ranks, restart, device, transport, [])
    peer = r.cuda and ranks > 1 and torch.cuda.can_device_access_peer(rank, (rank + 1) % ranks)
    name = torch.cuda.get_device_name(device) if r.cuda else "cpu"
    r.row(
        "start",
        seconds=round(time.perf_counter() - started, 2),
        transport=transport.name,
        device=name,
        peer_access=peer,
    )
    sections = (parity, bandwidth, layers, steps) if restart == 0 else (steps,)
    for section in sections:
        begun = time.perf_counter()
        section(r)
        r.row("section", name=section.__name__, seconds=round(time.perf_counter() - begun, 2))
        _write(r)
    transport.close()
    dist.barrier()
    dist.destroy_process_group()


def _write(r: Rank) -> None:
    """Rank 0 rewrites the file after each section, so that a run that is stopped keeps what it had."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * r.ranks
    dist.all_gather_object(gathered, r.rows)
    if r.rank != 0:
        return
    target = Path(r.options.out) / f"rows_restart{r.restart}.json"
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps([row for rows in gathered for row in rows], indent=0))
    os.replace(temporary, target)


def run(options: Options, ranks: int, restarts: int = 1) -> list[dict[str, Any]]:
    """Start `ranks` processes `restarts` times (later starts time whole steps only); return every rank's rows.

    Raises:
        ValueError: fewer than one rank.
        RuntimeError: ranks share a GPU, or a rank failed.
    """
    import torch.multiprocessing as mp

    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}; no GPU is visible?")
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
