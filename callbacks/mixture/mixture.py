"""The base of policies that say how much of each domain comes next."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import lightning.pytorch as pl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_megatrain.callbacks.loader_access import refuse_overfitting
from lightning_megatrain.callbacks.policy import Policy


class MixturePolicy(Policy):
    """Sets the share of each domain until the next decision.

    A subclass says in :meth:`mix` what the shares are, the same on every rank. Arguments are those of
    :class:`~lightning_megatrain.callbacks.Policy`.
    """

    @abstractmethod
    def mix(self, trainer: pl.Trainer, module: pl.LightningModule) -> Mapping[str, float]:
        """Return a weight for every domain. Called on every rank, and must return the same on each: end with :meth:`~Policy.agree`.

        The names are those of ``self.loader.domains``; the weights are finite and non-negative, and need not sum to one.
        """

    def scores(self) -> Mapping[str, float]:
        """Return what the last shares were decided on, by domain, for the records."""
        return {}

    @override
    def prepare(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        _ = self.loader.domains  # refuses data without domains before any time is spent, and shows how to give them
        if self.schedule.max_updates != 0:
            refuse_overfitting(trainer, self.name)

    @override
    def act(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        weights = self.mix(trainer, module)
        if not isinstance(weights, Mapping):
            raise TypeError(
                f"`mix` must return a weight for every domain, a mapping from each of {self.loader.domains} to a number, got a "
                f"{type(weights).__name__}."
            )
        self.loader.set_proportions(weights)
        shares, scores = self.loader.proportions or {}, self.scores()
        self.report(trainer, {f"share/{n}": s for n, s in shares.items()} | {f"score/{n}": s for n, s in scores.items()})
        self.write(trainer, domain=list(shares), weight=list(shares.values()), score=[scores.get(n, np.nan) for n in shares])

    def current_shares(self) -> NDArray[np.float64]:
        """Return the shares in force, (K,): the proportions, or each domain's part of the data."""
        shares = self.loader.proportions
        if shares is not None:
            return np.array([shares[n] for n in self.loader.domains])
        sizes = np.array([float(s or 0) for s in self.loader.domain_sizes.values()])
        return sizes / sizes.sum()
