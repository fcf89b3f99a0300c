"""One rank of a launched program: joins the group, runs its sections, leaves its rows and its trace in the folder.

`python -m torch.distributed.run ... -m workbench.measure.ranks '{"out": ..., "program": "routed_block"}'`; see
`workbench.measure.launch`. Over NCCL the ranks share NVSHMEM memory, one GPU each; over gloo they are CPU processes.
"""

from __future__ import annotations

import datetime
import functools
import gzip
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.files import replace_file
from workbench.measure.timing import summary

if TYPE_CHECKING:
    from moe_kernels.transport import SymmetricPool

    from workbench.measure.multi_gpu import Rank

PROGRAMS = ("routed_block", "regimes")
PATHS = ("synchronized", "rowwise")
LIMIT_STATUS = 124


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank runs.

    Attributes:
        out: folder for ``rank<r>.json`` and ``traces/rank<r>.json.gz``.
        program: `routed_block` (parity with one rank, then the block on both paths) or `regimes` (training steps).
        backend: `nccl` with one GPU per rank, or `gloo` on the CPU.
        tokens: tokens per rank; one number, or one per rank.
        small: sizes that a CPU runs in seconds.
        steps: steps that are timed, then steps that are profiled.
        timeout_s: how long a rank waits for another.
        limit_s: how long the whole run may take.
        agent: process that started the ranks, whose end is theirs; 0: the parent.
    """

    out: str
    program: str = "routed_block"
    backend: str = "gloo"
    tokens: tuple[int, ...] = (32,)
    small: bool = True
    steps: int = 5
    timeout_s: float = 120.0
    limit_s: float = 900.0
    agent: int = 0

    def tokens_of(self, rank: int) -> int:
        """Tokens of one rank."""
        return self.tokens[rank % len(self.tokens)]


def run(job: Job) -> None:
    """Run this process's rank, as the environment that torchrun set names it."""
    import torch
    import torch.distributed as dist

    from workbench.measure.multi_gpu import Options, Rank, join, parity

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    patience = datetime.timedelta(seconds=job.timeout_s)
    transport = join(job.backend, int(os.environ.get("LOCAL_RANK", 0)), timeout=patience)
    options = Options(out=job.out, backend=job.backend, small=job.small, repeats=job.steps)
    r = Rank(options, rank, ranks, 0, transport, [])
    r.row("start", transport=transport.name, device=torch.cuda.get_device_name(r.device) if r.cuda else "cpu")
    _leave(r, job)
    # The block first: it refuses unequal T.
    work, pool = _block(r, job) if job.program == "routed_block" else _training(r, job)
    if job.program == "routed_block":
        parity(r)
        _leave(r, job)
    for step in work.values():
        for _ in range(2):
            step()
    # Until the dry run has ended, rowwise ranks agree on T through their hosts.
    pool.freeze()
    for path, step in work.items():
        times = r.time_us(step, job.steps)
        r.row("step", path=path, tokens=job.tokens_of(rank), **summary(times), samples_us=[round(t, 1) for t in times])
        _leave(r, job)
    _profile(r, job, work["rowwise"])
    pool.close()
    transport.close()
    dist.barrier()
    dist.destroy_process_group()


def _block(r: Rank, job: Job) -> tuple[dict[str, Callable[[], Any]], SymmetricPool]:
    """Forward and backward of one routed block on each path, over this rank's tokens."""
    import torch
    from moe_kernels.block import RoutedBlock
    from moe_kernels.model import development_config, small_config

    if job.small:
        config = small_config(num_experts=4 * r.ranks).block
    else:
        config = development_config(16 * r.ranks).block
    dtype = torch.bfloat16 if r.cuda else torch.float32
    generator = torch.Generator(device=r.device).manual_seed(r.rank)
    size = (job.tokens_of(r.rank), config.width)
    x, d_out = (torch.randn(size, device=r.device, generator=generator).to(dtype) for _ in range(2))
    x.requires_grad_()
    blocks = {
        path: RoutedBlock(
            config, path=path, transport=r.transport if path == "rowwise" else None, device=r.device, dtype=dtype
        )
        for path in PATHS
    }
    # Before anything is timed, so that unequal T is refused on every rank at once.
    for path in reversed(PATHS):
        out = blocks[path](x)
        torch.autograd.grad(out, [x, *blocks[path].parameters()], d_out)
        metrics = blocks[path].metrics
        r.row(
            "routes", path=path, tokens=job.tokens_of(r.rank), offered=int(metrics["offered"]),
            accepted=int(metrics["accepted"]), dropped=int(metrics["dropped"]),
            received=int(metrics["received_load"].sum()),
        )  # fmt: skip

    def step(block: RoutedBlock) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(block(x), [x, *block.parameters()], d_out)

    return {path: step(block) for path, block in blocks.items()}, blocks["rowwise"].pool


