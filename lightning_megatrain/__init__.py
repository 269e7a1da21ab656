"""Train a model that does not fit on the GPU from an ordinary Lightning project."""

from lightning_megatrain.strategy import MegaTrainStrategy

__all__ = ["MegaTrainStrategy"]
