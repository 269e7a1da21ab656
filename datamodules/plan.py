"""The plan: which samples make up the batches to come, under the decisions in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from lightning_megatrain.datamodules.sampling import Draws, Ordinals
from lightning_megatrain.datamodules.shares import Mixture, name_seed, normalise

_ALL, _POOL, _DOMAIN, _MIXTURE = range(4)  # what a seed is for


class Plan:
    """Samples for the batches to come: a seeded order, that a pool and proportions may govern.

    Without a decision the plan is a permutation of everything for each pass. A pool limits it to some samples, proportions set the
    share of each domain, and both can hold at once: then each domain draws from its part of the pool.

    Args:
        sizes: Samples of each domain; None for a stream, which is served in its own order.
        names: The domains' names, in the order of ``sizes``; ``[""]`` if the data has no domains.
        ids: (N,) domain of each sample, or None when there is one domain.
        seed: Seeds all permutations.
        window: Samples over which proportions are exact.
        shuffle: ``False`` serves samples in their own order.
        ranks: Processes that share what is taken, each a part of like size.
        parts: How many parts each domain is read in, if it is a stream.
    """

    def __init__(
        self,
        sizes: Sequence[int | None],
        names: Sequence[str],
        ids: NDArray[np.int32] | None,
        *,
        seed: int,
        window: int,
        shuffle: bool,
        ranks: int = 1,
        parts: Sequence[int] | None = None,
    ) -> None:
        self.names = list(names)
        self.total = None if any(s is None for s in sizes) else sum(s or 0 for s in sizes)
        self._sizes, self._ids = list(sizes), ids
        self._offsets = np.cumsum([0] + [s or 0 for s in sizes])
        self.seed, self._window, self._shuffle = seed, window, shuffle
        self._ranks, self._parts = ranks, list(parts or [1] * len(sizes))
        self._turn = 0  # batches of single ranks that were taken
        self.pool: NDArray[np.int64] | None = None
        self.ordered = False
        self.proportions: dict[str, float] | None = None
        self.version = 0  # counts the pools
        self._everything = self._draw_everything()
        self._from_pool: Draws | None = None
        self._domains: dict[int, Draws | Ordinals] = {}
        self._mixture: Mixture | None = None
        self._mixture_number = 0

    @property
    def decided(self) -> bool:
        """Whether a pool or proportions are in force."""
        return self.pool is not None or self.proportions is not None

    @property
    def domain_sizes(self) -> list[int | None]:
        """Samples of each domain, None for a stream."""
        return list(self._sizes)

    def domain_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the domain of each of ``indices``, both (n,)."""
        if self._ids is not None:
            return self._ids[indices].astype(np.int64)
        return np.searchsorted(self._offsets, indices, side="right").astype(np.int64) - 1

    def parts(self) -> list[int]:
        """Return how many parts each domain is read in, 1 if it is no stream."""
        return [self._domain(d).parts if size is None else 1 for d, size in enumerate(self._sizes)]  # type: ignore[union-attr]

    def start_pass(self, number: int) -> None:
        """Begin permutation ``number`` of everything."""
        if self._everything is not None:
            self._everything.seek((number, 0))

    def set_pool(self, pool: NDArray[np.int64] | None, ordered: bool) -> None:
        """Limit the plan to ``pool``; None lifts the limit."""
        self.version += 1
        self.pool, self.ordered = pool, ordered and pool is not None
        self._rebuild()

    def set_proportions(self, proportions: Mapping[str, float] | None, number: int) -> None:
        """Set each domain's share; None lifts them. ``number`` counts these decisions and seeds the places."""
        shares = None if proportions is None else normalise(proportions, self.names)
        self.proportions = None if shares is None else dict(zip(self.names, shares.tolist(), strict=True))
        self._mixture_number = number
        self._rebuild_mixture()

    def take(self, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the next ``n`` samples: (n,) indices (a stream's are its ordinals) and (n,) domains."""
        if self._mixture is not None:
            domains, turns = self._mixture.take(n), self._turns(n)
            indices = np.empty(n, dtype=np.int64)
            for d in np.unique(domains):
                chosen, source = domains == d, self._domain(int(d))
                indices[chosen] = source.take(turns[chosen]) if isinstance(source, Ordinals) else source.take(int(chosen.sum()))
            return indices, domains
        draws = self._everything if self._from_pool is None else self._from_pool
        assert draws is not None  # a plan with streams always has proportions
        indices = draws.take(n)
        return indices, self.domain_of(indices)

    def position(self) -> dict[str, Any]:
        """Return where the plan is, in plain numbers."""
        return {
            "everything": self._everything.position() if self._everything else None,
            "pool": self._from_pool.position() if self._from_pool else None,
            "domains": {d: draws.position() for d, draws in self._domains.items()},
            "mixture": self._mixture.position() if self._mixture else None,
            "turn": self._turn,
        }

    def seek(self, position: dict[str, Any]) -> None:
        """Go to a place that :meth:`position` returned under the same decisions."""
        self._turn = position["turn"]
        for draws, place in ((self._everything, position["everything"]), (self._from_pool, position["pool"])):
            if draws is not None and place is not None:
                draws.seek(place)
        for d in list(self._domains):
            if d not in position["domains"]:
                del self._domains[d]  # first drawn from after that place
        for d, place in position["domains"].items():
            self._domain(d).seek(place)
        if self._mixture is not None and position["mixture"] is not None:
            self._mixture.seek(position["mixture"])

    def decisions(self) -> dict[str, Any]:
        """Return the decisions in force, for a checkpoint."""
        return {
            "seed": self.seed,
            "pool": None if self.pool is None else torch.from_numpy(self.pool),
            "ordered": self.ordered,
            "version": self.version,
            "proportions": self.proportions,
            "mixture_number": self._mixture_number,
        }

    def load_decisions(self, state: dict[str, Any]) -> None:
        """Put the decisions of :meth:`decisions` in force, in the order of their seed; :meth:`seek` must follow."""
        if state["seed"] != self.seed:
            self.seed = state["seed"]
            self._everything = self._draw_everything()
        self.pool = None if state["pool"] is None else state["pool"].numpy()
        self.ordered, self.version = state["ordered"], state["version"]
        self._rebuild()
        self.set_proportions(state["proportions"], state["mixture_number"])

    def _draw_everything(self) -> Draws | None:
        return Draws(self.total, [self.seed, _ALL], shuffle=self._shuffle) if self.total else None

    def _rebuild(self) -> None:
        self._domains.clear()
        self._from_pool = None
        if self.pool is not None:
            self._from_pool = Draws(self.pool, [self.seed, _POOL, self.version], shuffle=self._shuffle and not self.ordered)
        self._rebuild_mixture()

    def _rebuild_mixture(self) -> None:
        self._mixture = None
        if self.proportions is None:
            return
        shares = normalise(self.proportions, self.names)
        if self.pool is not None:
            absent = np.bincount(self.domain_of(self.pool), minlength=len(self.names)) == 0
            if (absent & (shares > 0)).any():
                gone = [n for n, a in zip(self.names, absent, strict=True) if a]
                rank_zero_warn(f"The selected samples contain none of the domains {gone}: their shares go to the other domains.")
                shares = np.where(absent, 0.0, shares)
                shares = shares / shares.sum() if shares.sum() else np.where(absent, 0.0, 1.0) / (~absent).sum()
        self._mixture = Mixture(self.names, shares, self._window, [self.seed, _MIXTURE, self._mixture_number])

    def _turns(self, n: int) -> NDArray[np.int64]:
        """Return the number of the batch that each of ``n`` samples goes to, (n,), counting each rank's batch for itself.

        A rank's batches go to its workers in turn. So those of one worker leave the same remainder by ranks x workers, and by any
        divisor of it, which is the part that the worker reads. When the workers begin anew (with an epoch, or after a decision) out of
        turn, they take over each other's parts, and skip what was served of them.
        """
        ends = np.arange(self._ranks + 1) * n // self._ranks
        turns = self._turn + np.repeat(np.arange(self._ranks), np.diff(ends))
        self._turn += self._ranks
        return turns

    def _domain(self, d: int) -> Draws | Ordinals:
        if d not in self._domains:
            seed = [self.seed, _DOMAIN, name_seed(self.names[d]), self.version]
            if self._sizes[d] is None:
                self._domains[d] = Ordinals(self._parts[d])
            else:
                self._domains[d] = Draws(self._members(d), seed, shuffle=self._shuffle and not self.ordered)
        return self._domains[d]

    def _members(self, d: int) -> NDArray[np.int64]:
        if self.pool is not None:
            return self.pool[self.domain_of(self.pool) == d]
        if self._ids is not None:
            return np.flatnonzero(self._ids == d).astype(np.int64)
        return np.arange(self._offsets[d], self._offsets[d + 1], dtype=np.int64)
