"""LossSelection: prefer samples whose loss is high, medium or low."""

from __future__ import annotations

import math
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_megatrain import model_ops
from lightning_megatrain.callbacks.policy import warn_once
from lightning_megatrain.callbacks.selection.selection import Selected, SelectionPolicy, check_seed

Focus = Literal["high", "medium", "low"]


class LossSelection(SelectionPolicy):
    r"""Draws samples at random, those in one band of the loss more often.

    All losses are computed anew at every update. With the quantiles :math:`q_1, q_2` of the losses a sample is low if
    :math:`\ell \le q_1`, medium if :math:`q_1 < \ell \le q_2`, else high. It is drawn without replacement with probability proportional to
    :math:`w^{1/\tau}`, where w is ``focus_weight`` in the band in focus and 1 elsewhere. Samples whose loss is not finite are never
    drawn. (There is no
    paper; this is what DataFlex's `loss` selector does.) The cost is one forward over the dataset per update.

    Args:
        focus: The band drawn more often.
        focus_weight: How much more often, before the temperature.
        quantiles: Where the bands end.
        temperature: Above 1 evens the weights out, below 1 sharpens them.
        seed: With the step, seeds the draw.
        **selection: Size, schedule and so on; see :class:`SelectionPolicy`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        focus: Focus = "high",
        focus_weight: float = 5.0,
        quantiles: tuple[float, float] = (0.33, 0.66),
        temperature: float = 1.0,
        seed: int = 0,
        **selection: Any,
    ) -> None:
        super().__init__(**selection)
        if focus not in ("high", "medium", "low"):
            raise ValueError(f"`focus` must be 'high', 'medium' or 'low', got {focus!r}.")
        if not (0 < focus_weight < math.inf and 0 < temperature < math.inf):
            raise ValueError(f"`focus_weight` and `temperature` must be positive, got {focus_weight} and {temperature}.")
        if len(quantiles) != 2 or not 0 <= quantiles[0] <= quantiles[1] <= 1:
            raise ValueError(f"`quantiles` must be two numbers that rise from 0 to 1, got {quantiles}.")
        self.focus, self.focus_weight, self.quantiles = focus, focus_weight, (quantiles[0], quantiles[1])
        self.temperature, self.seed = temperature, check_seed(seed)

    @override
    def select(self, trainer: pl.Trainer, module: pl.LightningModule, size: int) -> Selected:
        losses = self.ask(model_ops.sample_losses, module).double().numpy()  # (N,)
        finite = int(np.isfinite(losses).sum())
        if finite < size:
            warn_once(self, "finite", f"only {finite} of {len(losses)} losses are finite, so {finite} samples are chosen, not {size}.")
        generator = np.random.default_rng([self.seed, trainer.global_step])
        index = self.agree(
            trainer, lambda: draw(band_weights(losses, self.focus, self.focus_weight, self.quantiles), size, self.temperature, generator)
        )
        return Selected(index, losses[index])


def band_weights(losses: NDArray[np.float64], focus: Focus, focus_weight: float, quantiles: tuple[float, float]) -> NDArray[np.float64]:
    """Return each sample's weight, (N,): ``focus_weight`` in the band in focus, 1 elsewhere, 0 where the loss is not finite."""
    finite = np.isfinite(losses)
    if not finite.any():
        raise ValueError(f"None of {len(losses)} losses is finite.")
    low, high = np.quantile(losses[finite], quantiles)
    band = {"low": losses <= low, "medium": (losses > low) & (losses <= high), "high": losses > high}[focus]
    return np.where(finite, np.where(band, focus_weight, 1.0), 0.0)


def draw(weights: NDArray[np.float64], size: int, temperature: float, generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw without replacement with probabilities proportional to ``weights ** (1 / temperature)``.

    The largest of log-weight plus Gumbel noise are drawn, which is the same as drawing one after another, for any number of samples.

    Args:
        weights: (N,) non-negative; a weight of 0 is never drawn.
        size: How many; fewer if fewer have a weight.
        temperature: Positive.
        generator: Of the noise.
    """
    possible = np.flatnonzero(weights > 0)
    keys = np.log(weights[possible]) / temperature + generator.gumbel(size=len(possible))
    return possible[np.argsort(-keys, kind="stable")[:size]].astype(np.int64)
