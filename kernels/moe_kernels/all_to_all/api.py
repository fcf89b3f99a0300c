"""Block all-to-all on torch.distributed whose split lists the host must read from the device.

This is the baseline that waits: counts go to the host in three pinned copies, one event is waited for, and only then
can the payload exchange be submitted. Nothing is dropped; the receive buffer is sized from the counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_kernels._launch import check_first_order, check_tensor, on_device


@dataclass(frozen=True)
class HostSplits:
    """Row counts as Python lists: sent to and received from each rank, and received for each local expert."""

    send: list[int]
    receive: list[int]
    local_experts: list[int]


class SplitExchange:
    """Count exchange of one routed block, with the pinned memory that its copies land in.

    Args:
        num_experts: routed experts over all ranks, a multiple of the group's size.
        device: where the counts live.
        group: process group, NCCL on CUDA or gloo on the CPU. None: the default group where torch.distributed is
            initialised, otherwise one rank without collectives.
    """

    def __init__(self, num_experts: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        if num_experts % self.world_size:
            raise ValueError(f"{num_experts} experts cannot be split evenly over {self.world_size} ranks")
        self.local_experts = num_experts // self.world_size
        cuda = device.type == "cuda"
        sizes = (self.world_size, self.world_size, self.local_experts)
        self.landing = [torch.empty(n, dtype=torch.int64, pin_memory=cuda) for n in sizes]
        self.event = torch.cuda.Event() if cuda else None
        self.pending = False
        # The copies read these after `start` returns: freed then, their memory could be written again first.
        self._sources: list[torch.Tensor] = []

    def start(self, counts_E: torch.Tensor) -> torch.Tensor:
        """Exchange int64 [E] route counts, start their copies to the host, and return int64 [R, L] received from each
        rank for each local expert, on the device. Work submitted before `wait` covers the wait; it does not remove it.

        Raises:
            TypeError, ValueError: counts are not int64 [E].
            RuntimeError: the previous exchange was not waited for; its lists would be overwritten.
        """
        check_tensor("counts", counts_E, shape=(self.world_size * self.local_experts,), dtypes=(torch.int64,))
        if self.pending:
            raise RuntimeError("the previous count exchange of this block was started and never waited for")
        sent_RL = counts_E.view(self.world_size, self.local_experts)
        received_RL = torch.empty_like(sent_RL)
        if dist.is_initialized():
            dist.all_to_all_single(received_RL, sent_RL.contiguous(), group=self.group)
        else:
            received_RL.copy_(sent_RL)
        self._sources = [sent_RL.sum(1), received_RL.sum(1), received_RL.sum(0)]
        for landing, source in zip(self.landing, self._sources):
            landing.copy_(source, non_blocking=True)
        if self.event is not None:
            # On the stream of the copies: another device may be the current one.
            with on_device(counts_E):
                self.event.record()
        self.pending = True
        return received_RL

    def wait(self) -> HostSplits:
        """Block the host until the three copies of the last `start` have arrived. Raises RuntimeError without one."""
        if not self.pending:
            raise RuntimeError("no count exchange of this block is under way: start one before each wait")
        if self.event is not None:
            self.event.synchronize()
        self.pending = False
        self._sources.clear()
        return HostSplits(*(t.tolist() for t in self.landing))


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, splits, group, reverse):
        ctx.splits, ctx.group, ctx.reverse = splits, group, reverse
        return _exchange(rows, splits, group, reverse)

    @staticmethod
    def backward(ctx, *grads):
        check_first_order("all_to_all_rows")
        return _exchange(grads[0], ctx.splits, ctx.group, not ctx.reverse), None, None, None


def _exchange(rows: torch.Tensor, splits: HostSplits, group, reverse: bool) -> torch.Tensor:
    send, receive = (splits.receive, splits.send) if reverse else (splits.send, splits.receive)
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    if dist.is_initialized():
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    else:
        received.copy_(rows)
    return received


def all_to_all_rows(
    rows: torch.Tensor, splits: HostSplits, group: dist.ProcessGroup | None = None, reverse: bool = False
) -> torch.Tensor:
    """Exchange rows [sum(send), D] for [sum(receive), D]; `reverse` goes back. Backward reuses the lists, no wait.

    Raises:
        ValueError: the number of rows is not what the split list says.
    """
    expected = sum(splits.receive if reverse else splits.send)
    if rows.shape[0] != expected:
        raise ValueError(f"rows: {expected} expected from the split list, got {rows.shape[0]}")
    return _AllToAllRows.apply(rows, splits, group, reverse)


def expert_order(received_RL: torch.Tensor, total_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row indices that turn (source, local expert) order into (local expert, source) order, on the device.

    Args:
        received_RL: int64 [R, L] rows received from each source for each local expert.
        total_rows: their sum, known to the host by now.

    Returns:
        gather, scatter: int64 [total_rows] each; `rows[gather]` is in expert order, `sorted[scatter]` back again.
    """
    ranks, local = received_RL.shape
    cells = received_RL.reshape(-1)
    by_expert = received_RL.t().reshape(-1)
    start_source = cells.cumsum(0) - cells
    start_expert = (by_expert.cumsum(0) - by_expert).view(local, ranks).t().reshape(-1)
    rows = torch.arange(total_rows, device=cells.device)
    # output_size spares repeat_interleave its own read of the counts.
    shift = torch.repeat_interleave(start_expert - start_source, cells, output_size=total_rows)
    scatter = rows + shift
    gather = torch.empty_like(scatter)
    gather[scatter] = rows
    return gather, scatter


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, gather, scatter):
        ctx.save_for_backward(scatter)
        return rows.index_select(0, gather)

    @staticmethod
    def backward(ctx, *grads):
        (scatter,) = ctx.saved_tensors
        return grads[0].index_select(0, scatter), None, None


def permute_rows(rows: torch.Tensor, gather: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
    """Return rows[gather]; backward is a gather with the inverse permutation, not a scatter-add."""
    return _PermuteRows.apply(rows, gather, scatter)
