"""The base of policies that say how much each sample's loss counts.

Shapes: B samples of one micro-batch on one rank.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_megatrain.callbacks.gather import gather_rows
from lightning_megatrain.callbacks.loader_access import step_ends
from lightning_megatrain.callbacks.policy import Policy
from lightning_megatrain.callbacks.step_losses import StepLosses
from lightning_megatrain.callbacks.training_losses import finish_window, tap_losses, untap_losses


class ReweightingPolicy(Policy):
    """Weights the samples of each micro-batch in the training loss.

    The loss becomes the sum of weight x token losses over the sum of weight x tokens, over all ranks; where all weights are equal the
    module's own loss stays as it is. Over the micro-batches of an optimizer step both sums are averaged as the module averages its
    loss: a `CausalLM` over all tokens of the step, most others over the means of the micro-batches.

    The schedule counts optimizer steps: from ``warmup_steps`` on every ``every_n_steps``-th step is weighted, at most ``max_updates``
    of them. A subclass says in :meth:`weigh` how much each sample counts.

    Args:
        **policy: Schedule, name and so on; see :class:`~lightning_megatrain.callbacks.Policy`.

    Raises:
        MisconfigurationException: the module optimizes by hand, so its backward runs before the weights are known.
    """

    records_the_step_under_way = True
    needs_tokens = False
    """Whether :meth:`weigh` looks at single tokens."""

    def __init__(self, **policy: Any) -> None:
        super().__init__(**policy)
        self._weighted_step: int | None = None  # the last one that was due, by the number of steps done before it
        self._trainer: pl.Trainer | None = None
        self._range: list[tuple[float, float]] = []  # lowest and highest weight over the mean one, of the step's micro-batches

    @abstractmethod
    def weigh(self, losses: StepLosses, batch: Any) -> Tensor:
        """Return the weight of each sample, (B,) non-negative, of any sum. May communicate: every rank calls it.

        The weights are constants: their graph is dropped. An array or a list of B numbers is taken too.

        Args:
            losses: Of the micro-batch, detached; ``losses.means_B`` is each sample's mean token loss.
            batch: The micro-batch, on the device that computes; ``self.loader.last`` has its indices and domains.
        """

    def weighs(self, step: int) -> bool:
        """Whether the step is weighted that follows ``step`` others: one at which :meth:`~Policy.act` was due."""
        return step == self._weighted_step

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self.schedule.max_updates != 0:
            if not pl_module.automatic_optimization:
                raise MisconfigurationException(
                    f"{self.name} weights the loss that `training_step` returns, but {type(pl_module).__name__} has "
                    "automatic_optimization=False and runs backward itself before that. Weight the losses there, or leave the optimization "
                    "to Lightning."
                )
            self._trainer = trainer
            tap_losses(pl_module, self._see, self.name, self.needs_tokens)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if stage == "fit":
            untap_losses(pl_module, self._see)
            self._trainer = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step > 0:
            self._report_step(trainer)  # of a checkpoint that another callback saved before this one had seen the end of its step
        super().on_train_start(trainer, pl_module)

    @override
    def act(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._weighted_step = trainer.global_step

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if step_ends(trainer):
            finish_window(pl_module)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._report_step(trainer)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def own_state(self) -> dict[str, Any]:
        return {"weighted_step": self._weighted_step, "range": self._range}

    @override
    def load_own_state(self, state: dict[str, Any]) -> None:
        self._weighted_step, self._range = state["weighted_step"], [tuple(r) for r in state["range"]]

    def _report_step(self, trainer: pl.Trainer) -> None:
        if trainer.global_step != self._step and self._range:  # an optimizer step is done
            self.report(trainer, {"weight/least": min(r[0] for r in self._range), "weight/most": max(r[1] for r in self._range)})
            self._range = []

    def _see(self, losses: StepLosses, batch: Any) -> Tensor | None:
        trainer = self._trainer
        if trainer is None or not self.weighs(trainer.global_step):
            return None
        with self._naming_errors(trainer):
            weights_B = _as_weights(self.weigh(losses, batch), losses.sums_B)
            if not bool((torch.isfinite(weights_B) & (weights_B >= 0)).all()):
                raise ValueError(
                    f"`weigh` must return a finite, non-negative weight for each of {len(losses.sums_B)} samples, got {weights_B}."
                )
            self._keep(trainer, losses, weights_B)
            return weights_B

    def _keep(self, trainer: pl.Trainer, losses: StepLosses, weights_B: Tensor) -> None:
        """Note the micro-batch's weights for history and records, from all ranks."""
        last = self.loader.last
        assert last is not None
        domain_B = torch.full_like(last.index, -1) if last.domain is None else last.domain
        which = torch.stack([last.index, domain_B], dim=1).to(weights_B.device)
        index, domain = gather_rows(which, trainer).cpu().numpy().T
        score, weight = gather_rows(torch.stack([losses.means_B, weights_B], dim=1), trainer).double().cpu().numpy().T
        relative = weight / max(weight.mean(), 1e-300)
        self._range.append((float(relative.min()), float(relative.max())))
        names = None if last.domain is None else [self.loader.domains[d] for d in domain]
        self.write(trainer, index=index, domain=names, score=score, weight=weight)


def _as_weights(given: Any, sums_B: Tensor) -> Tensor:
    """Return what `weigh` gave as (B,) FP32 without a graph, on the device of the losses."""
    weights = given
    if given is not None and not isinstance(given, Tensor):
        try:
            weights = torch.from_numpy(np.array(given, dtype=np.float64))
        except (TypeError, ValueError, RuntimeError):
            weights = None  # not numbers, or not as many in each row
    if weights is None or weights.shape != sums_B.shape:
        shape = "" if weights is None else f" of shape {tuple(weights.shape)}"
        raise TypeError(
            f"`weigh` must return a tensor (B,) = {tuple(sums_B.shape)}, a weight for each sample, got a {type(given).__name__}{shape}."
        )
    weights_B: Tensor = weights.detach().float().to(sums_B.device)
    return weights_B
