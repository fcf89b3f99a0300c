"""GPU kernels of the routed path; import name `moe_kernels`."""
