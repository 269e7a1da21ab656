"""The engine's three lanes on the emulated device."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_megatrain.engine.lanes import LANES, Held
from tests.emulated.device import DEVICE
from tests.emulated.queues import Event, Queue
from tests.emulated.tensor import EmulatedTensor, allocate


class EmulatedLane:
    """One queue, with the waits and owners a test has taken away."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Queues the copy; it reads and writes whatever lies at those addresses when it runs.

        Host memory that has been freed by then is read as NaN, and to write it raises, unless a wait or an owner was taken away on purpose.
        """
        if destination.shape != source.shape:
            raise RuntimeError(f"a lane copies tensors of one shape, not {tuple(source.shape)} to {tuple(destination.shape)}")
        to, raw = _raw(destination), _raw(source)
        nbytes = source.numel() * source.element_size()
        if isinstance(destination, EmulatedTensor) and not isinstance(source, EmulatedTensor):
            DEVICE.memory.to_device_bytes += nbytes
        if isinstance(source, EmulatedTensor) and not isinstance(destination, EmulatedTensor):
            DEVICE.memory.to_host_bytes += nbytes
        torch.autograd.graph.increment_version(destination)
        from_host, to_host = raw is not getattr(source, "raw", None), to is not getattr(destination, "raw", None)

        def work() -> None:
            if to_host and _is_freed(to) and DEVICE.without_wait is None and DEVICE.without_owner is None:
                raise RuntimeError(f"the {self.queue.name} lane copies to host memory that has been freed")
            to.copy_(torch.full_like(raw, torch.nan) if from_host and raw.is_floating_point() and _is_freed(raw) else raw)

        self.queue.add(work)

    def record(self) -> Event:
        return self.queue.record()

    def wait(self, event: Event, reason: str) -> None:
        DEVICE.waits_seen.add(reason)
        if reason != DEVICE.without_wait:
            self.queue.wait(event)

    def hold(self, tensors: Iterable[Tensor], reason: str) -> Held:
        DEVICE.owners_seen.add(reason)
        return Held(() if reason == DEVICE.without_owner else tensors)


def _is_freed(raw: Tensor) -> bool:
    """Whether queued work is all that keeps this host memory."""
    return torch._C._storage_Use_Count(raw.untyped_storage()._cdata) == 2  # this view, and the storage object made here


def _raw(tensor: Tensor) -> Tensor:
    return tensor.raw if isinstance(tensor, EmulatedTensor) else tensor.detach()


class EmulatedLanes:
    """Two new queues, and the compute lane that every operator on an emu tensor is queued on."""

    in_host_memory = False

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("emu", 0)
        self.weights = EmulatedLane(DEVICE.scheduler.new_queue("weights"))
        self.compute = EmulatedLane(DEVICE.compute)
        self.gradients = EmulatedLane(DEVICE.scheduler.new_queue("gradients"))

    def allocate(self, nbytes: int) -> Tensor:
        return allocate((nbytes,), (1,), torch.uint8)

    def synchronize(self, event: Event, reason: str) -> None:
        DEVICE.waits_seen.add(reason)
        if reason != DEVICE.without_wait:
            event.synchronize()

    @property
    def waits_seen(self) -> set[str]:
        """Reasons of every wait and synchronization since the test began."""
        return DEVICE.waits_seen

    @property
    def owners_seen(self) -> set[str]:
        """Reasons of every owner since the test began."""
        return DEVICE.owners_seen


LANES["emu"] = EmulatedLanes
