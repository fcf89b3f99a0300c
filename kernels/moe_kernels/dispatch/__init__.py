"""Rowwise dispatch: PUT each kept row into its owner's buffer."""

from moe_kernels.dispatch.api import dispatch

__all__ = ["dispatch"]
