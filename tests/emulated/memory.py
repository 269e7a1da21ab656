"""Memory of the emulated device: who holds it, how much of it there is, and what becomes of it when it is let go."""

import ctypes
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.emulated.queues import Queue


@cache
def _poison(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 1
    return 0xFF if dtype.is_floating_point or dtype.is_complex or dtype == torch.uint8 else 0x7F


def poison_(memory: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Fills `memory` with what no computation gives: NaN for floating point, an impossible index for integers."""
    ctypes.memset(memory.data_ptr(), _poison(dtype), memory.nbytes())  # twice for each operator: a third of the time of `fill_`


@dataclass
class Counters:
    """Bytes held now, the most held since the last reset, and bytes that crossed the bus."""

    live_bytes: int = 0
    peak_bytes: int = 0
    to_device_bytes: int = 0
    to_host_bytes: int = 0
    _freed: deque[int] = field(default_factory=deque)
    _lock: Any = field(default_factory=threading.Lock)

    def allocated(self, nbytes: int) -> None:
        with self._lock:
            self._settle()
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def freed(self, nbytes: int) -> None:
        """Only appends: destructors call it at any moment, in any thread."""
        self._freed.append(nbytes)

    def settle(self) -> None:
        """Counts what destructors have freed."""
        with self._lock:
            self._settle()

    def _settle(self) -> None:
        while self._freed:
            self.live_bytes -= self._freed.popleft()


class Block:
    """One allocation, shared by every tensor that views it; dies with the last of them.

    Its memory is then free for the lane that allocated it: whatever that lane runs next may overwrite it, which the poison queued here
    stands for. Another lane still reading or writing it needed an owner.
    """

    def __init__(self, raw: Tensor, queue: Queue, counters: Counters) -> None:
        self.memory = raw.untyped_storage()
        self.dtype, self.queue, self.counters = raw.dtype, queue, counters
        self.nbytes = self.memory.nbytes()
        counters.allocated(self.nbytes)

    def __del__(self) -> None:
        memory, dtype = self.memory, self.dtype
        self.counters.freed(self.nbytes)
        self.queue.add_quietly(lambda: poison_(memory, dtype))
