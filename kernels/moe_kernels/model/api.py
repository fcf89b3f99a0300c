"""A decoder with grouped-query attention whose feed-forward layers are dense or routed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn import functional as F

from moe_kernels.block import BlockConfig, RoutedBlock
from moe_kernels.transport import SymmetricPool, Transport


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the development model; the defaults are those of the report's captured profiles.

    Source: report Appendix B.5 (eight layers, block 0 dense, 128 routed experts, top-8, one shared expert, BF16) and
    the public recipe for the widths. 9.6 B parameters in all, 1.36 B active.
    """

    layers: int = 8
    dense_layers: int = 1
    width: int = 2560
    heads: int = 20
    kv_heads: int = 5
    head_dim: int = 128
    dense_width: int = 11520
    vocabulary: int = 100352
    max_sequence: int = 8192
    rope_theta: float = 500_000.0
    lbl_coefficient: float = 0.0
    z_coefficient: float = 0.0
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(
            width=2560, expert_width=1280, num_experts=128, top_k=8, shared_width=1280, router_mode="random"
        )
    )

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.block.width != self.width:
            raise ValueError(f"block.width ({self.block.width}) must equal the model's width ({self.width})")
        if not 0 <= self.dense_layers <= self.layers:
            raise ValueError(f"dense_layers must lie in [0, {self.layers}], got {self.dense_layers}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, over all ranks."""
        return self._count(self.block.num_experts)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return self._count(self.block.top_k)

    def _count(self, experts: int) -> int:
        width, routed = self.width, self.layers - self.dense_layers
        attention = 2 * width * self.head_dim * (self.heads + self.kv_heads)
        expert = 3 * width * self.block.expert_width
        shared = 3 * width * self.block.shared_width
        norms = width * (2 * self.layers + 1)
        router = routed * width * self.block.num_experts
        ffn = self.dense_layers * 3 * width * self.dense_width + routed * (experts * expert + shared)
        return self.layers * attention + ffn + router + norms + 2 * self.vocabulary * width


def development_config(num_experts: int = 128, **block_options) -> ModelConfig:
    """Return the development model's sizes; fewer experts where one GPU's memory asks for it."""
    config = ModelConfig()
    return replace(config, block=replace(config.block, num_experts=num_experts, **block_options))


def small_config(**block_options) -> ModelConfig:
    """Return sizes that a CPU runs in milliseconds: three layers of width 32."""
    options: dict[str, Any] = {"expert_width": 16, "num_experts": 4, "top_k": 2, "shared_width": 16} | block_options
    return ModelConfig(
        layers=3, width=32, heads=4, kv_heads=2, head_dim=8, dense_width=48, vocabulary=64, max_sequence=64,
        block=BlockConfig(width=32, **options),
    )  # fmt: skip


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, over [B, S, D]."""

    def __init__(self, config: ModelConfig, **factory) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        total = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.width, total, bias=False, **factory)
        self.out = nn.Linear(config.heads * config.head_dim, config.width, bias=False, **factory)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        rotated = _rotate(heads[:, : self.heads + self.kv_heads], rope)
        q, k = rotated.split((self.heads, self.kv_heads), dim=1)
        v = heads[:, self.heads + self.kv_heads :]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


def _rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    # Three launches for queries and keys together: a roll by half a head swaps its halves, the sines carry the sign.
    cos, sin = (t[: x.shape[2]] for t in rope)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class DenseFeedForward(nn.Module):
    """SwiGLU feed-forward, [.., D] to [.., D]."""

    def __init__(self, width: int, hidden: int, **factory) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False, **factory)
        self.down = nn.Linear(hidden, width, bias=False, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """Pre-norm attention and feed-forward with residuals; the feed-forward is dense or routed."""

    def __init__(self, attention: Attention, feed_forward: nn.Module, width: int, **factory) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-6, **factory)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(width, eps=1e-6, **factory)
        self.feed_forward = feed_forward

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], microbatch: int) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        normed = self.ffn_norm(x)
        if isinstance(self.feed_forward, RoutedBlock):
            return x + self.feed_forward(normed.view(-1, normed.shape[-1]), microbatch=microbatch).view_as(x)
        return x + self.feed_forward(normed)


class DevelopmentModel(nn.Module):
    """Embeddings, `config.layers` layers and a head, with one expert-parallel path for all routed blocks.

    Args:
        config: sizes.
        path: `no_ep`, `synchronized` or `rowwise`.
        transport: of the rowwise path; its symmetric pool is shared by the blocks.
        group: process group of the synchronized path.
        device, dtype: of every parameter; the router computes in FP32 from them.
        seed: of the initial weights. Equal seeds give equal weights on every path and rank.
        grouped_gemm: implementation of the experts' products, see `RoutedBlock`.
        annotate: mark each block's forward and backward with a profiler range.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        path: str = "no_ep",
        transport: Transport | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        grouped_gemm: str | None = None,
        annotate: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.annotate = annotate
        factory = {"device": device, "dtype": dtype}
        self.pool = SymmetricPool(transport, config.width, dtype) if transport is not None else None
        self.embedding = nn.Embedding(config.vocabulary, config.width, **factory)
        layers: list[nn.Module] = []
        for index in range(config.layers):
            if index < config.dense_layers:
                feed_forward: nn.Module = DenseFeedForward(config.width, config.dense_width, **factory)
            else:
                feed_forward = RoutedBlock(
                    config.block, path=path, transport=transport, pool=self.pool, group=group, index=index,
                    grouped_gemm=grouped_gemm, seed=seed * 1000 + index, **factory,
                )  # fmt: skip
            layers.append(Layer(Attention(config, **factory), feed_forward, config.width, **factory))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(config.width, eps=1e-6, **factory)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False, **factory)
        self._initialise(seed)
        positions = torch.arange(config.max_sequence, dtype=torch.float64)[:, None]
        halves = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        angles = positions / config.rope_theta**halves
        self.register_buffer("rope_cos", torch.cat((angles.cos(), angles.cos()), -1).to(**factory), persistent=False)
        self.register_buffer("rope_sin", torch.cat((-angles.sin(), angles.sin()), -1).to(**factory), persistent=False)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        # Routed blocks draw their own weights per expert, so that ranks agree whatever their share of the experts is.
        inside_blocks = {id(p) for block in self.routed_blocks for p in block.parameters()}
        generator = torch.Generator(device=self.embedding.weight.device).manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() >= 2 and id(parameter) not in inside_blocks:
                parameter.normal_(0.0, 0.02, generator=generator)

    @property
    def routed_blocks(self) -> list[RoutedBlock]:
        """The routed feed-forward blocks, in layer order."""
        return [m for m in self.modules() if isinstance(m, RoutedBlock)]

    def forward(self, tokens: torch.Tensor, microbatch: int = 0) -> torch.Tensor:
        """Map int64 tokens [B, S] to logits [B, S, V]."""
        if tokens.dim() != 2 or tokens.shape[1] > self.config.max_sequence:
            raise ValueError(f"tokens: [B, S] with S <= {self.config.max_sequence} expected, got {tuple(tokens.shape)}")
        rope = (self.rope_cos, self.rope_sin)
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            run = partial(_annotated, f"block {index}", layer) if self.annotate else layer
            x = run(x, rope, microbatch)
        return self.head(self.norm(x))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor, microbatch: int = 0) -> torch.Tensor:
        """Mean cross entropy over [B, S] targets plus the weighted auxiliary losses; a device scalar."""
        logits = self(tokens, microbatch)
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))
        for block in self.routed_blocks:
            if self.config.lbl_coefficient:
                loss = loss + self.config.lbl_coefficient * block.aux_losses["lbl"]
            if self.config.z_coefficient:
                loss = loss + self.config.z_coefficient * block.aux_losses["z"]
            # A kept graph would keep its leaves' gradient nodes, and the stream they were made on, into the next step.
            block.aux_losses = {name: value.detach() for name, value in block.aux_losses.items()}
        return loss


class _AtBackward(torch.autograd.Function):
    """Identity whose backward calls `act` first."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        ctx.act()
        return grads[0], None


def _annotated(name: str, layer: nn.Module, x: torch.Tensor, *args) -> torch.Tensor:
    """Run a layer inside profiler ranges: around its forward, and around its backward by an identity at either end."""
    ranges: list[record_function] = []

    def begin() -> None:
        ranges.append(record_function(f"{name} backward"))
        ranges[-1].__enter__()

    def end() -> None:
        if ranges:
            ranges.pop().__exit__(None, None, None)

    with record_function(f"{name} forward"):
        if not (torch.is_grad_enabled() and x.requires_grad):
            return layer(x, *args)
        return _AtBackward.apply(layer(_AtBackward.apply(x, end), *args), begin)
