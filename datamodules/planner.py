"""Batches planned ahead and handed out one by one: where the loader is, and how it takes plans back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from lightning_megatrain.datamodules.plan import Plan
from lightning_megatrain.datamodules.sampler_order import SamplerOrder


@dataclass(frozen=True)
class Delivered:
    """What a batch was made of.

    Attributes:
        index: (B,) int64, each sample's index in the dataset (named datasets follow one another); a stream's sample has its ordinal.
        domain: (B,) int64 positions in ``loader.domains``, or None when the data has no domains.
    """

    index: torch.Tensor
    domain: torch.Tensor | None


@dataclass(frozen=True)
class Planned:
    """One batch of this rank to come.

    Attributes:
        keys: What the dataset is asked for.
        index: (B,) as in :class:`Delivered`.
        domain: (B,) as in :class:`Delivered`.
        position: Of the plan, behind this batch.
    """

    keys: list[Any]
    index: NDArray[np.int64]
    domain: NDArray[np.int64] | None
    position: dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """How the samples of an epoch are cut into batches.

    Attributes:
        batch_size: Samples per batch and rank.
        rank: This process.
        world_size: Processes that train.
        steps: Batches of an epoch.
        num_samples: Of the data; None with a stream.
        one_pass: Whether an epoch is one pass over the data, its last batch perhaps smaller.
        drop_last: Whether that one is left out.
    """

    batch_size: int
    rank: int
    world_size: int
    steps: int
    num_samples: int | None
    one_pass: bool
    drop_last: bool

    @property
    def global_batch(self) -> int:
        """Samples of a full batch of all ranks."""
        return self.batch_size * self.world_size


class Planner:
    """Plans batches ahead of those handed out, as workers want them, and takes them back when a decision changes.

    Args:
        plan: The seeded order, and the decisions on it.
        shape: How an epoch is cut.
        own_order: The order of a wrapped DataLoader, which holds while nothing is decided.
        has_domains: Whether batches have domains.
        keyed_by_domain: Whether the dataset is asked for (domain, place, parts) instead of an index.
    """

    def __init__(self, plan: Plan, shape: Shape, own_order: SamplerOrder | None, has_domains: bool, keyed_by_domain: bool) -> None:
        self.plan, self.shape = plan, shape
        self.epoch = 0
        self.delivered = 0  # batches of this epoch that were handed out
        self.changes = 0  # decisions made
        self._own_order, self._has_domains, self._keyed_by_domain = own_order, has_domains, keyed_by_domain
        self._planned = 0
        self._ahead: deque[Planned] = deque()
        self._position = self._first = self._here()  # behind the last batch handed out

    @property
    def in_own_order(self) -> bool:
        """Whether a wrapped DataLoader's own sampler says what comes."""
        return self._own_order is not None and not self.plan.decided

    def begin_epoch(self, epoch: int, again: bool = False) -> None:
        """Begin an epoch; what was planned and not handed out is taken back. With ``again`` it is the first one's batches."""
        self.epoch, self.delivered = epoch, 0
        self.rewind()
        if self._own_order is not None:
            self._own_order.start_epoch()
        elif again:
            self.plan.seek(self._first["plan"])
        elif self.shape.one_pass:
            self.plan.start_pass(epoch)
        self._position = self._here()

    def take(self) -> Planned | None:
        """Plan one more batch of this rank; None at the end of the epoch."""
        own_order = self._own_order if self.in_own_order else None
        if self._planned >= self.shape.steps:
            if own_order is not None:
                own_order.end()
            return None
        if own_order is not None:
            keys: list[Any] | None = own_order.take()
            if keys is None:
                return None
            index = np.array(keys, dtype=np.int64)
            domain = self.plan.domain_of(index)
        else:
            index, domain = self._share(*self.plan.take(self._next_size()))
            keys = index.tolist()
            if self._keyed_by_domain:
                parts = self.plan.parts()
                keys = [(d, i, parts[d]) for d, i in zip(domain.tolist(), keys, strict=True)]
        self._planned += 1
        planned = Planned(keys, index, domain if self._has_domains else None, self._here())
        self._ahead.append(planned)
        return planned

    def hand_out(self) -> Delivered:
        """Count the oldest planned batch as handed out, and tell what it is made of."""
        planned = self._ahead.popleft()
        self.delivered += 1
        self._position = planned.position
        if self._own_order is not None:
            self._own_order.commit(planned.position["own_order"])
        return Delivered(torch.from_numpy(planned.index), None if planned.domain is None else torch.from_numpy(planned.domain))

    def rewind(self) -> None:
        """Take back what was planned but not handed out."""
        self._ahead.clear()
        self._planned = self.delivered
        self.plan.seek(self._position["plan"])
        if self._own_order is not None:
            self._own_order.seek(self._position["own_order"])

    def change(self, decide: Callable[[int], None]) -> None:
        """Take plans back and put a decision in force; ``decide`` is given its number."""
        self.rewind()
        decide(self.changes + 1)
        self.changes += 1
        self._position = self._here()

    def take_over(self, earlier: Planner) -> None:
        """Put another planner's decisions in force, and go on where it is under them."""
        self._ahead.clear()
        self.changes = earlier.changes
        self.plan.load_decisions(earlier.plan.decisions())
        self.plan.seek(earlier._position["plan"])
        self._position = self._here()

    def state_dict(self) -> dict[str, Any]:
        """Return the place and the decisions in force."""
        return {
            "epoch": self.epoch,
            "delivered": self.delivered,
            "steps": self.shape.steps,
            "global_batch": self.shape.global_batch,
            "num_samples": self.shape.num_samples,
            "changes": self.changes,
            "position": self._position,
            "decisions": self.plan.decisions(),
            "own_order": None if self._own_order is None else self._own_order.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place that :meth:`state_dict` returned.

        Raises:
            ValueError: the batch size, number of processes, data, or seed of streams is not the saved one.
            RuntimeError: a wrapped DataLoader's sampler gives another order than it gave then.
        """
        shape = self.shape
        if 0 < state["delivered"] < state["steps"] and state["global_batch"] != shape.global_batch:
            raise ValueError(
                f"The checkpoint lies inside an epoch of batches of {state['global_batch']} samples (over all processes), but they now "
                f"have {shape.global_batch} ({shape.batch_size} x {shape.world_size}). Use the same batch size and number of devices, or "
                "resume from the end of an epoch."
            )
        if state["num_samples"] != shape.num_samples:
            raise ValueError(f"The checkpoint was saved with {state['num_samples']} samples, the data has {shape.num_samples}.")
        self._check_seed(state["decisions"]["seed"])
        self._ahead.clear()
        self.epoch, self.delivered, self._planned = state["epoch"], state["delivered"], state["delivered"]
        self.changes, self._position = state["changes"], state["position"]
        self.plan.load_decisions(state["decisions"])
        self.plan.seek(self._position["plan"])
        if self._own_order is not None:
            self._own_order.load_state_dict(state["own_order"])
            self._own_order.seek(self._position["own_order"])

    def _check_seed(self, saved: int) -> None:
        seed = self.plan.seed
        if saved != seed and self.shape.num_samples is None:
            raise ValueError(
                f"The checkpoint was saved with seed {saved}, and this loader has seed {seed}: its streams would come in another order. "
                f"Use seed {saved} to resume."
            )
        if saved != seed:
            rank_zero_warn(
                f"The data goes on in the checkpoint's order, of seed {saved}, so that no sample of the epoch is left out or repeated; "
                f"this loader's seed {seed} is for a new training."
            )

    def _here(self) -> dict[str, Any]:
        return {"plan": self.plan.position(), "own_order": None if self._own_order is None else self._own_order.position()}

    def _next_size(self) -> int:
        """Return the samples of the next batch of all ranks: fewer in the last one of a pass over the data."""
        shape = self.shape
        last = self._planned == shape.steps - 1
        if not last or not shape.one_pass or shape.drop_last or self._own_order is not None or self.plan.decided:
            return shape.global_batch
        return (shape.num_samples or 0) - (shape.steps - 1) * shape.global_batch

    def _share(self, index: NDArray[np.int64], domain: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take this rank's part. Every rank gets a sample: fewer samples than ranks are dealt more than once."""
        rank, world_size = self.shape.rank, self.shape.world_size
        if len(index) < world_size:
            index, domain = np.resize(index, world_size), np.resize(domain, world_size)
        start, stop = (len(index) * r // world_size for r in (rank, rank + 1))
        return index[start:stop], domain[start:stop]
