"""Routed paths on the GPUs of one host, one rank each: start, parity, bandwidth, step times, waits, captures.

    python scripts/multi_gpu.py --out out/multi_gpu --restarts 3        # as many ranks as GPUs
    torchrun --standalone --nproc-per-node 8 scripts/multi_gpu.py --out out/multi_gpu
    python scripts/multi_gpu.py --out out/cpu --ranks 2 --backend gloo --small   # the same script on CPU ranks

Rank 0 writes `rows.json` (every row names ranks, restart and path) and every rank `trace_<path>_rank<r>.json.gz`.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from moe_kernels.block import BlockConfig, RoutedBlock  # noqa: E402
from moe_kernels.combine import combine  # noqa: E402
from moe_kernels.dispatch import dispatch  # noqa: E402
from moe_kernels.model import (  # noqa: E402
    DevelopmentModel,
    TrainStep,
    development_config,
    make_optimizer,
    small_config,
)
from moe_kernels.route_map import capacity_rows, route_map  # noqa: E402
from moe_kernels.transport import NvshmemTransport, SharedMemoryTransport, Transport  # noqa: E402
from moe_kernels.waits import count_host_waits  # noqa: E402

PARITY = BlockConfig(width=512, expert_width=1024, num_experts=8, top_k=2, capacity_factor=8.0, shared_width=256)
VARIANTS = (("synchronized", "stream"), ("synchronized", "before_wait"), ("rowwise", "stream"))


@dataclass
class Rank:
    """What every section needs on one rank."""

    options: argparse.Namespace
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


def quantiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    at = lambda q: ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]  # noqa: E731
    return {f"time_us_p{round(100 * q)}": round(at(q), 2) for q in (0.2, 0.5, 0.8)}


def parity(r: Rank) -> None:
    """Compare both paths with one rank that holds every row and expert: relative errors against the budgets."""
    tokens = 64
    generator = torch.Generator().manual_seed(11)
    x, d_out = (torch.randn(r.ranks * tokens, PARITY.width, generator=generator).to(r.device) for _ in range(2))
    one = RoutedBlock(PARITY, seed=5, device=r.device)
    whole = _gradients(one, x, d_out)
    mine = slice(r.rank * tokens, (r.rank + 1) * tokens)
    for path in ("synchronized", "rowwise"):
        transport = r.transport if path == "rowwise" else None
        block = RoutedBlock(PARITY, path=path, transport=transport, seed=5, device=r.device)
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
            "bandwidth", call=name, bytes=moved, remote_share=share, **quantiles(times), GBps=round(moved / us / 1e3, 1)
        )
    r.transport.free(table)


def _model(r: Rank, path: str, shared_mode: str) -> DevelopmentModel:
    if r.options.small:
        config = small_config(num_experts=4 * r.ranks, router_mode="random", shared_mode=shared_mode)
    else:
        config = development_config(r.options.experts, shared_mode=shared_mode)
    return DevelopmentModel(
        config, path=path, transport=r.transport if path == "rowwise" else None, device=r.device,
        dtype=torch.bfloat16 if r.cuda else torch.float32,
        grouped_gemm=r.options.grouped_gemm if r.cuda else None,
    )  # fmt: skip


def layers(r: Rank) -> None:
    """Time forward + backward of one routed block per path over microbatch sizes, interleaved."""
    sizes = (16, 32) if r.options.small else (1024, 2048, 4096, 8192, 16384)
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
    torch.autograd.grad(block(x), [x, *block.parameters()], d_out)


def _config(r: Rank) -> BlockConfig:
    if r.options.small:
        return small_config(num_experts=4 * r.ranks).block
    return development_config(r.options.experts).block


def _time_variants(r: Rank, section: str, calls: dict, tokens: int, batch: int) -> None:
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
        r.row(section, path=path, shared_mode=shared_mode, tokens=tokens, **quantiles(measured),
              waits=waits.total if waits else None, pageable_d2h=waits.pageable_d2h if waits else None,
              launches=waits.launches if waits else None, samples_us=[round(t, 1) for t in measured])  # fmt: skip


def steps(r: Rank) -> None:
    """Time whole training steps per path, count waits per step, and capture one step per path on every rank."""
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
        if r.cuda and (sequences, length) == sizes[-1] and r.restart == 0:
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


def run_rank(rank: int, ranks: int, init: str | None, options: argparse.Namespace, restart: int) -> None:
    """Join the group, run every section, gather the rows on rank 0."""
    started = time.perf_counter()
    method = {"init_method": f"file://{init}"} if init else {}
    if options.backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device, **method)
        transport: Transport = NvshmemTransport(device)
        if transport.host_barriers:
            raise RuntimeError(f"{ranks} ranks share GPUs: timing would mean nothing; use one rank per GPU")
    else:
        torch.set_num_threads(1)
        device = torch.device("cpu")
        dist.init_process_group("gloo", rank=rank, world_size=ranks, **method)
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
    gathered: list[Any] = [None] * r.ranks
    dist.all_gather_object(gathered, r.rows)
    if r.rank != 0:
        return
    target = Path(r.options.out) / f"rows_restart{r.restart}.json"
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps([row for rows in gathered for row in rows], indent=0))
    os.replace(temporary, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for rows and traces")
    parser.add_argument("--ranks", type=int, default=None, help="default: the number of GPUs")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU runs in seconds")
    parser.add_argument("--experts", type=int, default=None, help="default: 16 per rank, the share of 128 at EP8")
    parser.add_argument("--sequence", type=int, nargs="+", default=[1024, 2048, 8192], help="tokens per sequence")
    parser.add_argument("--grouped-gemm", default="triton", choices=("triton", "torch"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--restarts", type=int, default=1, help="process restarts; later ones time steps only")
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(24 << 30))
    if "RANK" in os.environ:
        ranks = int(os.environ["WORLD_SIZE"])
        options.experts = options.experts or 16 * ranks
        run_rank(int(os.environ["RANK"]), ranks, None, options, 0)
        return 0
    ranks = options.ranks or torch.cuda.device_count()
    if ranks < 1:
        parser.error("no GPU is visible; give --ranks with --backend gloo")
    options.experts = options.experts or 16 * ranks
    for restart in range(options.restarts):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(
                run_rank, (ranks, f"{folder}/init", options, restart), nprocs=ranks, start_method="spawn"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
