"""Page-locks host memory where it lies, so that the device can read and write it while everything else goes on."""

import ctypes
import sys
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatrain.engine.cuda import CudaPageLocker

PAGE = 4096
_LARGEST_RANGE = 1 << 30  # bytes: a refusal then costs one range, not all
_MADV_DONTFORK, _MADV_DOFORK = 10, 11


class PageLocker(Protocol):
    """Locks and unlocks whole pages for one kind of device."""

    def lock(self, address: int, nbytes: int) -> bool:
        """Returns whether the system agreed."""

    def unlock(self, address: int) -> None:
        """Unlocks what `lock` locked at `address`."""


PAGE_LOCKERS: dict[str, Callable[[], PageLocker]] = {"cuda": CudaPageLocker}
"""Page lockers by device type; a device type without one works from unlocked memory."""


class LockedMemory:
    """Locks the memory of tensors in place and knows which tensors lie in it.

    Locking works on whole pages, and two tensors may share one; so the page-rounded ranges of all tensors are merged first, and a range is
    never ended inside a tensor. `Tensor.pin_memory()` would copy, and round every size up to a power of two.
    """

    def __init__(self, locker: PageLocker | None) -> None:
        self._locker = locker
        self._ranges: list[tuple[int, int]] = []
        self.wanted_bytes = 0
        self.locked_bytes = 0

    def lock(self, tensors: Iterable[Tensor], progress: Callable[[int], None] = lambda nbytes: None) -> None:
        """Locks `tensors` until the system refuses; `progress` is told the bytes of each range done.

        Cost: about a second for every few gigabytes.
        """
        for start, end in _merged(tensors):
            self.wanted_bytes += end - start
            if (
                self._locker is not None
                and self.locked_bytes == self.wanted_bytes - (end - start)
                and self._locker.lock(start, end - start)
            ):
                self.locked_bytes += end - start
                self._ranges.append((start, end))
                _advise(start, end, _MADV_DONTFORK)
            progress(end - start)

    def holds(self, tensor: Tensor) -> bool:
        """Whether all of `tensor` is locked."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(low <= start and end <= high for low, high in self._ranges)

    def allocate(self, nbytes: int) -> Tensor:
        """Returns `nbytes` of host memory, locked if the system agrees."""
        size = -(-nbytes // PAGE) * PAGE
        buffer = torch.empty(size + PAGE, dtype=torch.uint8)
        start = -(-buffer.data_ptr() // PAGE) * PAGE
        if self._locker is not None and self._locker.lock(start, size):
            self._ranges.append((start, start + size))
            _advise(start, start + size, _MADV_DONTFORK)
        return buffer[start - buffer.data_ptr() :][:nbytes]

    def free(self, buffer: Tensor) -> None:
        """Unlocks what `allocate` returned; nothing queued may still touch it."""
        for start, end in self._ranges:
            if start == buffer.data_ptr() and self._locker is not None:
                self._locker.unlock(start)
                _advise(start, end, _MADV_DOFORK)
        self._ranges = [(start, end) for start, end in self._ranges if start != buffer.data_ptr()]

    def close(self) -> None:
        """Unlocks everything."""
        if self._locker is not None:
            for start, end in self._ranges:
                self._locker.unlock(start)
                _advise(start, end, _MADV_DOFORK)
        self._ranges.clear()
        self.wanted_bytes = self.locked_bytes = 0


def copy_read_only(tensors: Iterable[Tensor]) -> int:
    """Gives tensors that lie in read-only maps (a checkpoint mapped into memory) memory of their own; returns how many bytes."""
    read_only = _read_only_maps()
    copied = 0
    for tensor in tensors:
        address = tensor.data_ptr()
        if any(start <= address < end for start, end in read_only):
            tensor.data = tensor.detach().clone()
            copied += tensor.nbytes
    return copied


def _merged(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    merged: list[tuple[int, int]] = []
    for address, nbytes in sorted(storages.items()):
        start, end = address // PAGE * PAGE, -(-(address + nbytes) // PAGE) * PAGE
        if merged and (start < merged[-1][1] or (start == merged[-1][1] and end - merged[-1][0] <= _LARGEST_RANGE)):
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _read_only_maps() -> list[tuple[int, int]]:
    if not sys.platform.startswith("linux"):
        return []
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, permissions = line.split()[:2]
            if "w" not in permissions:
                low, _, high = addresses.partition("-")
                found.append((int(low, 16), int(high, 16)))
    return found


def _advise(start: int, end: int, advice: int) -> None:
    """Keeps locked pages out of forked children: each DataLoader worker would be given a copy of the model.

    Rounded inwards twice over: the outermost pages may hold other objects of the heap, which a child must see.
    """
    if sys.platform.startswith("linux") and end - start > 2 * PAGE:
        ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(start + PAGE), ctypes.c_size_t(end - start - 2 * PAGE), advice)
