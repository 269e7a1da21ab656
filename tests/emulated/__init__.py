"""An accelerator made in Python on the CPU, device "emu": its work runs late, its freed memory is poisoned, its bytes are counted.

A test opens `with emulated_device(policy, without_wait=..., without_owner=...) as device:` and runs on device "emu", or in a Trainer with
`accelerator=EmulatedAccelerator()`. What it promises is in the tests of this folder.
"""

from tests.emulated import autocast, modules, operators, transfers  # noqa: F401  (register their kernels)
from tests.emulated.accelerator import EmulatedAccelerator
from tests.emulated.device import DEVICE, EmulatedDevice, emulated_device
from tests.emulated.lanes import EmulatedLane, EmulatedLanes
from tests.emulated.pinning import PageLocks
from tests.emulated.tensor import EmulatedTensor

__all__ = [
    "DEVICE",
    "EmulatedAccelerator",
    "EmulatedDevice",
    "EmulatedLane",
    "EmulatedLanes",
    "EmulatedTensor",
    "PageLocks",
    "emulated_device",
]
