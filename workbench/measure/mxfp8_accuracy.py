"""How wrong each MXFP8 mode is, against FP64 of the exact MX values and of the values before quantisation; and a
short training run.

Standard library and torch only.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROMOTED, EXACT = "folded", "exact"
DISTRIBUTIONS = ("gaussian", "swiglu", "outlier columns", "spread blocks", "adversarial")


def operands(name: str, M: int, N: int, K: int, E: int, generator: Any, device: Any) -> tuple[Any, Any]:
    """Return BF16 rows [M, K] and weights [E, N, K] of a named distribution.

    adversarial: the first block of every row is 2^20 larger than the rest, and the weights there are zero, so that
        only blocks
    far below the row's maximum carry the result.
    """
    import torch

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device=device)

    x, w = normal(M, K), normal(E, N, K) * K**-0.5
    if name == "swiglu":
        x = torch.nn.functional.silu(normal(M, K)) * x
    elif name == "outlier columns":
        x[:, torch.randperm(K, generator=generator, device=device)[: K // 200 + 1]] *= 100
    elif name == "spread blocks":
        x *= torch.exp2(
            torch.randint(-6, 7, (M, K // 32), generator=generator, device=device).float()
        ).repeat_interleave(32, 1)
    elif name == "adversarial":
        x[:, :32] *= 2.0**20
        w[:, :, :32] = 0
    elif name != "gaussian":
        raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}; got {name!r}")
    return x.bfloat16(), w.bfloat16()


def modes(x: Any, w: Any, ends: Any) -> dict[str, Callable[[], Any]]:
    """Return, by name, each way to multiply rows [M, K] and weights [E, N, K] on their device: kernels on a GPU,
    the reference on the CPU."""
    import torch
    from moe_kernels import mxfp8
    from moe_kernels.mxfp8 import linear, reference

    from workbench.measure import unstable

    mx, mw = mxfp8.quantize(x), linear.exact_operand(w)
    fw = linear.QuantizedWeight(w).forward
    fx, row = mxfp8.fold(mx), mxfp8.quantize(x, target="row")
    sa, sw = reference.scale_value(fx.row_scale).float(), reference.scale_value(fw.row_scale).float()

    scaled_grouped_mm = unstable.scaled_grouped_mm()

    def torch_fp8(fast: bool) -> Any:
        return scaled_grouped_mm(
            fx.payload, fw.payload.transpose(1, 2), sa, sw, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    found = {
        "folding alone, FP64 product": lambda: reference.grouped_gemm(
            reference.dequantize(*fx), reference.dequantize(*fw), ends
        ),
        "one scale a row from the start, FP64 product": lambda: reference.grouped_gemm(
            reference.dequantize(*row), reference.dequantize(*fw), ends
        ),
        PROMOTED: lambda: mxfp8.grouped_gemm(fx, fw, ends),
        EXACT: lambda: mxfp8.grouped_gemm(mx, mw, ends),
        "exact, FP32 output": lambda: mxfp8.grouped_gemm(mx, mw, ends, out_dtype=torch.float32),
        "BF16 operands, torch": lambda: torch.nn.functional.grouped_mm(x, w.transpose(1, 2), offs=ends),
    }
    if x.device.type == "cuda":
        found |= {
            "folded, tensor-core sum": lambda: mxfp8.grouped_gemm(fx, fw, ends, accumulate="fast", variant=3),
            "folded, torch fast": lambda: torch_fp8(True),
            "folded, torch": lambda: torch_fp8(False),
        }
    return found


def errors(M: int, N: int, K: int, E: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield relative Frobenius errors of every mode on every distribution, with the fold's count of wide rows."""
    import torch
    from moe_kernels import mxfp8
    from moe_kernels.mxfp8 import linear, reference

    device = torch.device(_device())
    ends = torch.arange(1, E + 1, device=device, dtype=torch.int32) * (M // E)
    for name in DISTRIBUTIONS:
        g = torch.Generator(device=device).manual_seed(seed)
        x, w = operands(name, M, N, K, E, g, device)
        wide = torch.zeros(1, dtype=torch.int32, device=device)
        mx, mw = mxfp8.quantize(x), linear.exact_operand(w)
        mxfp8.fold(mx, wide=wide)
        exact = reference.grouped_gemm(reference.dequantize(*mx), reference.dequantize(*mw), ends)
        values = reference.grouped_gemm(x, w, ends)
        for mode, call in modes(x, w, ends).items():
            out = call().double()
            yield {
                "kind": "error", "distribution": name, "mode": mode, "wide_rows": int(wide), "rows": M,
                "error_vs_mx": float((out - exact).norm() / exact.norm()),
                "error_vs_values": float((out - values).norm() / values.norm()),
            }  # fmt: skip


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def corpus(limit_bytes: int = 8 << 20) -> bytes:
    """Return Python sources of the running interpreter's standard library, joined in name order."""
    root, out = Path(sysconfig.get_paths()["stdlib"]), bytearray()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        if "site-packages" not in path.parts and path.is_file():
            out += path.read_bytes()
        if len(out) >= limit_bytes:
            break
    return bytes(out[:limit_bytes])


def train(
    precision: str,
    seed: int,
    *,
    steps: int,
    layers: int = 2,
    width: int = 128,
    expert_width: int = 256,
    experts: int = 8,
    top_k: int = 2,
    sequence: int = 128,
    batch: int = 8,
    learning_rate: float = 1e-3,
) -> list[float]:
    """Train a small routed byte-level model and return the loss of every step; `precision` is "bf16" or "mxfp8"
    (expert products only)."""
    import torch
    from moe_kernels import mxfp8
    from torch import nn
    from torch.nn import functional as F

    if precision not in ("bf16", "mxfp8"):
        raise ValueError(f"precision must be 'bf16' or 'mxfp8'; got {precision!r}")
    torch.manual_seed(seed)
    device = _device()

    class Bf16Linear(nn.Module):
        def __init__(self, count: int, inner: int, outer: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(count, outer, inner, device=device, dtype=torch.bfloat16))
            nn.init.normal_(self.weight, std=inner**-0.5)

        def forward(self, x: Any, ends: Any) -> Any:
            return F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)

    def grouped(inner: int, outer: int) -> Any:
        return (
            Bf16Linear(experts, inner, outer)
            if precision == "bf16"
            else mxfp8.GroupedLinear(experts, inner, outer, device=device)
        )

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.router = nn.Linear(width, experts, bias=False)
            self.up, self.down = grouped(width, 2 * expert_width), grouped(expert_width, width)

        def forward(self, x: Any) -> Any:
            B, S, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(B, S, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
            x = x + self.proj(
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, width)
            )
            tokens = self.norm2(x).reshape(B * S, width)
            weight, chosen = F.softmax(self.router(tokens).float(), dim=-1).topk(top_k, dim=-1)
            order = chosen.flatten().argsort(stable=True)
            ends = torch.bincount(chosen.flatten(), minlength=experts).cumsum(0).to(torch.int32)
            gate, up = self.up(tokens[order // top_k], ends).chunk(2, dim=-1)
            rows = self.down((F.silu(gate) * up).contiguous(), ends) * weight.flatten()[order].to(x.dtype).unsqueeze(1)
            return x + torch.zeros_like(tokens).index_add(0, order // top_k, rows).view(B, S, width)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position = nn.Embedding(256, width), nn.Embedding(sequence, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    model = Model().to(device, torch.bfloat16)
    data = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8).long().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    draw = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 20)
        at = torch.randint(0, len(data) - sequence - 1, (batch,), generator=draw).to(device)
        window = data[at.unsqueeze(1) + torch.arange(sequence + 1, device=device)]
        loss = F.cross_entropy(model(window[:, :-1]).float().flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [float(x) for x in torch.stack(losses).cpu()]
