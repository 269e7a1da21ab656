"""Host memory that copies from the device fill, used again step after step."""

from collections.abc import Callable

from torch import Tensor

from lightning_megatrain.engine.pinning import LockedMemory


class HostBuffers:
    """Page-locked host memory, used again step after step.

    The smallest that is large enough is taken. Where none is, one that is too small is given up for a new one, so there are never more
    buffers than were in use at once, nor larger ones than were asked for.

    Args:
        memory: Gives the memory, page-locked.
        before_giving_up: Waits until nothing queued touches a free buffer.
    """

    def __init__(self, memory: LockedMemory, before_giving_up: Callable[[], None]) -> None:
        self._memory, self._before_giving_up = memory, before_giving_up
        self._free: list[Tensor] = []
        self.nbytes = 0
        """Bytes of all buffers, in use and free."""
        self.unlocked_bytes = 0
        """Bytes of those that the system refused to page-lock."""

    def take(self, nbytes: int) -> Tensor:
        """Returns a flat uint8 buffer of at least `nbytes`."""
        fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
        if not fitting and self._free:
            self._before_giving_up()
            largest = self._free.pop(max(range(len(self._free)), key=lambda index: self._free[index].nbytes))
            self._count(largest, -1)
            self._memory.free(largest)
        if not fitting:
            made = self._memory.allocate(nbytes)
            self._count(made, 1)
            return made
        smallest = min(fitting, key=lambda buffer: buffer.nbytes)
        return self._free.pop(next(index for index, buffer in enumerate(self._free) if buffer is smallest))

    def _count(self, buffer: Tensor, sign: int) -> None:
        self.nbytes += sign * buffer.nbytes
        self.unlocked_bytes += 0 if self._memory.holds(buffer) else sign * buffer.nbytes

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back."""
        self._free.append(buffer)

    def close(self) -> None:
        """Gives up the free buffers."""
        self._before_giving_up()
        self._free.clear()
