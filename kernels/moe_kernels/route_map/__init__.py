"""Route map: from chosen experts and exchanged counts to destination rank, row and offsets, on the device."""

from moe_kernels.route_map.api import RouteMap, capacity_rows, route_map

__all__ = ["RouteMap", "capacity_rows", "route_map"]
