"""Router: gating, top-k, counts and auxiliary losses of one routed layer."""

from moe_kernels.router.api import RouterOutput, router, router_logits

__all__ = ["RouterOutput", "router", "router_logits"]
