"""The order a plain DataLoader's own sampler gives, able to start again in the middle of an epoch."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader


class SamplerOrder:
    """Batches of indices from a DataLoader's own batch sampler, drawn exactly when the DataLoader would draw them.

    Until a policy acts, a wrapped DataLoader must give what it gave before, down to the random numbers it takes from torch's
    global generator. So nothing is drawn ahead of time. To start again inside an epoch the generator states from its beginning
    are kept, and the batches already delivered are drawn again and compared by checksum.

    Args:
        loader: A DataLoader over a map-style dataset, with the sampler this rank shall use.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._batches: Any = loader.batch_sampler
        self._iterator: Iterator[Any] | None = None
        self._ahead: deque[list[int]] = deque()  # drawn but not delivered
        self._first_ahead = 0  # number in the epoch of `_ahead[0]`
        self._next = 0
        self._start: dict[str, Any] | None = None  # generator states when the epoch began
        self._checksum = 0
        self._ended = False  # asked for a batch behind the last one

    def __len__(self) -> int:
        return len(self._batches)

    def start_epoch(self) -> None:
        """Forget the epoch that was running; the next batch is the first of a new one."""
        self._iterator, self._start, self._ended = None, None, False
        self._ahead.clear()
        self._first_ahead = self._next = self._checksum = 0

    def take(self) -> list[int] | None:
        """Return the next batch of indices of this rank, or None at the end of the epoch."""
        place = self._next - self._first_ahead
        if place == len(self._ahead):
            if self._iterator is None:
                self._start = self._generator_states()
                self._iterator = iter(self._batches)
            batch = next(self._iterator, None)
            if batch is None:
                return None
            self._ahead.append([int(i) for i in batch])
        self._next += 1
        return self._ahead[place]

    def end(self) -> None:
        """Ask for a batch behind the last one, as a DataLoader with workers does: the sampler may draw a number there."""
        if self._iterator is not None and not self._ended:
            next(self._iterator, None)
            self._ended = True

    def position(self) -> int:
        """Return how many batches have been taken in this epoch."""
        return self._next

    def seek(self, position: int) -> None:
        """Go back to a position not before the last one given to :meth:`commit`."""
        self._next = position

    def commit(self, position: int) -> None:
        """Drop what was kept of the batches before ``position``: they have been delivered."""
        while self._first_ahead < position:
            self._checksum = zlib.crc32(repr(self._ahead.popleft()).encode(), self._checksum)
            self._first_ahead += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to take the same batches again after those delivered."""
        return {"start": self._start, "delivered": self._first_ahead, "checksum": self._checksum, "ended": self._ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start in the middle of the epoch that ``state`` was saved in.

        Raises:
            RuntimeError: the sampler gives another order than it gave then.
        """
        self.start_epoch()
        if not state["delivered"]:
            return
        now = self._generator_states()
        self._set_generator_states(state["start"])
        try:
            for _ in range(state["delivered"]):
                self.take()
            self.commit(state["delivered"])
            if state["ended"] and state["delivered"] == len(self):
                self.end()
        finally:
            if self._checksum != state["checksum"]:
                self._set_generator_states(now)
        self._start = state["start"]
        self._set_generator_states({**self._generator_states(), "torch": now["torch"]})
        if self._checksum != state["checksum"]:
            raise RuntimeError(
                f"Cannot resume inside the epoch: the DataLoader's sampler gave another order for the {state['delivered']} batches "
                "already trained on than it gave in the saved run. Give the sampler a `torch.Generator` with a fixed seed, or return a "
                "`DynamicLoader` from `train_dataloader()`."
            )

    def _samplers(self) -> list[Any]:
        return [s for s in (self._batches, getattr(self._batches, "sampler", None)) if s is not None]

    def _generator_states(self) -> dict[str, Any]:
        return {
            "torch": torch.get_rng_state(),
            "own": [g.get_state() if (g := getattr(s, "generator", None)) is not None else None for s in self._samplers()],
            "epoch": [getattr(s, "epoch", None) for s in self._samplers()],
        }

    def _set_generator_states(self, states: dict[str, Any]) -> None:
        torch.set_rng_state(states["torch"])
        for sampler, own, epoch in zip(self._samplers(), states["own"], states["epoch"], strict=True):
            if own is not None:
                sampler.generator.set_state(own)
            if epoch is not None:
                sampler.epoch = epoch
