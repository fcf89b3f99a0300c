"""SwiGLU on the valid prefix of a capacity-shaped buffer."""

from moe_kernels.swiglu.api import swiglu, swiglu_backward

__all__ = ["swiglu", "swiglu_backward"]
