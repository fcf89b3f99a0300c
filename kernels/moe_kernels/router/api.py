"""Router: FP32 logits, gating, top-k, per-expert counts and auxiliary losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_kernels._launch import FLOATS, check_int, check_tensor, resolve_impl
from moe_kernels.router import logits as fp32_logits
from moe_kernels.router import reference

GROUP_LIMIT = 65535
GATINGS = ("softmax", "sigmoid")
MODES = ("learned", "random", "uniform")
GRANULARITIES = ("batch", "instance")


@dataclass(frozen=True, slots=True, eq=False)
class RouterOutput:
    """What one router call decides; every field is a device tensor and none was read by the host.

    Attributes:
        weights: FP32 [T, K], differentiable.
        expert_index: int32 [T, K], distinct within a token.
        counts: int64 [E], routes of these T tokens per expert.
        lbl: FP32 scalar, load-balancing loss (1 at perfect balance), differentiable.
        z_loss: FP32 scalar, mean squared logsumexp of the logits, differentiable.
    """

    weights: torch.Tensor
    expert_index: torch.Tensor
    counts: torch.Tensor
    lbl: torch.Tensor
    z_loss: torch.Tensor


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return FP32 logits [T, E] of x [T, D] and weight [E, D] as if both were cast to FP32 (FP64 stays FP64).

    BF16 rows on CUDA go through the tensor cores at the same accuracy, see `moe_kernels.router.logits`.
    """
    if fp32_logits.supports(x, weight):
        return fp32_logits.RouterLogits.apply(x, weight)
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return x.to(dtype) @ weight.to(dtype).t()


def router(
    x: torch.Tensor, weight: torch.Tensor, top_k: int, *, impl: str | None = None, **options: Any
) -> RouterOutput:
    """Route T tokens to K of E experts each, without a host read.

    Args:
        x: [T, D], any float dtype.
        weight: [E, D].
        top_k: K, at most E.
        impl: of what follows the logits, see `route_logits`.
        options: the others of `route_logits`, by name.

    Raises:
        ValueError, TypeError: a shape, dtype, device or name is wrong; the message says which.
    """
    check_tensor("x", x, shape=(None, None), dtypes=FLOATS)
    check_tensor("weight", weight, shape=(None, x.shape[1]), dtypes=FLOATS, device=x.device)
    return route_logits(router_logits(x, weight), top_k, impl=impl, **options)


def route_logits(
    logits: torch.Tensor,
    top_k: int,
    *,
    gating: str = "softmax",
    normalize: bool = True,
    restore_scale: bool = False,
    mode: str = "learned",
    lbl_granularity: str = "batch",
    sequence_length: int | None = None,
    noise: torch.Tensor | None = None,
    impl: str | None = None,
) -> RouterOutput:
    """Route from logits that are there already: gating, top-k, counts and losses, without a host read.

    LBL = E / K * sum_e f_e * p_e, f_e the share of tokens that chose e, p_e the mean probability of e (sigmoid scores
    are renormalised over E first). `instance` takes it per sequence and averages. Equal scores go to the lower id.

    Args:
        logits: FP32 or FP64 [T, E].
        top_k: K, at most E.
        gating: `softmax` over all E, or `sigmoid` (+1e-7).
        normalize: divide the K weights by their sum.
        restore_scale: multiply the weights by K.
        mode: `learned`; `random` takes uniform [0, 1) scores with the learned scores' gradient; `uniform` deals experts
            round-robin. The last two are for systems runs; p_e stays the learned one.
        lbl_granularity: `batch` or `instance`.
        sequence_length: tokens per sequence, for `instance`; default T.
        noise: FP32 [T, E] scores of `random`; default: torch.rand on the logits' device.
        impl: `triton` (default on CUDA) or `reference` (default on the CPU).

    Raises:
        ValueError, TypeError: a shape, dtype, device or name is wrong; the message says which.
    """
    check_tensor("logits", logits, shape=(None, None), dtypes=(torch.float32, torch.float64))
    tokens, experts = logits.shape
    for name, value, allowed in (
        ("gating", gating, GATINGS),
        ("mode", mode, MODES),
        ("lbl_granularity", lbl_granularity, GRANULARITIES),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
    check_int("top_k", top_k)
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be 1 to E = {experts}; got {top_k}")
    if sequence_length is not None:
        check_int("sequence_length", sequence_length)
    groups = 1
    if lbl_granularity == "instance" and sequence_length is not None and tokens:
        if sequence_length < 1 or tokens % sequence_length:
            raise ValueError(f"sequence_length must divide T = {tokens}; got {sequence_length}")
        groups = tokens // sequence_length
    if mode == "random":
        if noise is None:
            noise = torch.rand(tokens, experts, dtype=torch.float32, device=logits.device)
        check_tensor(
            "noise", noise, shape=(tokens, experts), dtypes=(logits.dtype, torch.float32), device=logits.device
        )
    elif noise is not None:
        raise ValueError(f"noise belongs to mode 'random'; mode is {mode!r}")
    impl = resolve_impl(impl, logits.device, ("triton", "reference"))
    if impl == "triton" and logits.dtype is not torch.float32:
        raise TypeError(f"impl='triton' takes float32 logits; got {logits.dtype}")
    if impl == "triton" and groups > GROUP_LIMIT:
        # The sequences are the second dimension of the launch grid.
        raise ValueError(f"impl='triton' takes at most {GROUP_LIMIT} sequences a call; got {groups}")
    arguments = (top_k, gating, normalize, restore_scale, mode, groups, noise)
    if impl == "reference" or tokens == 0:  # no tokens, no launch: empty results with their graph come from PyTorch
        return RouterOutput(*reference.router(logits, *arguments))
    from moe_kernels.router import triton as backend

    return RouterOutput(*backend.router(logits.contiguous(), *arguments))
