"""The eight-layer development model: attention, embeddings, head, and routed blocks on any of the three paths."""

from moe_kernels.model.api import DevelopmentModel, ModelConfig, development_config, small_config
from moe_kernels.model.step import TrainStep, make_optimizer

__all__ = ["DevelopmentModel", "ModelConfig", "TrainStep", "development_config", "make_optimizer", "small_config"]
