"""An accelerator made in Python on the CPU: device "emu", whose work runs late, whose freed memory is poisoned, and whose bytes are counted."""

from tests.emulated import autocast, modules, transfers  # noqa: F401  (register their kernels)
from tests.emulated.accelerator import EmulatedAccelerator
from tests.emulated.device import DEVICE, EmulatedDevice, emulated_device
from tests.emulated.lanes import EmulatedLane, EmulatedLanes
from tests.emulated.pinning import PageLocks
from tests.emulated.tensor import EmulatedTensor

__all__ = ["DEVICE", "EmulatedAccelerator", "EmulatedDevice", "EmulatedLane", "EmulatedLanes", "EmulatedTensor", "PageLocks", "emulated_device"]
