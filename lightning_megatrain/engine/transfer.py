"""Sends host tensors to the device, from locked memory or through a small locked ring."""

from torch import Tensor

from lightning_megatrain.engine.lanes import Event, Lanes
from lightning_megatrain.engine.pinning import LockedMemory
from lightning_megatrain.engine.sources import OnTheWay, in_memory_order

RING_BUFFERS = 4
RING_BUFFER_BYTES = 16 << 20


class HostToDevice:
    """Queues copies on the weights lane.

    A tensor that could not be page-locked goes through a ring of locked buffers, so that the copy still runs beside compute; that costs
    one pass over host memory. So do values that are made on the way. Where not even the ring can be locked, a tensor is copied as it is.
    """

    def __init__(self, lanes: Lanes, memory: LockedMemory) -> None:
        self._lanes, self._memory = lanes, memory
        self._ring: list[tuple[Tensor, Event | None]] = []

    def prepare(self, tensors: list[Tensor]) -> None:
        """Makes the ring if any of `tensors` is not locked."""
        if not self._ring and not all(self._memory.holds(tensor) for tensor in tensors):
            ring = self._new_ring()
            if all(self._memory.holds(buffer) for buffer, _ in ring):
                self._ring = ring

    def _new_ring(self) -> list[tuple[Tensor, Event | None]]:
        return [(self._memory.allocate(RING_BUFFER_BYTES), None) for _ in range(RING_BUFFERS)]

    @property
    def ring_bytes(self) -> int:
        """Host bytes of the ring; 0 when everything is locked, or nothing can be."""
        return sum(buffer.nbytes for buffer, _ in self._ring)

    def send(self, destination: Tensor, source: Tensor | OnTheWay) -> None:
        """Queues `destination.copy_(source)` on the weights lane. `source` must stay as it is until the lane has passed."""
        if isinstance(source, OnTheWay):
            self._ring = self._ring or self._new_ring()
            self._send_through_ring(in_memory_order(destination), source)
        elif not self._ring or self._memory.holds(source) or not source.numel():
            self._lanes.weights.copy(destination, source)
        else:
            self._send_through_ring(in_memory_order(destination), in_memory_order(source))

    def _send_through_ring(self, destination: Tensor, source: Tensor | OnTheWay) -> None:
        step = self._ring[0][0].nbytes // destination.element_size()
        for start in range(0, destination.numel(), step):
            chunk = destination[start : start + step]
            buffer, last_read = self._ring.pop(0)
            if last_read is not None:
                self._lanes.synchronize(last_read, "ring buffer read")
            staged = buffer[: chunk.nbytes].view(chunk.dtype)
            if isinstance(source, OnTheWay):
                source.write(staged, start)
            else:
                staged.copy_(source[start : start + step])
            self._lanes.weights.copy(chunk, staged)
            self._ring.append((buffer, self._lanes.weights.record()))
