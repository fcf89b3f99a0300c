"""Launch a Triton kernel again without asking Triton what it answered before for arguments of the same kind.

Triton binds, specialises, looks up and checks in Python at every launch; on the host of an H200 that takes longer than
most of these kernels run. A prepared kernel keeps Triton's compiled kernel by everything that Triton specialises on
(a test compares the two) and calls its launcher directly. Whatever it does not know goes Triton's own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels import _compat

INT32 = 2**31


def kinds(args: Sequence[Any]) -> tuple[list, list] | None:
    """Return what Triton compiles run-time arguments for, and the arguments as its launcher takes them.

    Tensors count by dtype and by whether their address is a multiple of 16; integers by whether they are 1, by whether
    they are a multiple of 16, and by width. None where an argument is of a kind that this module does not know.
    """
    key, values = [], []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            # An address instead of a tensor spares the launcher a driver call that checks it; the api has checked it.
            address = arg.data_ptr()
            key += (arg.dtype, address % 16 == 0)
            values.append(address)
        elif type(arg) is int and -INT32 <= arg < INT32:
            key.append("one" if arg == 1 else arg % 16 == 0)
            values.append(arg)
        elif type(arg) is TensorDescriptor:
            key += (arg.base.dtype, *arg.block_shape, arg.padding)
            values.append(arg)
        else:
            return None
    return key, values


class PreparedKernel:
    """A `triton.jit` kernel with the same `kernel[grid](...)`: run-time arguments by position, constexprs by name."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple, tuple] = {}

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **constants: self._launch(grid, args, constants)

    def _launch(self, grid: tuple[int, ...], args: tuple, constants: dict[str, Any]) -> Any:
        known = kinds(args)
        if known is None:
            return self.kernel[grid](*args, **constants)
        kind, values = known
        device = _compat.current_device()
        # The types too: 1, 1.0 and True are one key to a dict, but not to the compiler.
        key = (device, *constants, *constants.values(), *map(type, constants.values()), *kind)
        found = self.compiled.get(key)
        runtime = knobs.runtime
        if found is None or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            compiled = self.kernel[grid](*args, **constants)
            trailing = tuple(constants.get(p.name, p.default) for p in self.kernel.params[len(args) :])
            self.compiled[key] = (compiled.run, compiled.function, compiled.packed_metadata, trailing)
            return compiled
        run, function, metadata, trailing = found
        x, y, z = (*grid, 1, 1)[:3]
        stream = _compat.current_stream_address(device)
        run(x, y, z, stream, function, metadata, None, None, None, *values, *trailing)
        return None


def prepared(kernel: Any) -> Any:
    """Wrap a `triton.jit` kernel whose trailing parameters are all constexprs; the interpreter's stays as it is."""
    return PreparedKernel(kernel) if isinstance(kernel, JITFunction) else kernel
