"""Streamed sources, read by ordinal: the n-th sample of an iterable dataset."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from torch.utils.data._utils import worker

T = TypeVar("T")


def count_parts(stream: Any, readers: int) -> int:
    """Return in how many parts a stream is read, so that each reader (rank x worker) reads one and no part is larger than another.

    A stream with ``num_shards`` and ``shard(num_shards, index)`` (Hugging Face's) is read in as many parts as divide both its shards
    and the readers: give it a multiple of ranks x workers. Any other is one part, which every reader reads whole.
    """
    shards = getattr(stream, "num_shards", 1) if callable(getattr(stream, "shard", None)) else 1
    return math.gcd(int(shards), readers)


def part_of(stream: Any, part: int, parts: int) -> Any:
    """Return one part of a stream."""
    return stream if parts == 1 else stream.shard(num_shards=parts, index=part)


def shuffled(samples: Iterable[T], buffer: int, seed: Sequence[int]) -> Iterator[T]:
    """Yield the samples, each drawn at random among ``buffer`` (at least 1) that are held in memory; the order is the seed's."""
    random, held = np.random.default_rng(seed), list[T]()
    for sample in samples:
        if len(held) < buffer:
            held.append(sample)
        else:
            place = int(random.integers(buffer))
            drawn, held[place] = held[place], sample
            yield drawn
    random.shuffle(held)
    yield from held


class OrdinalReader:
    """Reads an iterable dataset, or a part of one, by ordinal, over and over when it ends.

    Readers that share a part each read all of it and keep the samples that are their own. A resumed run skips forward to where it was. Keep
    the work inside the stream small, and do the costly part (decoding, tokenising) in ``collate_fn``, which only sees what is kept.

    Args:
        stream: Any iterable that gives the same samples each time it is iterated. If it has ``set_epoch`` it is told the
            number of the pass, so a shuffled Hugging Face stream has another order in each pass.
        shuffle_buffer: Samples to draw from at random, anew in each pass; 0 keeps their order.
        seed: Of the draws.
        keep: How many of the last samples stay in memory, for batches that are planned anew after a decision.
    """

    def __init__(self, stream: Iterable[Any], keep: int, shuffle_buffer: int = 0, seed: Sequence[int] = ()) -> None:
        self._stream, self._shuffle_buffer, self._seed = stream, shuffle_buffer, list(seed)
        self._recent: deque[Any] = deque(maxlen=max(keep, 1))
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # ordinal of the sample that the iterator gives next

    def __getitem__(self, ordinal: int) -> Any:
        if ordinal < self._next - len(self._recent):
            self._iterator, self._next = None, 0  # further back than is kept: read again from the start
            self._recent.clear()
        if self._iterator is None:
            self._iterator = self._read()
        while self._next <= ordinal:
            with _no_worker():
                self._recent.append(next(self._iterator))
            self._next += 1
        return self._recent[len(self._recent) - (self._next - ordinal)]

    def _read(self) -> Iterator[Any]:
        passes = 0
        while True:
            if hasattr(self._stream, "set_epoch"):
                self._stream.set_epoch(passes)
            empty = True
            samples = iter(self._stream)
            for sample in shuffled(samples, self._shuffle_buffer, [*self._seed, passes]) if self._shuffle_buffer else samples:
                empty = False
                yield sample
            if empty:
                raise ValueError(f"The stream {type(self._stream).__name__} gave no sample in pass {passes}.")
            passes += 1


@contextmanager
def _no_worker() -> Iterator[None]:
    """Hide that this is a worker: Hugging Face and other streams would give each worker another part, which ordinals do already."""
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
