"""RoutedBlock: router, routed experts on one of three paths, shared expert, metrics on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from moe_kernels._launch import check_tensor
from moe_kernels.all_to_all import HostSplits, SplitExchange, all_to_all_rows, expert_order, permute_rows
from moe_kernels.block.config import PATHS, BlockConfig
from moe_kernels.block.local import grouped_experts, permute, unpermute
from moe_kernels.block.metrics import ForwardRecord, route_metrics
from moe_kernels.block.rowwise import RowwiseExperts, RowwisePlan
from moe_kernels.block.shared import SideStream, shared_expert
from moe_kernels.route_map import RouteMap, capacity_rows, route_map
from moe_kernels.router import RouterOutput, router
from moe_kernels.transport import Lease, SymmetricPool, Transport


class RoutedBlock(nn.Module):
    """Routed feed-forward [N, D] to [N, D], N rows split evenly over the ranks that this process hosts.

    Paths: `no_ep` runs all experts here; `synchronized` exchanges rows over torch.distributed with split lists that the
    host reads, one wait per forward; `rowwise` moves rows through symmetric memory and never reads a count.
    Nothing drops on the first two; rowwise drops what exceeds the capacity.

    Args:
        config: sizes and rules.
        path: one of `no_ep`, `synchronized`, `rowwise`.
        transport, pool: of the rowwise path; a pool may be shared by blocks and is made when omitted.
        group: process group of the synchronized path; None is the default group, or one rank without collectives where
            torch.distributed is not initialised.
        index: the block's name in leases and errors.
        impl: implementation of row movement and SwiGLU: None chooses by device.
        grouped_gemm: implementation of the experts' products: None chooses by device; `host_loop` reads each expert's
            count on the host and is kept as the bad example.
        seed: of the initial weights, drawn per expert: a rank's share is equal to the same experts elsewhere.

    Attributes:
        aux_losses: `lbl` and `z` of the last forward, mean over the hosted ranks, with gradients. They keep that
            forward's graph alive: detach or clear them once used, in any case before a CUDA graph capture.
    """

    def __init__(
        self,
        config: BlockConfig,
        *,
        path: str = "no_ep",
        transport: Transport | None = None,
        pool: SymmetricPool | None = None,
        group: dist.ProcessGroup | None = None,
        index: int = 0,
        impl: str | None = None,
        grouped_gemm: str | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if path not in PATHS:
            raise ValueError(f"path must be one of {', '.join(PATHS)}; got {path!r}")
        if path == "rowwise" and transport is None:
            raise ValueError("path 'rowwise' needs a transport, got None")
        if transport is not None and not isinstance(transport, Transport):
            raise TypeError(f"transport must be a Transport or None; got {type(transport).__name__}")
        if path != "rowwise" and (transport is not None or pool is not None):
            raise ValueError(f"path {path!r} takes no transport and no pool")
        self.config, self.path, self.index, self.impl, self.gemm = config, path, index, impl, grouped_gemm
        self.transport = transport
        device = torch.device(device)
        self.world_size, self.hosted = 1, (0,)
        if transport is not None:
            self.world_size, self.hosted = transport.world_size, transport.local_ranks
            self.pool = pool if pool is not None else SymmetricPool(transport, config.width, dtype)
        elif path == "synchronized":
            self.exchange = SplitExchange(config.num_experts, device, group)
            self.world_size = self.exchange.world_size
            self.hosted = (dist.get_rank(group),) if dist.is_initialized() else (0,)
        if config.num_experts % self.world_size:
            raise ValueError(f"{config.num_experts} experts cannot be split evenly over {self.world_size} ranks")
        self.local_experts = config.num_experts // self.world_size

        width, hidden, local = config.width, config.expert_width, self.local_experts * len(self.hosted)
        factory = {"device": device, "dtype": dtype}
        self.router_weight = nn.Parameter(torch.empty(config.num_experts, width, **factory))
        self.up_gate = nn.Parameter(torch.empty(local, width, 2 * hidden, **factory))
        self.down = nn.Parameter(torch.empty(local, hidden, width, **factory))
        if config.has_shared:
            self.shared_up_gate = nn.Parameter(torch.empty(width, 2 * config.shared_width, **factory))
            self.shared_down = nn.Parameter(torch.empty(config.shared_width, width, **factory))
        self._initialise(seed)
        self._records: dict[int, ForwardRecord] = {}
        self._last: int | None = None
        self.aux_losses: dict[str, torch.Tensor] = {}
        self._rows: dict[int, torch.Tensor] = {}
        self._tokens: int | None = None
        self._recomputing = False

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        generator = torch.Generator(device=self.up_gate.device)
        replicated = [self.router_weight]
        if self.config.has_shared:
            replicated += [self.shared_up_gate, self.shared_down]
        for part, parameter in enumerate(replicated):
            parameter.normal_(0.0, 0.02, generator=generator.manual_seed(_mixed(seed, 1_000_000 + part)))
        for slot, expert in enumerate(self.expert_ids):
            generator.manual_seed(_mixed(seed, expert))
            for parameter in (self.up_gate, self.down):
                parameter[slot].normal_(0.0, 0.02, generator=generator)

    @property
    def expert_ids(self) -> list[int]:
        """Global ids of the experts whose weights live here, in storage order."""
        local = self.local_experts
        return [rank * local + e for rank in self.hosted for e in range(local)]

    def capacity(self, tokens: int) -> int:
        """Rows per rank for `tokens` tokens per rank: max(1, ceil(capacity_factor * T * K))."""
        return capacity_rows(tokens, self.config.top_k, self.config.capacity_factor)

    def freeze(self) -> None:
        """End the dry run of a rowwise block: later growth of its pool, or another token count, raises."""
        if self.path == "rowwise":
            self.pool.freeze()

    def forward(self, x: torch.Tensor, microbatch: int = 0) -> torch.Tensor:
        """Run the block on x [n * T, D] of the n hosted ranks. Microbatches in flight need different numbers.

        Raises:
            TypeError: no tensor, or not of the weights' dtype.
            ValueError: shape, device, or rows that do not split evenly over the hosted ranks.
        """
        check_tensor("x", x, shape=(None, self.config.width))
        if x.shape[0] % len(self.hosted):
            raise ValueError(f"{x.shape[0]} tokens do not split evenly over {len(self.hosted)} hosted ranks")
        if len(self.hosted) == 1:
            return self.forward_ranks([x], microbatch)[0]
        return torch.cat(self.forward_ranks(x.tensor_split(len(self.hosted)), microbatch))

    def forward_ranks(self, x_TD: Sequence[torch.Tensor], microbatch: int = 0) -> list[torch.Tensor]:
        """Run the block on one [T, D] per hosted rank; T must be equal on all ranks of the rowwise path."""
        if len(x_TD) != len(self.hosted):
            raise ValueError(f"inputs of {len(self.hosted)} hosted ranks expected, got {len(x_TD)}")
        dtypes, device = (self.up_gate.dtype,), self.up_gate.device
        for x in x_TD:
            check_tensor("x", x, shape=(None, self.config.width), dtypes=dtypes, device=device)
        side = SideStream(x_TD[0].device, self.config.shared_mode == "stream") if self.config.has_shared else None
        if self.path == "rowwise":
            return self._rowwise(x_TD, microbatch, side)
        return [self._local(x_TD[0], microbatch, side)]

    @property
    def metrics(self) -> dict[str, torch.Tensor]:
        """Metrics of the last forward, see `metrics_of`."""
        if self._last is None:
            raise RuntimeError(f"block {self.index} has no metrics before its first forward")
        return self.metrics_of(self._last)

    def metrics_of(self, microbatch: int) -> dict[str, torch.Tensor]:
        """Compute the metrics of a microbatch's last forward, on the device; see `route_metrics` for the names."""
        return route_metrics(self._records[microbatch])

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Mark a forward as the recomputation of one whose backward runs: same lease, metrics left alone."""
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = False

    def checkpoint_contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """`context_fn` for torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."""
        return nullcontext(), self.recomputing()

    def _route(self, x: torch.Tensor) -> RouterOutput:
        c = self.config
        return router(
            x,
            self.router_weight,
            c.top_k,
            gating=c.gating,
            normalize=c.normalize_weights,
            restore_scale=c.restore_scale,
            mode=c.router_mode,
            lbl_granularity=c.lbl_granularity,
            sequence_length=c.sequence_length,
            impl=self.impl,
        )

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        rows = self._rows.get(x.shape[0])
        if rows is None:
            rows = self._rows[x.shape[0]] = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        return shared_expert(x, self.shared_up_gate, self.shared_down, rows, self.impl)

    def _local(self, x: torch.Tensor, microbatch: int, side: SideStream | None) -> torch.Tensor:
        before = self.config.shared_mode == "before_wait"
        routed = self._route(x)
        route = route_map(
            routed.expert_index,
            routed.counts[None],
            impl=self.impl,
            rank=0,
            capacity=max(1, routed.expert_index.numel()),
        )
        if self.path == "no_ep":
            shared = side.run(self._shared, x) if side is not None else None
            rows = permute(x, route, self.impl)
            outputs = grouped_experts(rows, self.up_gate, self.down, route.offsets, self.impl, self.gemm)
            expert_load = routed.counts
        else:
            received_RL = self.exchange.start(routed.counts)
            rows, shared, splits = self._while_counts_arrive(x, route, side is not None and before)
            received = all_to_all_rows(rows[: sum(splits.send)], splits, self.exchange.group)
            if side is not None and not before:
                shared = side.run(self._shared, x)
            gather, scatter = expert_order(received_RL, received.shape[0])
            grouped = permute_rows(received, gather, scatter)
            expert_load = received_RL.sum(0)
            offsets = expert_load.cumsum(0).to(torch.int32)
            outputs = grouped_experts(grouped, self.up_gate, self.down, offsets, self.impl, self.gemm)
            returned = permute_rows(outputs, scatter, gather)
            outputs = all_to_all_rows(returned, splits, self.exchange.group, reverse=True)
        out = unpermute(outputs, routed.weights, route, self.impl)
        self._record(microbatch, [routed], [route], expert_load)
        return self._joined(out, shared, side)

    def _while_counts_arrive(
        self, x: torch.Tensor, route: RouteMap, with_shared: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, HostSplits]:
        try:
            rows = permute(x, route, self.impl)
            shared = self._shared(x) if with_shared else None
        finally:
            # After an error too: the exchange could not be started again.
            splits = self.exchange.wait()
        return rows, shared, splits

    def _rowwise(self, x_TD: Sequence[torch.Tensor], microbatch: int, side: SideStream | None) -> list[torch.Tensor]:
        assert self.transport is not None
        tokens = self._agreed_tokens(x_TD)
        capacity = self.capacity(tokens)
        shared = [side.run(self._shared, x) if side is not None else None for x in x_TD]
        routed = [self._route(x) for x in x_TD]
        requested = self.transport.all_gather_counts([r.counts for r in routed])
        requested = requested.view(self.world_size, self.world_size, self.local_experts)
        maps = tuple(
            route_map(r.expert_index, requested, rank=rank, capacity=capacity, impl=self.impl)
            for rank, r in zip(self.hosted, routed)
        )
        # Leased after the exchange, which orders this use of the slot behind every peer's last read of it.
        if self._recomputing:
            lease = self.pool.held_lease(self.index, microbatch)
        else:
            lease = self.pool.lease(self.index, microbatch, capacity)
        weights = [r.weights for r in routed]
        # Whatever makes autograd call the node's backward; the router alone may be trained, for one.
        inputs = (self.up_gate, self.down, *x_TD, *weights)
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        plan = RowwisePlan(self.transport, self.pool, lease, capacity, maps, self.impl, self.gemm, keep)

        def leased() -> list[torch.Tensor]:
            outs = RowwiseExperts.apply(plan, self.up_gate, self.down, *x_TD, *weights)
            self._record(microbatch, routed, maps, None, capacity)
            return [self._joined(out, s, side) for out, s in zip(outs, shared)]

        return self._or_released(leased, lease)

    def _or_released(self, leased: Callable[[], list[torch.Tensor]], lease: Lease) -> list[torch.Tensor]:
        # Apart, because torch.compile gives up a whole function whose graph breaks inside a try.
        try:
            return leased()
        except BaseException:
            # No backward will come for it. A recomputation's lease is that of the backward that asked for it.
            if lease.active and not self._recomputing:
                self.pool.release(lease)
            raise

    def _agreed_tokens(self, x_TD: Sequence[torch.Tensor]) -> int:
        assert self.transport is not None
        tokens = x_TD[0].shape[0]
        same_here = all(x.shape[0] == tokens for x in x_TD)
        if self.pool.frozen and self._tokens is not None:
            # Asking the peers again would make the host wait in every step; agreed sizes are simply binding.
            if not same_here or tokens != self._tokens:
                raise ValueError(
                    f"block {self.index}: {[x.shape[0] for x in x_TD]} tokens, but all ranks agreed on {self._tokens} "
                    f"per rank in the dry run"
                )
        else:
            self._tokens = self.transport.require_equal("tokens per rank (T)", [x.shape[0] for x in x_TD])
        return tokens

    def _joined(self, out: torch.Tensor, shared: torch.Tensor | None, side: SideStream | None) -> torch.Tensor:
        if shared is None or side is None:
            return out
        side.join()
        return out + shared

    def _record(self, microbatch, routed, maps, expert_load, capacity: int | None = None) -> None:
        self.aux_losses = {"lbl": _mean([r.lbl for r in routed]), "z": _mean([r.z_loss for r in routed])}
        if self._recomputing:
            return
        # Assigned per microbatch, never added: a second forward of the same microbatch cannot count twice.
        self._records[microbatch] = ForwardRecord(
            counts_E=tuple(r.counts for r in routed),
            weights_TK=tuple(r.weights.detach() for r in routed),
            maps=tuple(maps),
            expert_load=expert_load,
            capacity=capacity,
        )
        self._last = microbatch


def _mean(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    # One rank, the usual case, launches nothing for it.
    return scalars[0] if len(scalars) == 1 else torch.stack(tuple(scalars)).mean()


def _mixed(seed: int, part: int) -> int:
    return (seed * 0x9E3779B1 + part * 0x85EBCA6B) % (1 << 63)
