"""Which samples come next: endless draws without replacement, that can go back to where they were."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def as_pool(indices: ArrayLike, total: int) -> NDArray[np.int64]:
    """Return positions of samples as (n,) int64.

    Raises:
        TypeError: they are no whole numbers.
        ValueError: there is none, or one is not between 0 and ``total``.
    """
    given = np.asarray(indices)
    if given.size and given.dtype.kind not in "iu":
        hint = " For a mask give `numpy.flatnonzero(mask)`." if given.dtype.kind == "b" else ""
        raise TypeError(f"A pool needs whole numbers, the samples' positions, got {given.dtype}.{hint}")
    pool = given.astype(np.int64).reshape(-1)
    if not len(pool) or pool.min() < 0 or pool.max() >= total:
        raise ValueError(
            f"A pool needs indices between 0 and {total - 1}, got {len(pool)} of them"
            + (f" from {pool.min()} to {pool.max()}." if len(pool) else ".")
        )
    return pool


class Draws:
    """Draws from one pool without replacement; when it is used up, a new permutation begins.

    Args:
        pool: The indices to draw from, or their number ``n`` for ``0 .. n-1``.
        seed: Numbers that seed the permutations, together with the count of passes over the pool.
        shuffle: ``False`` serves the pool in its own order, again and again.
    """

    def __init__(self, pool: NDArray[np.int64] | int, seed: Sequence[int], *, shuffle: bool = True) -> None:
        self.size = pool if isinstance(pool, int) else len(pool)
        if self.size == 0:
            raise ValueError("There is nothing to draw from: the pool is empty.")
        self._pool = None if isinstance(pool, int) else pool
        self._seed = list(seed)
        self._shuffle = shuffle
        self._pass = 0
        self._cursor = 0
        self._order: NDArray[np.int64] | None = None  # of the current pass, made when first needed

    def take(self, n: int) -> NDArray[np.int64]:
        """Return the next ``n`` indices, (n,) int64."""
        parts = []
        while n > 0:
            if self._cursor == self.size:
                self.seek((self._pass + 1, 0))
            part = self._current()[self._cursor : self._cursor + n]
            self._cursor += len(part)
            n -= len(part)
            parts.append(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def position(self) -> tuple[int, int]:
        """Return the number of finished passes and the place in the current one."""
        return self._pass, self._cursor

    def seek(self, position: Sequence[int]) -> None:
        """Go to a place that :meth:`position` returned."""
        if position[0] != self._pass:
            self._order = None
        self._pass, self._cursor = int(position[0]), int(position[1])

    def _current(self) -> NDArray[np.int64]:
        if self._order is None:
            order = np.arange(self.size, dtype=np.int64)
            if self._shuffle:
                order = np.random.default_rng([*self._seed, self._pass]).permutation(order)
            self._order = order if self._pool is None else self._pool[order]
        return self._order


class Ordinals:
    """The endless ordinals of a stream, whose own order cannot be changed; each of its parts counts on its own.

    Of P parts, the k-th sample of part p has the ordinal ``k * P + p``.

    Args:
        parts: How many parts the stream is read in, P.
    """

    def __init__(self, parts: int) -> None:
        self._next = [0] * parts

    @property
    def parts(self) -> int:
        """How many parts the stream is read in."""
        return len(self._next)

    def take(self, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the next ordinals, (n,) int64: of part ``turns[i] % parts`` for sample i."""
        parts = turns % self.parts
        ordinals = np.empty(len(turns), dtype=np.int64)
        for part in np.unique(parts).tolist():
            chosen = parts == part
            count = int(chosen.sum())
            ordinals[chosen] = (self._next[part] + np.arange(count)) * self.parts + part
            self._next[part] += count
        return ordinals

    def position(self) -> tuple[int, ...]:
        """Return the place: what each part has given."""
        return tuple(self._next)

    def seek(self, position: Sequence[int]) -> None:
        """Go to a place that :meth:`position` returned, and read the stream in as many parts as then."""
        self._next = [int(place) for place in position]
