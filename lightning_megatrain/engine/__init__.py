"""The streaming engine: knows torch, knows nothing of Lightning."""

from lightning_megatrain.engine.engine import Engine
from lightning_megatrain.engine.layers import Layers, find_layers

__all__ = ["Engine", "Layers", "find_layers"]
