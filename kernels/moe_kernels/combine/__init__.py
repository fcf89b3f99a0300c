"""Rowwise combine: GET the K rows of each token and add them with their weights."""

from moe_kernels.combine.api import combine, combine_backward

__all__ = ["combine", "combine_backward"]
