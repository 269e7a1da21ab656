"""The order in which a mixture of fixed proportions takes rows from its domains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler


class ProportionalSampler(Sampler[int]):
    """Row numbers of the domains' concatenation, mixed in fixed proportions.

    Each row comes from the domain that is furthest behind its share. Inside a domain rows come without
    replacement, in a new order each time the domain is used up, also from one epoch to the next. The order depends on
    `seed` and the epoch only.

    Args:
        sizes: Rows of each domain, in the order of their concatenation.
        proportions: Each domain's weight, positive, of any sum.
        seed: Where the orders come from.
        epoch_rows: Rows of an epoch. None: the sum of `sizes`.
    """

    def __init__(self, sizes: Sequence[int], proportions: Sequence[float], seed: int = 0, epoch_rows: int | None = None) -> None:
        self.sizes = list(sizes)
        self.proportions = np.asarray(proportions, dtype=float) / sum(proportions)
        self.seed = seed
        self.epoch_rows = sum(self.sizes) if epoch_rows is None else epoch_rows
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; Lightning calls this before each."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Rows of an epoch."""
        return self.epoch_rows

    def __iter__(self) -> Iterator[int]:
        offsets = np.cumsum([0, *self.sizes[:-1]])
        # Each epoch goes on where the one before stopped, so that no row is left out for long.
        first = self.epoch * self.epoch_rows
        taken = self._taken(first)
        orders: dict[tuple[int, int], np.ndarray] = {}
        for step in range(first, first + self.epoch_rows):
            domain = int(np.argmax(self.proportions * (step + 1) - taken))
            pass_number, place = divmod(int(taken[domain]), self.sizes[domain])
            if (domain, pass_number) not in orders:
                orders.pop((domain, pass_number - 1), None)
                orders[domain, pass_number] = np.random.default_rng([self.seed, domain, pass_number]).permutation(self.sizes[domain])
            taken[domain] += 1
            yield int(offsets[domain] + orders[domain, pass_number][place])

    def _taken(self, rows: int) -> np.ndarray:
        """How often each domain has been taken in the first `rows` rows."""
        taken = np.zeros(len(self.sizes), dtype=np.int64)
        for step in range(rows):
            taken[np.argmax(self.proportions * (step + 1) - taken)] += 1
        return taken
