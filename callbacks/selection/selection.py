"""The base of policies that choose which samples come next."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from typing_extensions import override

from lightning_megatrain import model_ops
from lightning_megatrain.callbacks.loader_access import refuse_overfitting
from lightning_megatrain.callbacks.policy import Policy


@dataclass(frozen=True, init=False)
class Selected:
    """A choice of samples. Arrays, tensors (of any device) and lists are taken, and kept as arrays.

    Attributes:
        index: (n,) whole numbers, positions in the dataset.
        score: (n,) float64 of these, or None.
        ordered: Whether they are served in this order rather than shuffled.

    Raises:
        TypeError: ``index`` or ``score`` holds no numbers.
        ValueError: they are not 1-D, or not of one length.
    """

    index: NDArray[np.int64]
    score: NDArray[np.float64] | None
    ordered: bool

    def __init__(self, index: ArrayLike | Tensor, score: ArrayLike | Tensor | None = None, ordered: bool = False) -> None:
        index_n = _numbers("index", index)
        score_n = None if score is None else _numbers("score", score).astype(np.float64)
        if score_n is not None and len(score_n) != len(index_n):
            raise ValueError(f"Selected(index, score) needs a score for each index, got {len(index_n)} indices and {len(score_n)} scores.")
        for name, value in (("index", index_n), ("score", score_n), ("ordered", ordered)):
            object.__setattr__(self, name, value)  # frozen


class SelectionPolicy(Policy):
    """Chooses the pool that training draws from until the next choice.

    A subclass says in :meth:`select` which samples, the same on every rank.

    Args:
        size: How many samples to choose: a number, a fraction of the dataset (a float up to 1.0), or None for as many as are trained
            on until
            the next choice.
        every_n_steps: How often to choose anew, in optimizer steps; 0 (default) chooses once. Each time costs what the policy says.
        batch_size: Samples per batch and rank when the model is asked about samples (default: the training loader's).
        **policy: Schedule, name and so on; see :class:`~lightning_megatrain.callbacks.Policy`.

    Raises:
        ValueError: a size is not positive, or ``size`` is None where the choice is made only once.
    """

    def __init__(self, *, size: int | float | None = None, every_n_steps: int = 0, batch_size: int | None = None, **policy: Any) -> None:
        super().__init__(every_n_steps=every_n_steps, **policy)
        if size is None and self.schedule.every_n_steps == 0:
            raise ValueError("`every_n_steps=0` chooses once for the rest of training: give `size`, a number or a fraction of samples.")
        if isinstance(size, bool) or (size is not None and not (0 < size <= 1 if isinstance(size, float) else size > 0)):
            raise ValueError(f"`size` must be a positive number of samples or a fraction up to 1.0, got {size!r}.")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
        self.size = size
        self.batch_size = batch_size

    @abstractmethod
    def select(self, trainer: pl.Trainer, module: pl.LightningModule, size: int) -> Selected:
        """Return ``size`` samples. Called on every rank, and must return the same on each: end with :meth:`~Policy.agree`.

        ``size`` is how many are wanted; more or fewer are taken as well.
        """

    @override
    def prepare(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        _ = self.loader.samples  # refuses streams before any time is spent
        if self.schedule.max_updates != 0:
            refuse_overfitting(trainer, self.name)

    @override
    def act(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        selected = self.select(trainer, module, self.pool_size(trainer))
        if not isinstance(selected, Selected):
            raise TypeError(
                f"`select` must return a Selected, got a {type(selected).__name__}. Return `Selected(index)`, the positions of the samples "
                "in the dataset, or `Selected(index, score)`."
            )
        self.loader.set_pool(selected.index, ordered=selected.ordered)
        metrics = {"samples": float(len(selected.index))}
        domains = None
        if selected.score is not None:
            metrics |= {"score/mean": float(np.mean(selected.score)), "score/least": float(np.min(selected.score))}
        if self.loader.has_domains:
            names, ids = self.loader.domains, self.loader.domain_of(selected.index)
            domains = [names[i] for i in ids]
            shares = np.bincount(ids, minlength=len(names)) / len(ids)
            metrics |= {f"share/{name}": float(share) for name, share in zip(names, shares, strict=True)}
        self.report(trainer, metrics)
        self.write(trainer, index=selected.index, domain=domains, score=selected.score)

    def pool_size(self, trainer: pl.Trainer) -> int:
        """Return how many samples to choose now."""
        total = self.loader.num_samples or 0
        if self.size is None:
            step = self.loader.batch_size * self.loader.world_size * trainer.accumulate_grad_batches
            return min(step * self.schedule.every_n_steps, total)
        if isinstance(self.size, float):
            return max(1, round(self.size * total))
        return min(self.size, total)

    def ask(self, operation: Any, module: pl.LightningModule, dataset: Any = None, collate_fn: Any = None, **options: Any) -> Any:
        """Run a model operation over a dataset, shared by the ranks, and return every sample's result on each rank.

        Args:
            operation: Such as ``model_ops.sample_losses``.
            module: The one that trains; left as it is.
            dataset: Default: the training samples.
            collate_fn: Default: the training loader's.
            options: Further arguments of ``model_ops.over_dataset``.
        """
        trainer = module.trainer
        options.setdefault("progress", trainer.progress_bar_callback is not None)
        return model_ops.over_dataset(
            operation,
            module,
            self.loader.samples if dataset is None else dataset,
            batch_size=self.batch_size or self.loader.batch_size,
            collate_fn=collate_fn or self.loader.collate_fn,
            **options,
        )


def _numbers(name: str, values: ArrayLike | Tensor) -> NDArray[Any]:
    """Return what a Selected was given as a 1-D array."""
    kind = type(values).__name__
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()  # NumPy has no BF16
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"`{name}` of a Selected cannot be made an array of numbers, got a {kind}. ({error})") from error
    if array.dtype.kind not in "biuf":
        raise TypeError(f"`{name}` of a Selected must be an array, a tensor or a list of numbers, got a {kind} of {array.dtype}.")
    if array.ndim != 1:
        raise ValueError(f"`{name}` of a Selected must be 1-D, (n,), got a {kind} of shape {array.shape}.")
    return array


def check_seed(seed: int) -> int:
    """Return ``seed``, which numpy's generators take if it is a whole number of zero or more."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"`seed` must be a whole number of zero or more, got {seed!r}.")
    return seed


def highest(scores: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """Return the positions of the ``size`` highest scores, best first; of equal scores the earlier sample comes first.

    Raises:
        ValueError: a score is not a number.
    """
    if np.isnan(scores).any():
        raise ValueError(f"{int(np.isnan(scores).sum())} of {len(scores)} scores are NaN.")
    return np.argsort(-scores, kind="stable")[:size].astype(np.int64)
