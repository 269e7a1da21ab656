"""Policies that say how much each sample's loss counts."""

from lightning_megatrain.callbacks.reweighting.loss import LossReweighting
from lightning_megatrain.callbacks.reweighting.reweighting import ReweightingPolicy

__all__ = ["LossReweighting", "ReweightingPolicy"]
