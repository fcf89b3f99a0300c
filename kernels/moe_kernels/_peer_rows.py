"""Addresses of peers' rows inside a Triton kernel, shared by dispatch and combine."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def peer_row(peer_ptr, rank_ptr, row_ptr, at, D: tl.constexpr, element: tl.constexpr, ALIGNED: tl.constexpr):
    """Return where the rows of the routes `at` begin, and whether each exists: a dropped route has row -1."""
    row = tl.load(row_ptr + at)
    rank = tl.maximum(tl.load(rank_ptr + at), 0)
    base = tl.load(peer_ptr + rank).to(tl.pointer_type(element))  # pyright: ignore[reportArgumentType]
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base + row.to(tl.int64) * D, row >= 0
