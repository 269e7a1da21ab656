"""How much of each domain: shares that sum to one, and whole samples that add up to them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def check_weights(name: str, weights: Mapping[str, float] | None) -> None:
    """Refuse weights of domains that cannot be, as far as that is known without the domains.

    Raises:
        TypeError: ``weights`` is neither a mapping nor None.
        ValueError: a weight is negative or not finite, or all are zero.
    """
    if weights is None:
        return
    if not isinstance(weights, Mapping):
        raise TypeError(f"`{name}` must map each domain to its weight, got a {type(weights).__name__}.")
    values = np.array([float(w) for w in weights.values()], dtype=np.float64)
    if not np.isfinite(values).all() or (values < 0).any() or values.sum() <= 0:
        raise ValueError(f"`{name}` must be finite, non-negative and not all zero, got {dict(weights)}.")


def normalise(proportions: Mapping[str, float], names: Sequence[str]) -> NDArray[np.float64]:
    """Return the shares of ``names`` (in that order) as float64 that sum to one.

    Args:
        proportions: One non-negative weight for every name; they need not sum to one.
        names: The domains, each of which must be a key of ``proportions``.

    Raises:
        ValueError: a domain is missing or unknown, a weight is negative or not finite, or all are zero.
    """
    check_weights("proportions", proportions)
    missing = [n for n in names if n not in proportions]
    unknown = [n for n in proportions if n not in names]
    if missing or unknown:
        raise ValueError(
            f"`proportions` must name every domain once. Missing: {missing}; unknown: {unknown}. The domains are {list(names)}."
        )
    shares = np.array([float(proportions[n]) for n in names], dtype=np.float64)
    return shares / shares.sum()


def check_same_domains(saved: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a checkpoint whose domains are not those of the data, in that order, in which its samples are numbered.

    Raises:
        ValueError: Names both, and the way out.
    """
    if list(saved) != list(names):
        same = sorted(saved) == sorted(names)
        raise ValueError(
            f"The checkpoint was saved with the domains {list(saved)}, the data now has {list(names)}"
            + (", the same in another order. " if same else ". ")
            + ("Name them in the order that they had, " if same else "Use the domains of the checkpoint under the names that they had, ")
            + "or begin a new run from its weights (`load_from_checkpoint`) instead of resuming it."
        )


def largest_remainder(wanted: NDArray[np.float64], total: int, priority: Sequence[int] | None = None) -> NDArray[np.int64]:
    """Apportion ``total`` samples: whole parts first, then one each to the largest remainders.

    Args:
        wanted: (K,) samples each domain is due; they sum to ``total``. A negative one (a domain that is ahead) gets nothing.
        total: How many samples to hand out.
        priority: (K,) rank of each domain where remainders tie (lowest first); default: position. Give something that
            belongs to the domain itself, such as the rank of its name, and the order of the domains does not matter.

    Returns:
        (K,) counts that sum to ``total``.
    """
    rank = np.arange(len(wanted)) if priority is None else np.asarray(priority)
    due = np.maximum(wanted, 0.0)
    counts = np.floor(due + 1e-9).astype(np.int64)  # 2.9999999999 from 0.3 * 10 is 3: far below any real remainder
    while (over := int(counts.sum()) - total) > 0:  # only when a domain is ahead and had to be cut to zero
        remainder = np.where(counts > 0, due - counts, np.inf)
        counts[np.lexsort((rank, np.round(remainder, 9)))[:over]] -= 1
    while (short := total - int(counts.sum())) > 0:
        remainder = np.round(due - counts, 9)
        counts[np.lexsort((rank, -remainder))[:short]] += 1
    return counts


def name_seed(name: str) -> int:
    """Return a number that belongs to ``name`` (the same in every process, unlike ``hash``)."""
    return zlib.crc32(name.encode())


class Mixture:
    """Which domain each sample comes from: exact shares over every window, evenly spread inside it.

    The samples of one window are apportioned by :func:`largest_remainder`; what a domain is still due, or has had too much,
    is carried into the next window, so that a domain with a share of 1e-5 gets its sample in time. Inside the window each
    domain's samples lie at even distances from a seeded start: any part of a window is close to the shares as well.
    Nothing depends on the order in which the domains are named.

    Args:
        names: The domains.
        shares: (K,) float64 that sums to one, from :func:`normalise`.
        window: Samples over which the shares are exact.
        seed: Seeds the places inside a window.
    """

    def __init__(self, names: Sequence[str], shares: NDArray[np.float64], window: int, seed: Sequence[int]) -> None:
        self.shares = shares
        self.window = window
        self._seed = list(seed)
        self._name_seeds = [name_seed(n) for n in names]
        self._priority = np.argsort(np.argsort(np.array(names)))
        self._number = 0
        self._credit = np.zeros(len(names))  # (K,) samples due from earlier windows
        self._order, self._next_credit = self._lay_out()
        self._cursor = 0

    def take(self, n: int) -> NDArray[np.int64]:
        """Return the domain of each of the next ``n`` samples, (n,)."""
        parts = []
        while n > 0:
            if self._cursor == self.window:
                self._number, self._credit, self._cursor = self._number + 1, self._next_credit, 0
                self._order, self._next_credit = self._lay_out()
            part = self._order[self._cursor : self._cursor + n]
            self._cursor += len(part)
            n -= len(part)
            parts.append(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def position(self) -> tuple[int, int, tuple[float, ...]]:
        """Return the window's number, the place inside it and what each domain was due when it began."""
        return self._number, self._cursor, tuple(self._credit.tolist())

    def seek(self, position: tuple[int, int, Sequence[float]]) -> None:
        """Go to a place that :meth:`position` returned."""
        number, cursor, credit = position
        if number != self._number or tuple(credit) != tuple(self._credit.tolist()):
            self._number, self._credit = number, np.array(credit, dtype=np.float64)
            self._order, self._next_credit = self._lay_out()
        self._cursor = cursor

    def _lay_out(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        wanted = self._credit + self.shares * self.window
        counts = largest_remainder(wanted, self.window, self._priority.tolist())
        domains = np.repeat(np.arange(len(counts)), counts)
        starts = [np.random.default_rng([*self._seed, self._number, s]).random() for s in self._name_seeds]
        places = np.concatenate([(np.arange(c) + u) / max(c, 1) for c, u in zip(counts, starts, strict=True)])
        order = np.lexsort((self._priority[domains], places))
        return domains[order].astype(np.int64), wanted - counts
