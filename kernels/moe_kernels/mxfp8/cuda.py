"""Loads the sm_90a kernels of `cuda.cu`: compiled once per source text with nvcc, called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from moe_kernels import _compat
from moe_kernels._launch import on_device

_HERE = Path(__file__).parent
_SOURCES = ("cuda.cu", "launch.cuh", "ptx.cuh", "rows.cuh", "wgmma_e4m3.cuh")
_FLAGS = (
    "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC", "-O3", "-std=c++17",
    "--split-compile=0",
)  # fmt: skip

FROM_MX, FROM_BF16_FLOOR, FROM_BF16_RCEIL, FROM_FOLDED = 0, 1, 2, 3
"""What the rows are that a launch reads."""
OVERLAP, RELEASE, EARLY = 1, 2, 4
"""Flags of a launch. OVERLAP: start while the launch before drains. RELEASE: a row kernel lets the launch after it
start early. EARLY: the large GEMM reads weights and group ends before the launch before it has ended, which is right
only after a row kernel of our own, which starts when all before it have ended and writes neither."""
SMALL, TWO_BLOCKS = 1000, 100
"""Variants of the GEMM: 0 to 3 as listed in cuda.cu's `mx_big_launch`; SMALL + token columns (8, 16, 32, 64), plus
TWO_BLOCKS for two blocks on each multiprocessor."""


def available(device: torch.device | None = None) -> bool:
    """Whether the CUDA backend can run: a GPU of compute capability 9.x and nvcc (or a library built before)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return _library_path().exists() or _nvcc() is not None


def _nvcc() -> str | None:
    found = shutil.which("nvcc")
    if found is None and os.path.exists("/usr/local/cuda/bin/nvcc"):
        found = "/usr/local/cuda/bin/nvcc"
    return found


@cache
def _library_path() -> Path:
    digest = hashlib.sha256(
        b"".join((_HERE / s).read_bytes() for s in _SOURCES) + " ".join(_FLAGS).encode()
    ).hexdigest()[:16]
    root = Path(os.environ.get("MOE_KERNELS_CACHE", Path.home() / ".cache" / "moe_kernels"))
    return root / f"mxfp8_{digest}.so"


@cache
def library() -> ctypes.CDLL:
    """Return the compiled kernels, building them at the first use (about 20 s).

    Raises:
        RuntimeError: nvcc is missing or fails; the message carries its output.
    """
    path = _library_path()
    if not path.exists():
        nvcc = _nvcc()
        if nvcc is None:
            raise RuntimeError(
                "impl='cuda' needs nvcc (CUDA 12.4 or newer) on the PATH; use impl='triton' or impl='reference'"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            done = subprocess.run(
                [nvcc, *_FLAGS, str(_HERE / "cuda.cu"), "-o", str(built)], capture_output=True, text=True
            )
            if done.returncode != 0:
                raise RuntimeError(f"nvcc failed on cuda.cu with exit status {done.returncode}:\n{done.stderr[-4000:]}")
            os.replace(built, path)
    lib = ctypes.CDLL(str(path))
    p, i = ctypes.c_void_p, ctypes.c_int
    lib.mx_rows_launch.argtypes = [p, p, p, p, p, i, i, i, i, i, p, p]
    lib.mx_small_launch.argtypes = [p, p, p, p, p, p, i, i, i, i, i, i, i, p, p]
    lib.mx_big_launch.argtypes = [p, p, p, p, p, p, i, i, i, i, i, i, p, p]
    lib.mx_plan_new.argtypes, lib.mx_plan_new.restype = [], p
    lib.mx_plan_run.argtypes, lib.mx_plan_free.argtypes = [p, p], [p]
    return lib


class Plan:
    """Up to two launches with their arguments, kept on the C++ side: `run` costs the host one foreign call.

    It belongs to the device that was current when its launches were kept. It holds addresses, not tensors: whoever
    keeps a plan sees to it that they stay valid.
    """

    __slots__ = ("_free", "_run", "handle")

    def __init__(self) -> None:
        lib = library()
        self.handle = lib.mx_plan_new()
        self._run, self._free = lib.mx_plan_run, lib.mx_plan_free

    def run(self, stream: int) -> None:
        """Submit the launches to a stream of the plan's device, which need not be the current one.

        Raises:
            RuntimeError: CUDA refuses a launch.
        """
        if status := self._run(self.handle, stream):
            check(status, "MXFP8 grouped GEMM")

    def __del__(self) -> None:
        free = getattr(self, "_free", None)  # absent where the library could not be had
        if free is not None:
            free(self.handle)


_MEANING = {
    -1: "the driver has no cuTensorMapEncodeTiled",
    -2: "K is too large for the small-M kernel",
    -4: "unknown variant",
    -5: "more than 256 experts",
    -6: "a plan holds two launches",
    -7: "more than 32 devices",
}


def check(status: int, what: str) -> None:
    """Raise RuntimeError where a launcher returned an error."""
    if status:
        raise RuntimeError(f"{what} failed: {_MEANING.get(status, f'CUDA error {status}')}")


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for an address between multiples of 16 bytes, which would end the process's use of the GPU: the
    kernels move 16 at a time. The compiler's tensors have no address."""
    if not torch.compiler.is_compiling() and tensor.data_ptr() % 16:
        raise ValueError(
            f"impl='cuda' needs {name} to start at a multiple of 16 bytes; got {tensor.data_ptr() % 16} bytes past one"
        )


def _addresses(*tensors: torch.Tensor | None) -> list[int | None]:
    return [None if t is None else t.data_ptr() for t in tensors]


def _target(out: torch.Tensor, plan: Plan | None) -> tuple[int | None, int | None]:
    return (_compat.current_stream_address(out.device.index), None) if plan is None else (None, plan.handle)


def rows(x, scales, out, out_scales, wide, source: int, target: int, flags: int, plan: Plan | None = None) -> None:
    """Convert rows to out [M, K] on the current stream of its device, or keep the launch in `plan`.

    Args:
        x, scales, out, out_scales, wide: tensors as in `rows.run_rows`; `scales` and `wide` may be None.
        source: `FROM_MX` to `FROM_BF16_RCEIL`.
        target: 0 canonical, 1 folded, 2 one scale a row.
        flags: sum of `OVERLAP` and `RELEASE`.
    """
    check_aligned("the rows", x)
    check_aligned("out payload", out)
    if len(out):
        with on_device(out):
            head = _addresses(x, scales, out, out_scales, wide)
            status = library().mx_rows_launch(*head, *out.shape, source, target, flags, *_target(out, plan))
        check(status, "MXFP8 row kernel")


def grouped_gemm(
    a, a_scales, w, w_scales, ends, out, source: int, variant: int, flags: int, plan: Plan | None = None
) -> None:
    """Multiply rows [M, K] and folded weights [E, N, K] into out [M, N], on the current stream of its device, or keep
    the launch in `plan`; `a_scales` is None for BF16 rows."""
    E, N, K = w.shape
    head = (*_addresses(a, a_scales, w, w_scales, ends, out), len(a), N, K, E)
    with on_device(out):
        if variant >= SMALL:
            status = library().mx_small_launch(*head, source, variant - SMALL, flags, *_target(out, plan))
        else:
            status = library().mx_big_launch(*head, variant, flags, *_target(out, plan))
    check(status, "MXFP8 grouped GEMM")
