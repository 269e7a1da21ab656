"""Policies that say how much of each domain comes next."""

from lightning_megatrain.callbacks.mixture.doremi import DoReMi
from lightning_megatrain.callbacks.mixture.mixture import MixturePolicy
from lightning_megatrain.callbacks.mixture.odm import ODM
from lightning_megatrain.callbacks.mixture.static import StaticMixture

__all__ = ["ODM", "DoReMi", "MixturePolicy", "StaticMixture"]
