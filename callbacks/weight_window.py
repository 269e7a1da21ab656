"""The mean weight of a token over the micro-batches of one optimizer step.

Shapes: B samples.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_megatrain.callbacks.gather import gather_rows


class WeightWindow:
    """The mean weight of a token over the micro-batches of one optimizer step, on all ranks, each token counted as the loss counts it.

    It is known only with the last micro-batch. All are weighted relative to the mean weight in the first, and the gradient is corrected at
    the end, so that micro-batches of unlike weights keep their relation: with batches of one sample it is all there is.
    """

    def __init__(self) -> None:
        self._step = -1
        self._first_mean = self._counted = self._weighted = 0.0
        self._touched = False

    def factors(self, weights_B: Tensor, counted_B: Tensor, trainer: pl.Trainer) -> Tensor:
        """Return each sample's weight over the mean weight in the window's first micro-batch that has a token, (B,).

        Args:
            weights_B: Of a token of each sample.
            counted_B: How much each sample's tokens together count in the module's loss.
            trainer: Whose ranks.
        """
        if trainer.global_step != self._step:
            self.__init__()  # type: ignore[misc]
            self._step = trainer.global_step
        all_G, counted_G = gather_rows(weights_B, trainer).double(), gather_rows(counted_B, trainer).double()
        counted, weighted = float(counted_G.sum()), float((all_G * counted_G).sum())
        if self._first_mean == 0 and counted and not weighted:
            self._counted, self._touched = self._counted + counted, True
            return torch.zeros_like(weights_B)  # none of these samples counts
        if self._first_mean == 0:
            equal = bool((all_G == all_G[0]).all())
            self._first_mean = float(all_G[0]) if equal else weighted / (counted or 1.0)
        if self._first_mean == 0:
            return torch.ones_like(weights_B)  # nothing has counted yet
        self._counted, self._weighted = self._counted + counted, self._weighted + weighted
        self._touched |= bool((all_G != self._first_mean).any())
        return (weights_B.double() / self._first_mean).to(weights_B.dtype)

    def finish(self) -> float:
        """Return the factor that is left for the gradient of the window, and begin a new one."""
        correction = self._first_mean * self._counted / self._weighted if self._touched and self._weighted else 1.0
        self.__init__()  # type: ignore[misc]
        return 1.0 if abs(correction - 1) < 1e-9 else correction  # rounding, where there was one micro-batch
