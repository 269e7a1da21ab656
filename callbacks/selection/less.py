"""LESS: choose the samples whose gradients point where the target data wants to go.

Shapes: N training samples, M target samples, K features, S sub-tasks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatrain import model_ops
from lightning_megatrain.callbacks.selection.selection import Selected, SelectionPolicy, highest
from lightning_megatrain.callbacks.target import Target, find_target
from lightning_megatrain.model_ops.preconditioning import not_adam


class LESS(SelectionPolicy):
    r"""Chooses the samples with the largest influence on the target data (LESS, arXiv 2402.04333).

    With :math:`\Gamma` the Adam direction of a training sample (section 2.2), g a target sample's gradient, both randomly projected, the
    influence on a sub-task s is the mean over its samples of :math:`\cos(\Gamma(z), g(z'))`, summed over checkpoints with their
    average learning rate
    (equation 3 and definition 3.1), and a sample's score the maximum over sub-tasks (section 4.2). The ``size`` best are the pool.

    Here a checkpoint is the model at an update. With ``checkpoints="latest"`` each choice is made from the model as it is, the
    online form; with
    ``"all"`` the influences of all updates so far are summed, each with the average learning rate of the steps since the one before.
    Gradients are taken in evaluation
    mode from one batched pass, so the cost per update is a forward and backward over all training and target samples and the projection;
    only N x K features are kept.

    Args:
        target: The data to do well on: see :func:`~lightning_megatrain.callbacks.target.find_target`. A mapping holds one dataset
            per sub-task.
        gradient: ``"adam"`` for the direction with the optimizer's state, so at least one warm-up step is needed; ``"sgd"`` for the
            gradient itself.
        checkpoints: ``"latest"`` or ``"all"``.
        width: Features per sample, K.
        projection: ``"factored"`` (fast) or ``"dense"`` (tight), see ``model_ops.GradientSettings``.
        parameters: Patterns of the parameters whose gradients count (default: all that train).
        seed: Of the projection.
        store: A folder in which features are kept, so that a crash in the middle of scoring loses little.
        **selection: Size, schedule and so on; see :class:`SelectionPolicy`.

    Raises:
        TypeError: there is no target.
        ValueError: an argument is out of range, or the schedule leaves no Adam state to use.
    """

    def __init__(
        self,
        target: Any,
        *,
        gradient: Literal["adam", "sgd"] = "adam",
        checkpoints: Literal["latest", "all"] = "latest",
        width: int = 4096,
        projection: Literal["factored", "dense"] = "factored",
        parameters: list[str] | None = None,
        seed: int = 0,
        store: str | None = None,
        **selection: Any,
    ) -> None:
        super().__init__(**selection)
        if target is None:
            raise TypeError("`target` is None: give a dataset, a DataLoader, a mapping of sub-tasks, or the name of an attribute.")
        if gradient not in ("adam", "sgd") or checkpoints not in ("latest", "all"):
            raise ValueError(f"`gradient` is 'adam' or 'sgd' and `checkpoints` 'latest' or 'all', got {gradient!r} and {checkpoints!r}.")
        if gradient == "adam" and self.schedule.warmup_steps == 0 and self.schedule.max_updates != 0:
            raise ValueError(
                "`gradient='adam'` needs the state that the optimizer has after training a little: give `warmup_steps=` (the paper "
                "warms up on 5 % of the data), "
                "or `gradient='sgd'`."
            )
        self.target, self.gradient, self.checkpoints, self.store = target, gradient, checkpoints, store
        self.settings = model_ops.GradientSettings(
            width=width, projection=projection, seed=seed, parameters=None if parameters is None else tuple(parameters)
        )
        self._influence_NS: Tensor | None = None  # summed over updates, with checkpoints="all"
        self._tasks: dict[str, Target] = {}
        self._rates: list[float] = []  # learning rates since the last update

    @override
    def prepare(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().prepare(trainer, module)
        self._tasks = find_target(self.target, trainer)  # refuses a target that is not there, before training
        if self.gradient == "adam" and self.schedule.max_updates != 0:
            optimizers = [getattr(o, "optimizer", o) for o in trainer.optimizers]
            kinds = {kind for o in optimizers for group in o.param_groups if (kind := not_adam(o, group))}
            if kinds and self.settings.parameters is None:  # else the chosen parameters' optimizer is looked at when it is used
                raise ValueError(
                    f"`gradient='adam'` needs the state of Adam or AdamW, but {', '.join(sorted(kinds))} trains the model. Use "
                    "LESS(gradient='sgd'), which takes the gradients themselves."
                )

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._rates.append(float(trainer.optimizers[0].param_groups[0]["lr"]))

    @override
    def select(self, trainer: pl.Trainer, module: pl.LightningModule, size: int) -> Selected:
        train_NK = self._features(trainer, module, self.loader.samples, self.loader.collate_fn, self.gradient == "adam")
        tasks = self._tasks or find_target(self.target, trainer)
        targets = [self._features(trainer, module, t.dataset, t.collate_fn or self.loader.collate_fn, adam=False) for t in tasks.values()]
        influence_NS = influence(train_NK, targets)
        if self.checkpoints == "all":
            rate = float(np.mean(self._rates)) if self._rates else 1.0
            earlier = 0.0 if self._influence_NS is None else self._influence_NS
            influence_NS = self._influence_NS = earlier + rate * influence_NS
        self._rates = []
        scores = influence_NS.amax(1).numpy()  # (N,)
        index = self.agree(trainer, lambda: highest(scores, size))
        return Selected(index, scores[index])

    @override
    def own_state(self) -> dict[str, Any]:
        return {"influence": self._influence_NS, "rates": self._rates}

    @override
    def load_own_state(self, state: dict[str, Any]) -> None:
        self._influence_NS, self._rates = state["influence"], list(state["rates"])

    def _features(self, trainer: pl.Trainer, module: pl.LightningModule, dataset: Any, collate_fn: Any, adam: bool) -> Tensor:
        """Return the projected gradient of every sample, (n, K)."""
        settings = replace(self.settings, preconditioner="adam" if adam else None)
        store = None
        if self.store is not None:
            key = model_ops.feature_key(
                module,
                model_ops.data_fingerprint(dataset),
                settings,
                step=trainer.global_step,
                optimizers=trainer.optimizers if adam else (),
                collate=_describe(collate_fn),
            )
            store = model_ops.FeatureStore(Path(self.store), key)
        return self.ask(partial(model_ops.gradient_features, settings=settings), module, dataset, collate_fn, store=store)


def influence(train_NK: Tensor, targets: list[Tensor]) -> Tensor:
    """Return the mean cosine of each training sample with the samples of each sub-task, (N, S) float64.

    The mean over target samples is taken first: N x S products, not N x M. A row without gradient has cosine 0.

    Args:
        train_NK: Features of the training samples.
        targets: Features of each sub-task's samples, (M_s, K).
    """
    means_KS = torch.stack([_unit(t.double()).mean(0) for t in targets], dim=1)
    return _unit(train_NK.double()) @ means_KS


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)


def _describe(function: Any) -> str:
    """Name a function and what it was bound to, the same in every process."""
    if isinstance(function, partial):
        return f"{_describe(function.func)}{function.args}{sorted(function.keywords.items())}"
    return str(getattr(function, "__qualname__", type(function).__qualname__))
