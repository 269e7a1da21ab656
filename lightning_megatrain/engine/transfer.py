"""Sends host tensors to the device, from locked memory or through a small locked ring."""

from torch import Tensor

from lightning_megatrain.engine.lanes import Event, Lanes
from lightning_megatrain.engine.pinning import LockedMemory

RING_BUFFERS = 4
RING_BUFFER_BYTES = 16 << 20


class HostToDevice:
    """Queues copies on the weights lane.

    A tensor that could not be page-locked goes through a ring of locked buffers, so that the copy still runs beside compute; that costs
    one pass over host memory. Where not even the ring can be locked, it is copied as it is.
    """

    def __init__(self, lanes: Lanes, memory: LockedMemory) -> None:
        self._lanes, self._memory = lanes, memory
        self._ring: list[tuple[Tensor, Event | None]] = []

    def prepare(self, tensors: list[Tensor]) -> None:
        """Makes the ring if any of `tensors` is not locked."""
        if not self._ring and not all(self._memory.holds(tensor) for tensor in tensors):
            buffers = [self._memory.allocate(RING_BUFFER_BYTES) for _ in range(RING_BUFFERS)]
            if all(self._memory.holds(buffer) for buffer in buffers):
                self._ring = [(buffer, None) for buffer in buffers]

    @property
    def ring_bytes(self) -> int:
        """Host bytes of the ring; 0 when everything is locked, or nothing can be."""
        return sum(buffer.nbytes for buffer, _ in self._ring)

    def send(self, destination: Tensor, source: Tensor) -> None:
        """Queues `destination.copy_(source)` on the weights lane. `source` must stay as it is until the lane has passed."""
        if not self._ring or self._memory.holds(source) or not source.numel():
            self._lanes.weights.copy(destination, source)
            return
        flat_source = source.as_strided((source.numel(),), (1,))
        flat_destination = destination.as_strided((destination.numel(),), (1,))
        step = self._ring[0][0].nbytes // source.element_size()
        for start in range(0, source.numel(), step):
            chunk = flat_source[start : start + step]
            buffer, last_read = self._ring.pop(0)
            if last_read is not None:
                self._lanes.synchronize(last_read, "ring buffer read")
            staged = buffer[: chunk.nbytes].view(source.dtype)
            staged.copy_(chunk)
            self._lanes.weights.copy(flat_destination[start : start + step], staged)
            self._ring.append((buffer, self._lanes.weights.record()))
