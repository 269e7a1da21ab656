"""Layers that keep their weights on the device: as many as a budget of device memory has room for."""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_megatrain.engine.accounting import Accounting
from lightning_megatrain.engine.host import HostLayer
from lightning_megatrain.engine.options import device_memory_budget
from lightning_megatrain.engine.sizes import size_text

MARGIN = 0.1
"""The share of the device's memory that ``"auto"`` leaves free: for longer batches, and for holes between allocations."""


class DeviceBudget:
    """How much device memory training may use in all, and how much of that its first step left.

    Args:
        option: Bytes, text such as ``"20GiB"``, or ``"auto"`` for what is free after the first step, less a margin.
        device: The device. Its record of the most memory allocated is reset.
        accounting: The engine's own count, for a device that does not tell.

    Raises:
        ValueError: The option is no size, or more than the device has, or ``"auto"`` on a device that does not tell what is free.
    """

    def __init__(self, option: int | str, device: torch.device, accounting: Accounting) -> None:
        self._option, self._device, self._accounting = option, device, accounting
        self._nbytes = device_memory_budget(option)
        self._module: Any = torch.get_device_module(device)
        if not hasattr(self._module, "mem_get_info"):
            if option == "auto":
                raise ValueError(f"device_memory='auto': {device} does not tell how much memory is free. Pass a size, as in '20GiB'.")
        elif self._nbytes is not None and self._nbytes > (total := self._module.mem_get_info(device)[1]):
            raise ValueError(
                f"device_memory={option!r} is more than {device} has ({size_text(total)}). Pass less, or 'auto' for what is free after the "
                "first step."
            )
        if hasattr(self._module, "reset_peak_memory_stats"):
            self._module.reset_peak_memory_stats(device)

    def choose(self, layers: Sequence[HostLayer]) -> tuple[list[HostLayer], str]:
        """Returns the layers to keep, and a line that says so; to be called once, after a complete step."""
        peak = self._peak()
        room = self._free(peak) if self._nbytes is None else self._nbytes - peak
        kept = _spread(layers, room)
        text = f"device_memory={self._option!r}: {len(kept)} of {len(layers)} layers keep their weights on the device"
        if kept:
            text += f", {size_text(sum(layer.nbytes for layer in kept))}. The first step's peak was {size_text(peak)}."
        else:
            text += (
                f": the first step's peak was {size_text(peak)}, which leaves no room for one of {size_text(layers[0].nbytes)}. Raise it, "
                "or make batches smaller."
            )
        return kept, text

    def _peak(self) -> int:
        if hasattr(self._module, "max_memory_allocated"):
            return int(self._module.max_memory_allocated(self._device))
        return sum(self._accounting.peak_bytes.values())

    def _free(self, peak: int) -> int:
        """What is free on the device, and what torch's allocator holds beyond the peak, less the margin."""
        free, total = self._module.mem_get_info(self._device)
        held = getattr(self._module, "memory_reserved", self._module.memory_allocated)(self._device)
        return int(free + held - peak - MARGIN * total)


def _spread(layers: Sequence[HostLayer], room: int) -> list[HostLayer]:
    """As many layers as fit, spread evenly: while kept ones run, the weights of the next one that is not kept have time to come."""
    for number in range(len(layers), 0, -1):
        chosen = [layers[index * len(layers) // number] for index in range(number)]
        if sum(layer.nbytes for layer in chosen) <= room:
            return chosen
    return []
