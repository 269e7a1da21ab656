"""LossReweighting: how much a sample counts, from its own loss, inside each batch.

Shapes: B samples of one micro-batch on one rank, G samples of all ranks together.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatrain.callbacks.gather import gather_rows
from lightning_megatrain.callbacks.policy import warn_once
from lightning_megatrain.callbacks.reweighting.reweighting import ReweightingPolicy
from lightning_megatrain.callbacks.step_losses import StepLosses

Strategy = Literal["linupper", "quadratic", "extremes", "uniform"]


class LossReweighting(ReweightingPolicy):
    r"""Dynamic loss-based sample reweighting (arXiv 2502.06733).

    The mean token losses of the micro-batch, over all ranks, are brought to :math:`h_i \in [-\delta, \delta]`:

    .. math:: h_i = \frac{2 \delta \ell_i - \delta (\ell_{max} + \ell_{min})}{\ell_{max} - \ell_{min}}

    and weighted by :math:`w = \mathrm{softmax}(f(h) / r)` with ``linupper`` :math:`f = \min(h + \delta, \delta)` (low losses count
    less), ``quadratic``
    :math:`f = 1 - h^2 / \delta^2` (medium ones count most), ``extremes`` :math:`f = |h|` (both ends count most), ``uniform`` equal
    weights. With length
    normalisation, as in the authors' code, the loss is the weighted mean over tokens. Weights come from the losses of the step
    itself: there is no further forward.

    Args:
        strategy: The shape of the weights.
        delta: Range of the normalised losses.
        temperature: r: large is close to uniform.
        length_normalised: Weighted mean over tokens; ``False``: over samples, each with its mean token loss.
        variant: ``"dataflex"`` takes ``uniform`` as :math:`f = h`, as the published code does, and does not normalise lengths.
        **policy: Schedule, name and so on; see :class:`ReweightingPolicy`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        strategy: Strategy = "linupper",
        *,
        delta: float = 1.0,
        temperature: float = 1.0,
        length_normalised: bool = True,
        variant: Literal["paper", "dataflex"] = "paper",
        **policy: Any,
    ) -> None:
        super().__init__(**policy)
        if strategy not in ("linupper", "quadratic", "extremes", "uniform"):
            raise ValueError(f"`strategy` must be 'linupper', 'quadratic', 'extremes' or 'uniform', got {strategy!r}.")
        if not (0 < delta < math.inf and 0 < temperature < math.inf):
            raise ValueError(f"`delta` and `temperature` must be positive, got {delta} and {temperature}.")
        if variant not in ("paper", "dataflex"):
            raise ValueError(f"`variant` must be 'paper' or 'dataflex', got {variant!r}.")
        self.strategy, self.delta, self.temperature, self.variant = strategy, delta, temperature, variant
        self.length_normalised = length_normalised and variant == "paper"

    @override
    def weigh(self, losses: StepLosses, batch: Any) -> Tensor:
        assert self._trainer is not None
        own_B = losses.means_B
        all_G = gather_rows(own_B, self._trainer)
        if len(all_G) == 1:
            warn_once(self, "one", "a batch of one sample has nothing to be weighted against: raise `batch_size`.")
        if not bool(torch.isfinite(all_G).all()):
            warn_once(self, "finite", "the loss of a sample is not finite: a batch that holds such a one is not weighted.")
        shape = "published uniform" if self.variant == "dataflex" and self.strategy == "uniform" else self.strategy
        f_G = shape_of(all_G, all_G, shape, self.delta) / self.temperature
        f_B = shape_of(own_B, all_G, shape, self.delta) / self.temperature
        weights_B = len(all_G) * (f_B - torch.logsumexp(f_G, 0)).exp()  # the softmax over all ranks, of mean 1
        if bool((f_G == f_G[0]).all()):
            weights_B = torch.ones_like(own_B)  # exactly
        # Over samples: of each token, so that a sample's tokens together count as its weight in whatever the module divides by.
        return weights_B if self.length_normalised else weights_B * losses.divisor / losses.tokens_B.clamp(min=1)


def shape_of(losses_B: Tensor, all_G: Tensor, strategy: str, delta: float) -> Tensor:
    """Return f(h) of some losses among all of the batch, (B,); zeros where all are equal, or one of them is not finite.

    Args:
        losses_B: The losses to weight.
        all_G: All losses of the batch, which give the range.
        strategy: As in :class:`LossReweighting`; ``"published uniform"`` is f = h.
        delta: Range of h.
    """
    low, high = all_G.min(), all_G.max()
    if strategy == "uniform" or not bool(torch.isfinite(high - low)) or not bool(high > low):
        return torch.zeros_like(losses_B)
    h_B = (2 * delta * losses_B - delta * (high + low)) / (high - low)
    if strategy == "linupper":
        return (h_B + delta).clamp(max=delta)
    if strategy == "quadratic":
        return 1 - h_B**2 / delta**2
    return h_B.abs() if strategy == "extremes" else h_B
