"""A module's buffers, on the device while the engine is installed."""

import torch
from torch import Tensor, nn

from lightning_megatrain.engine.accounting import Accounting


class DeviceBuffers:
    """Moves all buffers to the device, and back into the user's own tensors at the end.

    Buffers are small next to weights, and kernels write them in place, so they stay on the device between steps.
    """

    def __init__(self, root: nn.Module, device: torch.device, compute_dtype: torch.dtype | None, accounting: Accounting) -> None:
        self._moved: list[tuple[nn.Module, str, Tensor]] = []
        copies: dict[int, Tensor] = {}
        for module in root.modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                dtype = compute_dtype if compute_dtype and buffer.is_floating_point() else buffer.dtype
                if buffer.device.type == device.type and dtype == buffer.dtype:
                    continue
                copy = copies.setdefault(id(buffer), buffer.to(device=device, dtype=dtype))
                self._moved.append((module, name, buffer))
                module._buffers[name] = copy
        self._holding = accounting.hold("buffers", copies.values())

    def close(self) -> None:
        """Puts the user's buffers back, with the values that training left in them."""
        for module, name, buffer in self._moved:
            now = module._buffers.get(name)
            if now is None:
                continue
            if now.shape == buffer.shape:
                with torch.no_grad():
                    buffer.copy_(now)
                module._buffers[name] = buffer
            else:
                module._buffers[name] = now.to(device=buffer.device, dtype=buffer.dtype)
        self._moved.clear()
        self._holding.release()
