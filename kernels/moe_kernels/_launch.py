"""What every op's api shares: choice of implementation, argument checks with clear errors, device facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from moe_kernels import _compat

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes of the rows and weights that the ops take."""


def resolve_impl(impl: str | None, device: torch.device, allowed: Sequence[str]) -> str:
    """Return the implementation to run: the caller's, or by rule `triton` on a CUDA device and `reference` on the CPU.

    Raises:
        ValueError: unknown name.
        RuntimeError: `triton` asked for on a CPU tensor outside Triton's interpreter, triton is not installed, or a
            device that holds no data a kernel could read (meta) or that nothing here was written for.
    """
    if device.type not in ("cuda", "cpu"):
        raise RuntimeError(f"the ops run on CUDA and CPU tensors; got a tensor on {device}")
    if impl is None:
        impl = "triton" if device.type == "cuda" else "reference"
    if impl not in allowed:
        raise ValueError(f"impl must be one of {', '.join(allowed)}; got {impl!r}")
    if impl == "triton":
        if not _compat.triton_available():
            raise RuntimeError("impl='triton' needs the triton package, which is not installed; use impl='reference'")
        if device.type == "cpu" and not _compat.interpreter_active():
            raise RuntimeError(
                "impl='triton' got a CPU tensor; set TRITON_INTERPRET=1 before import, or use impl='reference'"
            )
    return impl


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | None] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
    contiguous: bool = False,
) -> torch.Tensor:
    """Raise an error that names the tensor, what was expected and what came; return the tensor otherwise.

    `None` in `shape` accepts any size. Values are never read, so a check costs no device wait.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
    if shape is not None and not _fits(tensor.shape, shape):
        wanted = "[" + ", ".join("any" if s is None else str(s) for s in shape) + "]"
        raise ValueError(f"{name} must have shape {wanted}; got {list(tensor.shape)}")
    if dtypes is not None and tensor.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype {' or '.join(str(d) for d in dtypes)}; got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}; got {tensor.device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous; got strides {tuple(tensor.stride())} for shape {list(tensor.shape)}"
        )
    return tensor


def check_int(name: str, value: int) -> None:
    """Raise TypeError for what is no integer. bool is an int to Python, and a float would reach a kernel as one."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int; got {value!r} ({type(value).__name__})")


def _fits(got: Sequence[int], wanted: Sequence[int | None]) -> bool:
    if len(got) != len(wanted):
        return False
    for size, want in zip(got, wanted):  # noqa: SIM110  (a generator takes the host twice as long)
        if want is not None and want != size:
            return False
    return True


def check_no_grad(what: str, *tensors: torch.Tensor | None) -> None:
    """Refuse a call that records no gradient where one is wanted: kernels would lose it silently.

    Raises:
        ValueError: gradients are recorded and one of the tensors requires one.
    """
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                raise ValueError(
                    f"{what} is for calls without gradients; a tensor of shape {list(tensor.shape)} requires one"
                )


def check_first_order(name: str) -> None:
    """Refuse a backward that itself is to be differentiated; call it first in every backward that kernels compute.

    Raises:
        RuntimeError: the backward runs with create_graph=True.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name} has no second derivative: its backward cannot run with create_graph=True")


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the addresses of two dense tensors overlap; False where they have none (meta, torch.compile's traces)."""
    if torch.compiler.is_compiling() or a.is_meta:
        return False
    start, other = a.data_ptr(), b.data_ptr()
    return start < other + b.nbytes and other < start + a.nbytes


def check_offsets(offsets: torch.Tensor, groups: int, device: torch.device) -> torch.Tensor:
    """Check cumulative offsets: int32 [groups], contiguous, on `device`. Values stay unread: kernels clamp them.

    Raises:
        TypeError: another dtype (int64 offsets are a common slip).
        ValueError: another shape, another device (offsets on the CPU would make a host wait), not contiguous.
    """
    return check_tensor("offsets", offsets, shape=(groups,), dtypes=(torch.int32,), device=device, contiguous=True)


_NOTHING = nullcontext()


@cache
def multiprocessors(index: int) -> int:
    """Streaming multiprocessors of CUDA device `index`."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def grid_size(device: torch.device, per_sm: int = 1) -> int:
    """Programs of a persistent grid: `per_sm` for each multiprocessor; 4 under the CPU interpreter."""
    if device.type != "cuda":
        return 4
    return multiprocessors(device.index if device.index is not None else torch.cuda.current_device()) * per_sm


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up; triton.cdiv does the same on the host at several microseconds a call."""
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    """Smallest power of two >= max(n, 1)."""
    return 1 << max(n - 1, 0).bit_length()


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device current for a launch; free where it is current already."""
    if not tensor.is_cuda or tensor.get_device() == _compat.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


def compile_safe(
    name: str, mutates: Iterable[str], fake: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a launcher as custom operator `moe_kernels::name`, used while torch.compile traces.

    Eager calls go straight to the launcher: the dispatcher costs the host more than the launch.
    """

    def wrap(launcher: Callable[..., Any]) -> Callable[..., Any]:
        op = torch.library.custom_op(f"moe_kernels::{name}", launcher, mutates_args=tuple(mutates))
        op.register_fake(fake if fake is not None else lambda *args, **kwargs: None)

        def call(*args: Any) -> Any:
            return op(*args) if torch.compiler.is_compiling() else launcher(*args)

        return call

    return wrap


def compile_boundary(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a launcher that works through addresses out of torch.compile: the graph breaks there, eager pays nothing.

    Functionalisation may hand an operator copies of its buffers, while addresses in a device table still name the
    originals: no schema can state such reads and writes.
    """
    opaque = _compat.disable_compile(launcher)

    def call(*args: Any) -> Any:
        return opaque(*args) if torch.compiler.is_compiling() else launcher(*args)

    return call
