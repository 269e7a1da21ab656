"""The emulated device as a Lightning accelerator: `Trainer(accelerator=EmulatedAccelerator(), ...)`."""

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from typing_extensions import override

from tests.emulated.device import DEVICE


class EmulatedAccelerator(Accelerator):
    """One device, "emu:0"."""

    @override
    def setup_device(self, device: torch.device) -> None:
        if device.type != "emu":
            raise ValueError(f"the emulated accelerator was given {device}")

    @override
    def teardown(self) -> None:
        DEVICE.synchronize()

    @override
    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {"live_bytes": DEVICE.live_bytes, "peak_bytes": DEVICE.peak_bytes}

    @staticmethod
    @override
    def parse_devices(devices: Any) -> list[int]:
        return [0]

    @staticmethod
    @override
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("emu", 0)]

    @staticmethod
    @override
    def auto_device_count() -> int:
        return 1

    @staticmethod
    @override
    def is_available() -> bool:
        return True

    @staticmethod
    @override
    def name() -> str:
        return "emu"
