"""`MegaTrainStrategy`: Lightning's hooks, and what precision, optimizers and user code mean when parameters stay on the host."""

from lightning_megatrain.strategy.megatrain import MegaTrainStrategy

__all__ = ["MegaTrainStrategy"]
