"""Keeps a module's parameters the same Python objects when it moves to the device and back, as on a GPU, so that tied weights stay tied."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.emulated.tensor import EmulatedTensor

_apply_of_torch = nn.Module._apply


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    here = any(isinstance(parameter, EmulatedTensor) for parameter in self.parameters())
    if not here and not isinstance(fn(torch.empty(0)), EmulatedTensor):
        return _apply_of_torch(self, fn, recurse)
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # what assigns to `.data` for a GPU is impossible for wrappers
    try:
        return _apply_of_torch(self, fn, recurse)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped)


nn.Module._apply = _apply  # type: ignore[method-assign]
