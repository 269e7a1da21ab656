"""Policies that choose the data while the model trains: which samples, how much of each domain, how much each sample counts."""

from lightning_megatrain.callbacks.decision_log import read_decisions
from lightning_megatrain.callbacks.errors import PolicyError
from lightning_megatrain.callbacks.mixture import ODM, DoReMi, MixturePolicy, StaticMixture
from lightning_megatrain.callbacks.policy import Policy
from lightning_megatrain.callbacks.reweighting import LossReweighting, ReweightingPolicy
from lightning_megatrain.callbacks.schedule import Schedule
from lightning_megatrain.callbacks.selection import LESS, LossSelection, RandomSelection, ReplaySelection, Selected, SelectionPolicy
from lightning_megatrain.callbacks.step_losses import StepLosses

__all__ = [
    "LESS",
    "ODM",
    "DoReMi",
    "LossReweighting",
    "LossSelection",
    "MixturePolicy",
    "Policy",
    "PolicyError",
    "RandomSelection",
    "ReplaySelection",
    "ReweightingPolicy",
    "Schedule",
    "Selected",
    "SelectionPolicy",
    "StaticMixture",
    "StepLosses",
    "read_decisions",
]
