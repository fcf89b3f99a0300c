"""Synchronized block all-to-all: the host reads the split sizes, once per routed block and forward."""

from moe_kernels.all_to_all.api import HostSplits, SplitExchange, all_to_all_rows, expert_order, permute_rows

__all__ = ["HostSplits", "SplitExchange", "all_to_all_rows", "expert_order", "permute_rows"]