def _training(r: Rank, job: Job) -> tuple[dict[str, Callable[[], Any]], SymmetricPool]:
    """Whole training steps of the development model on each path; a step is two sequences."""
    import torch
    import torch.distributed as dist
    from moe_kernels.model import DevelopmentModel, TrainStep, development_config, make_optimizer, small_config

    tokens = job.tokens_of(r.rank)
    if tokens % 2:
        raise ValueError(f"tokens: a training step has two sequences, so an even number is expected, got {tokens}")
    if job.small:
        config = small_config(num_experts=4 * r.ranks, router_mode="random")
    else:
        config = development_config(16 * r.ranks)
    generator = torch.Generator(device=r.device).manual_seed(r.rank)
    size = (2, tokens // 2)
    inputs, targets = (
        torch.randint(0, config.vocabulary, size, device=r.device, generator=generator) for _ in range(2)
    )
    dtype = torch.bfloat16 if r.cuda else torch.float32
    steps, pools = {}, []
    for path in PATHS:
        model = DevelopmentModel(
            config, path=path, transport=r.transport if path == "rowwise" else None, device=r.device, dtype=dtype
        )
        step = TrainStep(model, make_optimizer(model), group=dist.group.WORLD)
        steps[path] = functools.partial(step, [(inputs, targets)])
        if model.pool is not None:
            pools.append(model.pool)
    return steps, pools[0]


def _profile(r: Rank, job: Job, step: Callable[[], Any]) -> None:
    """Profile named steps after a common start and keep the trace, without what names this machine."""
    from torch.profiler import ProfilerActivity, profile, record_function

    from workbench.core.scrub import scrub

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if r.cuda else [])
    r.meet()
    with profile(activities=activities) as profiler:
        for i in range(job.steps):
            with record_function(f"ProfilerStep#{i}"):
                step()
        r.synchronize()
    target = Path(job.out) / "traces" / f"rank{r.rank:05d}.json.gz"
    target.parent.mkdir(exist_ok=True)
    raw = target.with_name(f".{target.name}.raw.json")
    profiler.export_chrome_trace(str(raw))
    trace = json.loads(raw.read_text(encoding="utf-8", errors="replace"))
    raw.unlink()
    # scrub keeps no free text; the rank is what tells the files apart.
    trace = scrub(trace) | {"distributedInfo": {"rank": r.rank, "world_size": r.ranks}}
    replace_file(target, gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), 6))


def _leave(r: Rank, job: Job) -> None:
    """Write this rank's rows so far."""
    replace_file(Path(job.out) / f"rank{r.rank}.json", json.dumps(r.rows, indent=0))


def _watch(job: Job) -> None:
    """End this process when the agent is gone, so that no rank outlives a launcher that was killed, or at the limit."""
    agent, deadline = job.agent or os.getppid(), time.monotonic() + job.limit_s

    def look() -> None:
        while os.getppid() == agent and time.monotonic() < deadline:
            time.sleep(0.25)
        if time.monotonic() < deadline:
            os._exit(1)
        print(f"the limit of {job.limit_s:g} s for the whole run is over", file=sys.stderr, flush=True)
        os._exit(LIMIT_STATUS)

    threading.Thread(target=look, daemon=True).start()


def main() -> None:
    """Run the job in the first argument; an error is handed to torchrun with its message."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    given["tokens"] = tuple(given.get("tokens", (32,)))
    job = Job(**given)
    _watch(job)
    from torch.distributed.elastic.multiprocessing.errors import record

    record(run)(job)


if __name__ == "__main__":
    main()
