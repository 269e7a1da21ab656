"""The emulated device: its queues, its memory, what a test may take away from it, and the module `torch.emu`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from tests.emulated.memory import Counters
from tests.emulated.queues import Scheduler


class EmulatedDevice:
    """The one device "emu" of the process."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.compute = self.scheduler.new_queue("compute")
        self.memory = Counters()
        self.waits_seen: set[str] = set()
        self.owners_seen: set[str] = set()
        self.without_wait: str | None = None
        self.without_owner: str | None = None
        self.total_bytes = 1 << 30

    @property
    def live_bytes(self) -> int:
        """Bytes of device memory held now, as `torch.cuda.memory_allocated` would say without its rounding."""
        self.memory.settle()
        return self.memory.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes held since the last reset."""
        return self.memory.peak_bytes

    @property
    def to_device_bytes(self) -> int:
        return self.memory.to_device_bytes

    @property
    def to_host_bytes(self) -> int:
        return self.memory.to_host_bytes

    def reset_counters(self) -> None:
        """Forgets the peak and the bytes copied; what is held stays counted."""
        self.memory.peak_bytes = self.live_bytes
        self.memory.to_device_bytes = self.memory.to_host_bytes = 0

    def synchronize(self) -> None:
        """Runs everything that is queued on any lane."""
        self.scheduler.run_all()


DEVICE = EmulatedDevice()


@contextmanager
def emulated_device(policy: str = "lazy", without_wait: str | None = None, without_owner: str | None = None) -> Iterator[EmulatedDevice]:
    """Runs a test on a device whose lanes run under `policy`, with one wait or one owner taken away.

    Args:
        policy: see `Scheduler`.
        without_wait: reason of the `Lane.wait` and `Lanes.synchronize` calls that shall do nothing.
        without_owner: reason of the `Lane.hold` calls that shall own nothing.
    """
    DEVICE.synchronize()
    DEVICE.scheduler.queues[:] = [DEVICE.compute]
    DEVICE.scheduler.set_policy(policy)
    DEVICE.without_wait, DEVICE.without_owner = without_wait, without_owner
    DEVICE.waits_seen, DEVICE.owners_seen = set(), set()
    DEVICE.reset_counters()
    try:
        yield DEVICE
        DEVICE.synchronize()
    finally:
        DEVICE.scheduler.forget()
        DEVICE.scheduler.set_policy("lazy")
        DEVICE.scheduler.queues[:] = [DEVICE.compute]
        DEVICE.without_wait = DEVICE.without_owner = None


class _Module(_DummyBackendModule):
    """What `torch.emu` answers. The device draws from the CPU's generator, so that its numbers are the CPU's."""

    def device_count(self) -> int:
        return 1

    def set_device(self, device: object) -> None:
        if torch.device(device).index not in (None, 0):
            raise RuntimeError(f"there is one emulated device, emu:0, not {device}")

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        yield

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: object = "emu") -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = "emu") -> None:
        torch.set_rng_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [torch.get_rng_state()]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """`torch.manual_seed` has already seeded the one generator."""

    def synchronize(self, device: object = None) -> None:
        DEVICE.synchronize()

    def memory_allocated(self, device: object = None) -> int:
        return DEVICE.live_bytes

    def max_memory_allocated(self, device: object = None) -> int:
        return DEVICE.peak_bytes

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return DEVICE.total_bytes - DEVICE.live_bytes, DEVICE.total_bytes

    def reset_peak_memory_stats(self, device: object = None) -> None:
        DEVICE.reset_counters()

    def empty_cache(self) -> None:
        """Nothing is cached."""


_setup_privateuseone_for_python_backend("emu", backend_module=_Module())
