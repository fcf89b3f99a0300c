"""A program on several ranks of this machine, started through torchrun; rows and traces of every rank are collected.

Over NCCL each rank has a GPU and NVSHMEM memory; over gloo the ranks are CPU processes with shared memory.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from workbench.core.files import replace_file
from workbench.measure.ranks import LIMIT_STATUS, PROGRAMS, Job

PROGRAM_OF = {
    "op_routed_block": "routed_block",
    "op_expert_parallel": "routed_block",
    "fig74_submission_regimes": "regimes",
}
_ENVIRONMENT = {
    # A program that uses NVLink multicast can put a host's GPUs out of service.
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_SYMMETRIC_SIZE": str(24 << 30),
    "OMP_NUM_THREADS": "1",
}
_LEFT_BY_A_PEER = ("connection closed by peer", "connection reset by peer", "broken pipe", "sigterm", "socket closed")


class RanksError(RuntimeError):
    """Ranks failed: the message names the rank that failed first and how, and what the others said."""


def program_of(slug: str) -> str:
    """Return the rank program of an experiment.

    Raises:
        ValueError: it has none; the message lists those that have.
    """
    if slug in PROGRAMS:
        return slug
    if slug not in PROGRAM_OF:
        raise ValueError(f"{slug!r} does not run on several ranks; those that do: {', '.join(PROGRAM_OF)}")
    return PROGRAM_OF[slug]


def default_backend(nproc: int) -> str:
    """Return nccl where this machine has a GPU for every rank, else gloo."""
    import torch

    return "nccl" if torch.cuda.device_count() >= nproc else "gloo"


def check(job: Job, nproc: int) -> None:
    """Refuse what cannot run.

    Raises:
        ValueError: naming what was asked for and what is possible.
    """
    import torch

    if nproc < 1:
        raise ValueError(f"nproc: expected 1 or more, got {nproc}")
    if job.program not in PROGRAMS:
        raise ValueError(f"program: expected one of {', '.join(PROGRAMS)}, got {job.program!r}")
    if job.backend not in ("nccl", "gloo"):
        raise ValueError(f"backend: expected nccl or gloo, got {job.backend!r}")
    if job.backend == "nccl" and torch.cuda.device_count() < nproc:
        raise ValueError(f"backend nccl needs one GPU per rank: {nproc} asked for, {torch.cuda.device_count()} visible")
    if len(job.tokens) not in (1, nproc) or min(job.tokens) < 1:
        raise ValueError(f"tokens: expected one positive number, or {nproc} (one per rank), got {list(job.tokens)}")
    if job.steps < 1:
        raise ValueError(f"steps: expected 1 or more, got {job.steps}")


def launch(job: Job, nproc: int) -> list[dict[str, Any]]:
    """Run the job on `nproc` ranks of this machine and return the rows of all ranks, in rank order.

    The ranks end when one of them fails, when this process ends (also by SIGKILL), or at the job's limit. Their output
    lies under ``logs/``, their traces under ``traces/``, all rows in ``rows.json``.

    Raises:
        ValueError: see `check`.
        RanksError: a rank failed; the others were ended.
    """
    check(job, nproc)
    out = Path(job.out).resolve()
    for old in [*out.glob("rank*.json"), *(out / "traces").glob("rank*.json.gz"), out / "rows.json"]:
        old.unlink(missing_ok=True)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    environment = dict(_ENVIRONMENT)
    if job.backend == "gloo" and sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args
    from torch.distributed.run import run as run_agent

    # What it logs about a failed rank is said once, below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    arguments = [
        *("--standalone", "--nnodes", "1", "--nproc-per-node", str(nproc), "--local-addr", "127.0.0.1"),
        *("--max-restarts", "0", "--monitor-interval", "0.1", "--log-dir", str(out / "logs"), "--redirects", "3"),
        *(
            "-m",
            "workbench.measure.ranks",
            json.dumps(dataclasses.asdict(job) | {"out": str(out), "agent": os.getpid()}),
        ),
    ]
    try:
        run_agent(parse_args(arguments))
    except ChildFailedError as error:
        raise RanksError(describe(error.failures, out)) from None
    except SignalException as error:
        raise RanksError(f"stopped by {signal.Signals(error.sigval).name}; all ranks were ended") from None
    rows = [row for rank in range(nproc) for row in json.loads((out / f"rank{rank}.json").read_text())]
    replace_file(out / "rows.json", json.dumps(rows, indent=0))
    return rows


def describe(failures: dict[int, Any], out: Path) -> str:
    """Say which rank failed first: killed before said why, and said why before only missed a peer."""
    lines = {rank: _why(failure) for rank, failure in failures.items()}

    def order(rank: int) -> tuple[int, int]:
        follows = any(text in lines[rank].lower() for text in _LEFT_BY_A_PEER)
        return (2 if follows else 0 if _silent(failures[rank]) else 1, rank)

    first, *others = sorted(lines, key=order)
    text = f"rank {first} {lines[first]}; the other ranks were ended"
    different = {lines[r]: r for r in others if lines[r] != lines[first] and order(r)[0] < 2}
    for line, rank in list(different.items())[:3]:
        text += f"; rank {rank} {line}"
    return f"{text} (output of each rank: {out / 'logs'})"


def _silent(failure: Any) -> bool:
    """Whether a signal ended the rank before it could write why: gloo's threads may abort one that has."""
    return failure.exitcode < 0 and not isinstance(failure.message, dict)


def _why(failure: Any) -> str:
    message = failure.message
    if isinstance(message, dict):
        message = message.get("message", "")
    if _silent(failure):
        return f"was killed by {signal.Signals(-failure.exitcode).name}"
    if failure.exitcode == LIMIT_STATUS:
        return "reached the limit of the whole run"
    return f"failed: {str(message).strip()[:600]}"
