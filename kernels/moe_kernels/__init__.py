"""GPU kernels of the routed (mixture-of-experts) path; import the op you need, e.g. `moe_kernels.route_map.api`.

Shape letters: T tokens, K top-k, E experts, R ranks, L local experts (E = R * L), C capacity rows,
D model width, F expert width.
"""

OPS = {
    "router.router": "op_router",
    "route_map.route_map": "op_route_map",
    "dispatch.dispatch": "op_dispatch",
    "combine.combine": "op_combine",
    "combine.combine_backward": "op_combine",
    "swiglu.swiglu": "op_swiglu",
    "swiglu.swiglu_backward": "op_swiglu",
    "grouped_gemm.grouped_gemm": "op_grouped_gemm",
    "grouped_gemm.grouped_gemm_wgrad": "op_grouped_gemm",
    "grouped_gemm.grouped_linear": "op_grouped_gemm",
    "mxfp8.quantize": "op_mxfp8_accuracy",
    "mxfp8.fold": "op_mxfp8_accuracy",
    "mxfp8.swiglu_quantize": "op_mxfp8_accuracy",
    "mxfp8.grouped_gemm": "op_mxfp8_accuracy",
    "mxfp8.grouped_linear": "op_mxfp8_accuracy",
    "mxfp8.QuantizedWeight": "op_mxfp8_accuracy",
    "mxfp8.GroupedLinear": "op_mxfp8_accuracy",
    "block.RoutedBlock": "op_routed_block",
}
"""Every public op (what a package exports and takes `impl`) and the slug of its sheet. An op in this table also has a
refusal case (tests/kernels/test_refusals.py) and a sanitizer case (tests/kernels/sanitize.py); tests read all three."""
