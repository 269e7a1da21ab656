"""ODM: a bandit over domains, rewarded by their losses.

Shapes: K domains, B samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lightning_megatrain.callbacks.mixture.mixture import MixturePolicy
from lightning_megatrain.callbacks.step_losses import StepLosses
from lightning_megatrain.callbacks.training_losses import tap_losses, untap_losses
from lightning_megatrain.datamodules.shares import check_weights


class ODM(MixturePolicy):
    r"""Online data mixing (arXiv 2312.02406): Exp3 with the training loss of each domain as reward.

    At update t, with :math:`L_i` the reward of domain i and :math:`\pi_i` the share it was sampled with (algorithm 1):

    .. math::
        \hat R_i &\leftarrow \alpha \hat R_i + (1 - \alpha) L_i / \pi_i \quad\text{where } i \text{ was sampled} \\
        \epsilon_t &= \min\{1 / K, \sqrt{\ln K / (K t)}\} \\
        \pi_i &= (1 - K \epsilon_t) \frac{\exp(\epsilon_{t-1} \hat R_i)}{\sum_j \exp(\epsilon_{t-1} \hat R_j)} + \epsilon_t

    The paper draws one domain per micro-batch, and :math:`L_i / \pi_i` makes up for how seldom that is. Here a batch mixes domains:
    each sample's mean token
    loss is credited to its own domain, and :math:`L_i` is the sum of these over the number of all samples since the last update, on
    all ranks; it has the
    same expectation. The losses are those of the training step itself: there is no further forward. It acts only on losses: without a
    warm-up first after the first step.

    Args:
        alpha: How slowly rewards are forgotten.
        initial: Shares before the first update (default: the loader's).
        reward_scale: Multiplies the losses (default: 1; ``"dataflex"``: 15). The differences between shares grow with it.
        least_exploration: Lower bound of :math:`\epsilon_t`, at most 1 / K (default: 0; ``"dataflex"``: 0.03).
        variant: ``"dataflex"`` changes these two defaults, holds :math:`\hat R` within 10 000 and the exponents within 5 of their maximum.
        **policy: Schedule, domain and so on; see :class:`~lightning_megatrain.callbacks.Policy`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        alpha: float = 0.9,
        initial: dict[str, float] | None = None,
        reward_scale: float | None = None,
        least_exploration: float | None = None,
        variant: Literal["paper", "dataflex"] = "paper",
        **policy: Any,
    ) -> None:
        super().__init__(**policy)
        if not 0 <= alpha < 1:
            raise ValueError(f"`alpha` must be at least 0 and below 1, got {alpha}.")
        if variant not in ("paper", "dataflex"):
            raise ValueError(f"`variant` must be 'paper' or 'dataflex', got {variant!r}.")
        self.alpha, self.initial, self.variant = alpha, initial, variant
        self.reward_scale = reward_scale if reward_scale is not None else 15.0 if variant == "dataflex" else 1.0
        self.least_exploration = least_exploration if least_exploration is not None else 0.03 if variant == "dataflex" else 0.0
        if not 0 < self.reward_scale < math.inf or not 0 <= self.least_exploration <= 1:
            raise ValueError(
                f"`reward_scale` must be positive and `least_exploration` between 0 and 1, got {reward_scale} and {least_exploration}."
            )
        check_weights("initial", initial)
        self._rewards_K = np.zeros(0)
        self._seen_K2 = np.zeros((0, 2))  # of this rank since the last update: sum of losses, samples
        self._has_seen = False  # whether any batch was trained on since then, the same on all ranks

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self.schedule.max_updates != 0:
            tap_losses(pl_module, self._credit, self.name)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if stage == "fit":
            untap_losses(pl_module, self._credit)

    @override
    def due(self, step: int) -> bool:
        return self._has_seen and super().due(step)

    @override
    def prepare(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().prepare(trainer, module)
        k = len(self.loader.domains)
        if self.least_exploration > 1 / k:
            raise ValueError(f"`least_exploration` must be at most 1 / {k} for {k} domains, got {self.least_exploration}.")
        if not len(self._rewards_K):
            self._rewards_K, self._seen_K2 = np.zeros(k), np.zeros((k, 2))
        if self.initial is not None and self.updates == 0 and trainer.global_step == 0 and self.schedule.max_updates != 0:
            self.loader.set_proportions(self.initial)

    @override
    def mix(self, trainer: pl.Trainer, module: pl.LightningModule) -> Mapping[str, float]:
        seen_K2 = torch.from_numpy(self._seen_K2)
        if trainer.world_size > 1:
            # FP32 on the device: not every backend and device knows FP64.
            seen_K2 = trainer.strategy.reduce(seen_K2.float().to(trainer.strategy.root_device), reduce_op="sum").cpu().double()
        self._seen_K2, self._has_seen = np.zeros_like(self._seen_K2), False
        shares_K, t = self.current_shares(), self.updates + 1

        def decide() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
            rewards_K = update_rewards(self._rewards_K, seen_K2.numpy(), shares_K, self.alpha, self.reward_scale)
            if self.variant == "dataflex":
                rewards_K = rewards_K.clip(-1e4, 1e4)
            least, window = self.least_exploration, 5.0 if self.variant == "dataflex" else math.inf
            return rewards_K, shares(rewards_K, t, least, window)

        self._rewards_K, mixed_K = self.agree(trainer, decide)
        return dict(zip(self.loader.domains, mixed_K.tolist(), strict=True))

    @override
    def scores(self) -> Mapping[str, float]:
        return dict(zip(self.loader.domains, self._rewards_K.tolist(), strict=True))

    @override
    def own_state(self) -> dict[str, Any]:
        return {"rewards": torch.from_numpy(self._rewards_K), "seen": torch.from_numpy(self._seen_K2), "has_seen": self._has_seen}

    @override
    def load_own_state(self, state: dict[str, Any]) -> None:
        self._rewards_K, self._seen_K2, self._has_seen = state["rewards"].numpy(), state["seen"].numpy(), state["has_seen"]

    def _credit(self, losses: StepLosses, batch: Any) -> None:
        last = self.loader.last
        if last is None or last.domain is None:
            return
        self._has_seen = True
        counted = (losses.tokens_B > 0).cpu().numpy()
        domains, means = last.domain.numpy()[counted], losses.means_B.double().cpu().numpy()[counted]
        np.add.at(self._seen_K2, domains, np.stack([means, np.ones_like(means)], axis=1))


def update_rewards(
    rewards_K: NDArray[np.float64], seen_K2: NDArray[np.float64], shares_K: NDArray[np.float64], alpha: float, scale: float
) -> NDArray[np.float64]:
    """Return the new reward estimates, (K,); that of a domain without a sample stays.

    Args:
        rewards_K: The estimates so far.
        seen_K2: Sum of the samples' losses and number of samples, by domain.
        shares_K: What the samples were drawn with.
        alpha: How slowly estimates are forgotten.
        scale: Multiplies the losses.
    """
    sums_K, counts_K = seen_K2[:, 0], seen_K2[:, 1]
    reward_K = scale * sums_K / max(counts_K.sum(), 1) / np.maximum(shares_K, 1e-12)
    return np.where(counts_K > 0, alpha * rewards_K + (1 - alpha) * reward_K, rewards_K)


def exploration(t: int, k: int, least: float = 0.0) -> float:
    """Return epsilon of update t (0 is before the first) for k domains."""
    return 1 / k if t == 0 else max(least, min(1 / k, math.sqrt(math.log(k) / (k * t))))


def shares(rewards_K: NDArray[np.float64], t: int, least: float = 0.0, window: float = math.inf) -> NDArray[np.float64]:
    """Return the shares at update t, (K,).

    Args:
        rewards_K: The reward estimates.
        t: Counts updates from 1.
        least: Lower bound of the exploration rate.
        window: Exponents further than this below the largest are raised to it.
    """
    k = len(rewards_K)
    x_K = exploration(t - 1, k, least) * rewards_K
    x_K = np.maximum(x_K - x_K.max(), -window)
    epsilon = exploration(t, k, least)
    return (1 - k * epsilon) * np.exp(x_K) / np.exp(x_K).sum() + epsilon
