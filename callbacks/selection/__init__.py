"""Policies that choose which samples come next."""

from lightning_megatrain.callbacks.selection.less import LESS
from lightning_megatrain.callbacks.selection.loss import LossSelection
from lightning_megatrain.callbacks.selection.random import RandomSelection
from lightning_megatrain.callbacks.selection.replay import ReplaySelection
from lightning_megatrain.callbacks.selection.selection import Selected, SelectionPolicy

__all__ = ["LESS", "LossSelection", "RandomSelection", "ReplaySelection", "Selected", "SelectionPolicy"]
