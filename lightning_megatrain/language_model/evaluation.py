"""Loss and perplexity over all label tokens of a validation or test."""

from __future__ import annotations

import math
from collections.abc import Callable

import lightning as L
import torch


class Evaluation:
    """Loss sums and label tokens of each loader, float64."""

    def __init__(self) -> None:
        self._totals: dict[int, torch.Tensor] = {}

    def add(self, loader: int, losses: torch.Tensor, valid: torch.Tensor) -> None:
        """Count a batch of token losses (B, T - 1), of which some are valid."""
        totals = torch.stack([losses.double().sum(), valid.sum().double()])
        self._totals[loader] = self._totals.get(loader, 0) + totals.cpu()

    def log(self, module: L.LightningModule, stage: str, mean_over_processes: Callable[[torch.Tensor], list[float]]) -> None:
        """Log the mean over all tokens, and of each loader under its domain's name or its number where there are several."""
        names = getattr(getattr(module.trainer, "datamodule", None), "domain_names", [])
        overall = torch.zeros(2, dtype=torch.float64)
        for index, totals in sorted(self._totals.items()):
            loss_sum, count = mean_over_processes(totals.to(module.device))
            overall += torch.tensor([loss_sum, count])
            if count and (names or len(self._totals) > 1):
                self._log_loss(module, stage, "/" + (names[index] if index < len(names) else str(index)), loss_sum / count)
        if overall[1]:
            self._log_loss(module, stage, "", float(overall[0] / overall[1]))

    def _log_loss(self, module: L.LightningModule, stage: str, suffix: str, loss: float) -> None:
        module.log(f"{stage}_loss{suffix}", loss)
        # On the progress bar each domain where there are few, else the mixture.
        module.log(f"{stage}_perplexity{suffix}", perplexity(loss), prog_bar=bool(suffix) == (1 < len(self._totals) <= 4))


def perplexity(loss: float) -> float:
    """Return e to the loss, infinity where that is too large."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
