"""Streamed sources, read by ordinal: the n-th sample of an iterable dataset."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data._utils import worker


class OrdinalReader:
    """Reads an iterable dataset by ordinal, over and over when it ends.

    Every worker and every rank reads the whole stream and keeps the samples that are its own. So the order does not depend
    on the number of workers or ranks, and a resumed run skips forward to where it was. Keep the work inside the stream
    small, and do the costly part (decoding, tokenising) in ``collate_fn``, which only sees the samples that are kept.

    Args:
        stream: Any iterable that gives the same samples each time it is iterated. If it has ``set_epoch`` it is told the
            number of the pass, so a shuffled Hugging Face stream has another order in each pass.
        keep: How many of the last samples stay in memory, for batches that are planned anew after a decision.
    """

    def __init__(self, stream: Iterable[Any], keep: int) -> None:
        self._stream = stream
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
            for sample in self._stream:
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
