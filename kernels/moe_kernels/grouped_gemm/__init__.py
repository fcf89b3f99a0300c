"""Grouped GEMM with cumulative int32 offsets that stay on the device."""

from moe_kernels.grouped_gemm.api import grouped_gemm, grouped_gemm_wgrad, grouped_linear

__all__ = ["grouped_gemm", "grouped_gemm_wgrad", "grouped_linear"]
