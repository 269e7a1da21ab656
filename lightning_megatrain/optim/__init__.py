"""Optimizers for parameters in host memory."""

from lightning_megatrain.optim.host_adamw import HostAdamW
from lightning_megatrain.optim.masters import join, split
from lightning_megatrain.optim.state import bytes_per_parameter

__all__ = ["HostAdamW", "bytes_per_parameter", "join", "split"]
