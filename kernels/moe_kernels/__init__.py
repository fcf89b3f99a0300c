"""GPU kernels of the routed (mixture-of-experts) path; import the op you need, e.g. `moe_kernels.route_map.api`.

Shape letters: T tokens, K top-k, E experts, R ranks, L local experts (E = R * L), C capacity rows,
D model width, F expert width.
"""
