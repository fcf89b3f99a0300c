"""A routed feed-forward block on three paths: no expert parallelism, synchronized all-to-all, rowwise."""

from moe_kernels.block.api import RoutedBlock
from moe_kernels.block.config import PATHS, SHARED_MODES, BlockConfig

__all__ = ["PATHS", "SHARED_MODES", "BlockConfig", "RoutedBlock"]
