"""Executes one notebook through papermill, alone in a process: ``python -m workbench.suite.child``.

The parent writes the job as one JSON line on stdin and keeps stdin open: its end means that the parent is gone, and
then this process and its kernel go too. Events leave as JSON lines on the original stdout; everything else that
prints ends on stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

kernel_pid: int | None = None
kernel_phase = "not started"  # not started | starting | ready
kernel_process: Any = None


def kernel_manager_class(connection_file: Path, send: Callable[..., None]) -> type:
    """Return a kernel manager that talks over IPC sockets in its own folder and runs this very interpreter.

    TCP ports collide between kernels that start together ("Address already in use", then a minute of silence), and a
    kernel spec called ``python3`` in the user's folders may belong to another Python.
    """
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class SuiteKernelManager(AsyncKernelManager):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**{**kwargs, "transport": "ipc", "connection_file": str(connection_file)})

        @property
        def kernel_spec(self) -> KernelSpec:
            argv = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=argv, display_name="Python 3", language="python")

        def client(self, **kwargs: Any) -> Any:
            client = super().client(**kwargs)
            # A busy reader that lets 1000 messages wait would lose the next, the one that ends the cell among them.
            client.context.rcvhwm = 0
            return client

        async def start_kernel(self, *args: Any, **kwargs: Any) -> None:
            global kernel_pid, kernel_phase, kernel_process
            kernel_phase = "starting"
            await super().start_kernel(*args, **kwargs)
            kernel_process = self.provisioner.process  # type: ignore[union-attr]
            kernel_pid = kernel_process.pid
            send(event="kernel", pid=kernel_pid)

        async def shutdown_kernel(self, *args: Any, **kwargs: Any) -> None:
            send(event="memory", peak_bytes=peak_memory_bytes(kernel_pid))
            await super().shutdown_kernel(*args, **kwargs)

    return SuiteKernelManager


def peak_memory_bytes(pid: int | None) -> int | None:
    """Return the largest resident size that a running process ever had; None where /proc does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def vanish(status: int, *paths: Path) -> None:
    """Kill the kernel's process group, remove these files and folders, and leave at once."""
    if kernel_pid is not None:
        with contextlib.suppress(OSError):
            os.killpg(kernel_pid, signal.SIGKILL)
    for path in paths:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    os._exit(status)


def main() -> int:
    """Run the job on stdin; the exit status is 0 when papermill ended without an error."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(**event: Any) -> None:
        with lock, contextlib.suppress(OSError):
            events.write(json.dumps(event) + "\n")
            events.flush()

    with open(0, "rb", buffering=0, closefd=False) as stdin:  # unbuffered: what follows is the lifeline's
        job = json.loads(stdin.readline())
    output, connection_file = Path(job["output"]), Path(job["connection_file"])
    leftovers = [*map(Path, job["scratch"]), connection_file.parent]
    signal.signal(signal.SIGTERM, lambda *_: vanish(143))
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def lifeline() -> None:
        # not sys.stdin: a daemon thread that holds its lock aborts the interpreter's shutdown
        while os.read(0, 1):
            pass
        vanish(1, *leftovers)

    threading.Thread(target=lifeline, daemon=True).start()
    error = execute(job, send)
    if error is not None:
        send(event="error", **error)
    send(event="executed")
    if job["html"] and output.exists():
        try:
            from workbench.suite.export import to_html

            to_html(output, Path(job["html"]), back_link=job["back_link"])
        except Exception as failure:
            send(event="html_error", message=f"{type(failure).__name__}: {failure}")
    send(event="done")
    return 0 if error is None else 1


def execute(job: dict[str, Any], send: Callable[..., None]) -> dict[str, Any] | None:
    """Execute the notebook; return None, or what stopped it (kind, message, code cell, traceback)."""
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    deadline = time.monotonic() + job["timeout_s"]
    code_cells: dict[int, int] = {}
    current: int | None = None

    def ready(notebook: Any, **_: Any) -> None:
        global kernel_phase
        kernel_phase = "ready"
        cells = [i for i, c in enumerate(notebook.cells) if c.cell_type == "code" and c.source.strip()]
        code_cells.update({index: k for k, index in enumerate(cells, 1)})
        send(event="ready", cells=len(cells))

    def cell_started(cell_index: int, **_: Any) -> None:
        nonlocal current
        current = code_cells.get(cell_index)
        send(event="cell", cell=current, cells=len(code_cells), peak_bytes=peak_memory_bytes(kernel_pid))

    try:
        papermill.execute_notebook(
            escape_braces(job["input"]),
            escape_braces(job["output"]),
            parameters=job["parameters"],
            kernel_name="python3",
            cwd=job["cwd"],
            progress_bar=False,
            report_mode=False,
            start_timeout=job["start_timeout_s"],
            iopub_timeout=120,
            timeout_func=lambda _cell: max(1, round(deadline - time.monotonic())),
            kernel_manager_class=kernel_manager_class(Path(job["connection_file"]), send),
            on_notebook_start=ready,
            on_cell_execute=cell_started,
        )
    except PapermillExecutionError as error:
        text = "\n".join(error.traceback)
        return {"kind": "cell_error", "message": f"{error.ename}: {error.evalue}", "cell": current, "traceback": text}
    except CellTimeoutError:
        message = f"cell {current} was still running when the limit of {job['timeout_s']:g} s for the notebook was over"
        return {"kind": "timeout", "message": message, "cell": current}
    except DeadKernelError:
        message = f"the kernel died in cell {current}{died_how(kernel_process.poll() if kernel_process else None)}"
        return {"kind": "kernel_died", "message": message, "cell": current}
    except Exception as error:
        import traceback

        kind = "kernel_start" if kernel_phase == "starting" else "runner"
        text = "".join(traceback.format_exception(error))
        return {"kind": kind, "message": f"{type(error).__name__}: {error}", "cell": current, "traceback": text}
    return None


def escape_braces(path: str) -> str:
    """Papermill formats its paths as templates."""
    return path.replace("{", "{{").replace("}", "}}")


def died_how(status: int | None) -> str:
    """Say how a process ended, from its return code."""
    if status is None:
        return ""
    if status < 0:
        name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
        return f" (killed by {name}{', perhaps out of memory' if name == 'SIGKILL' else ''})"
    return f" (exit status {status})"


if __name__ == "__main__":
    raise SystemExit(main())
