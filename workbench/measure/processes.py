"""What a measurement needs of processes: a fresh interpreter for one function, and the group of a single rank.

Standard library and torch only.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


class ProcessEndedError(RuntimeError):
    """A process that measured ended without an answer: it crashed, raised or took too long."""


class ProcessCrashedError(ProcessEndedError):
    """A signal ended it."""


def in_new_process(function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
    """Return `function(*args)` of a fresh interpreter: a process start of its own, and a compiler's crash stays there.

    The reader's own main script is not run again in it.

    Args:
        function: of an importable module; arguments and result must pickle.
        timeout_s: longest time that it may take; None: any.
    Raises:
        ProcessEndedError: it raised or took longer, or as ProcessCrashedError: a signal ended it.
    """
    named = f"the process of {function.__module__}.{function.__qualname__}"
    path = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        target = Path(folder) / "answer"
        command = [sys.executable, "-c", "from workbench.measure import processes; processes.answer()", str(target)]
        try:
            done = subprocess.run(command, input=pickle.dumps((function, args)), env=path, stderr=subprocess.PIPE,
                                  timeout=timeout_s)  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ProcessEndedError(f"{named} took longer than {timeout_s:g} s") from None
        if done.returncode < 0:
            raise ProcessCrashedError(f"{named} crashed: ended by {signal.Signals(-done.returncode).name}")
        if done.returncode:
            told = done.stderr.decode(errors="replace").strip() or str(done.returncode)
            raise ProcessEndedError(f"{named} failed: {told.splitlines()[-1]}\n{told[-3000:]}")
        return pickle.loads(target.read_bytes())


def answer() -> None:
    """What the new process does: the function that came in, its result into the file that is named."""
    function, args = pickle.load(sys.stdin.buffer)
    Path(sys.argv[1]).write_bytes(pickle.dumps(function(*args)))


def join_as_single_rank() -> None:
    """Make this process the only rank of a NCCL group, unless it is in a group already."""
    import torch.distributed as dist

    if not dist.is_initialized():
        # The default device of the group's collectives is this process's only GPU.
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
