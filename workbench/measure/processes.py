"""What a measurement needs of processes: a fresh interpreter for one function, and the group of a single rank.

Standard library and torch only.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


class ProcessEndedError(RuntimeError):
    """A process that measured ended without an answer: it crashed, raised or took too long."""


def in_new_process(function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
    """Return `function(*args)` of a fresh interpreter: a process start of its own, and a compiler's crash stays there.

    Args:
        function: of an importable module; arguments and result must pickle.
        timeout_s: longest time that it may take; None: any.
    Raises:
        ProcessEndedError: it crashed, raised or took longer; the message says which.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, function, args))
    process.start()
    there.close()
    named = f"the process of {function.__module__}.{function.__qualname__}"
    try:
        if not here.poll(timeout_s):
            raise ProcessEndedError(f"{named} took longer than {timeout_s:g} s")
        found, answer = here.recv()
    except EOFError:
        process.join()
        raise ProcessEndedError(f"{named} crashed: exit status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if not found:
        raise ProcessEndedError(f"{named} failed: {answer}")
    return answer


def _answer(there: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        there.send((True, function(*args)))
    except Exception as error:
        there.send((False, f"{type(error).__name__}: {error}"))
        raise


def join_as_single_rank() -> None:
    """Make this process the only rank of a NCCL group, unless it is in a group already."""
    import torch.distributed as dist

    if not dist.is_initialized():
        # The default device of the group's collectives is this process's only GPU.
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
