"""MXFP8 (E4M3 in blocks of 32 with E8M0 scales) for expert operations."""

from moe_kernels.mxfp8.api import grouped_gemm, prepare
from moe_kernels.mxfp8.linear import GroupedLinear, QuantizedWeight, grouped_linear
from moe_kernels.mxfp8.rows import MX, Folded, dequantize, fold, quantize, swiglu_quantize

__all__ = [
    "MX", "Folded", "GroupedLinear", "QuantizedWeight", "dequantize", "fold", "grouped_gemm", "grouped_linear",
    "prepare", "quantize", "swiglu_quantize",
]  # fmt: skip
