"""Lanes: ordered queues of work on one device.

The engine uses three lanes: *weights* copies host to device, *compute* is where autograd runs, *gradients* copies device to host. Work
queued on one lane runs in order; between lanes nothing is ordered except by an event that one lane records and another waits for. The
engine states the reason of every wait and of every owner, so that tests can take each away and see a number go wrong.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a lane's queue."""

    def synchronize(self) -> None:
        """Blocks the calling host thread until the lane has passed this point."""


class Held:
    """Owns tensors that work still queued on a lane will touch, until `release` is called."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)

    def release(self) -> None:
        self._tensors.clear()


class Lane(Protocol):
    """One ordered queue of device work."""

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Queues `destination.copy_(source)`; both must stay as they are until an event recorded afterwards has passed."""

    def record(self) -> Event:
        """Returns an event that passes when everything queued on this lane so far is done."""

    def wait(self, event: Event, reason: str) -> None:
        """Lets nothing queued later on this lane run before `event` has passed; the host does not wait."""

    def hold(self, tensors: Iterable[Tensor], reason: str) -> Held:
        """Owns `tensors` for queued work; without an owner the allocator may hand their memory out while that work still runs."""


class Lanes(Protocol):
    """The three lanes of one device, and the memory they copy between."""

    @property
    def device(self) -> torch.device:
        """The device."""

    @property
    def in_host_memory(self) -> bool:
        """Whether the device is the host: tensors are used where they lie and nothing is copied."""

    @property
    def weights(self) -> Lane:
        """Host to device."""

    @property
    def compute(self) -> Lane:
        """Where autograd runs."""

    @property
    def gradients(self) -> Lane:
        """Device to host."""

    def allocate(self, nbytes: int) -> Tensor:
        """Returns `nbytes` of device memory as a flat uint8 tensor."""

    def synchronize(self, event: Event, reason: str) -> None:
        """Blocks the host until `event` has passed."""


class _NoEvent:
    def synchronize(self) -> None:
        """Work on the host is done when the call that asked for it returns."""


class _HostLane:
    def copy(self, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source)

    def record(self) -> Event:
        return _NO_EVENT

    def wait(self, event: Event, reason: str) -> None:
        """Nothing runs later than it was called."""

    def hold(self, tensors: Iterable[Tensor], reason: str) -> Held:
        return Held(())


_NO_EVENT = _NoEvent()


class HostLanes:
    """Lanes of the CPU: every call has finished when it returns."""

    in_host_memory = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.weights = self.compute = self.gradients = _HostLane()

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def synchronize(self, event: Event, reason: str) -> None:
        event.synchronize()


class _StreamLane:
    """A lane on a stream of its own, or on whichever stream is current in the calling thread."""

    def __init__(self, device: torch.device, stream: torch.Stream | None) -> None:
        self._device, self._stream = device, stream

    def _current(self) -> torch.Stream:
        return self._stream or torch.accelerator.current_stream(self._device)

    def copy(self, destination: Tensor, source: Tensor) -> None:
        context: Any = self._stream or nullcontext()
        with context, torch.no_grad():
            destination.copy_(source, non_blocking=True)

    def record(self) -> Event:
        return self._current().record_event()

    def wait(self, event: Event, reason: str) -> None:
        self._current().wait_event(cast(torch.Event, event))

    def hold(self, tensors: Iterable[Tensor], reason: str) -> Held:
        return Held(tensors)


class AcceleratorLanes:
    """Lanes of an accelerator: two side streams, and the stream autograd computes on."""

    in_host_memory = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.weights = _StreamLane(device, torch.Stream(device=device))
        self.gradients = _StreamLane(device, torch.Stream(device=device))
        self.compute = _StreamLane(device, None)

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def synchronize(self, event: Event, reason: str) -> None:
        event.synchronize()


LANES: dict[str, Callable[[torch.device], Lanes]] = {"cpu": HostLanes}
"""Lanes by device type; any other type gets `AcceleratorLanes`. Tests add an emulated device here."""


def lanes_of(device: torch.device) -> Lanes:
    """Returns the lanes of `device`."""
    return LANES.get(device.type, AcceleratorLanes)(device)
