"""Holds the FP32 weights of a module in two halves while it trains: BF16 parameters, and the low halves beside the moments."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatrain.optim.host_adamw import HostAdamW, Masters
from lightning_megatrain.optim.masters import flat, join


class SplitMasters:
    """Turns every FP32 parameter of some optimizers into the upper half of its value, until `join`.

    Args:
        optimizers: They keep the lower halves. Memory stays as it was: 4 bytes of a weight become 2 and 2, one parameter after another.
    """

    def __init__(self, optimizers: Sequence[HostAdamW]) -> None:
        self._masters: list[tuple[HostAdamW, Masters]] = [(optimizer, optimizer.masters) for optimizer in optimizers]
        self._optimizer_of: dict[Tensor, HostAdamW] = {}
        for optimizer in optimizers:
            optimizer.masters = "split"
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.dtype is torch.float32 and parameter.requires_grad:
                    self._split(parameter, optimizer)

    def holds(self, parameter: Tensor) -> bool:
        """Whether the parameter is the upper half of an FP32 value."""
        return parameter in self._optimizer_of

    def read(self, parameter: Tensor, out: Tensor, start: int = 0) -> None:
        """Writes exact values to `out` (one dimension, FP32), from element `start` on in the order of memory."""
        low = self._optimizer_of[parameter].low_half(parameter)
        stop = start + out.numel()
        out.copy_(join(flat(parameter)[start:stop], flat(low)[start:stop]))

    def exact(self, parameter: Tensor) -> Tensor:
        """The FP32 value of a parameter, as a new tensor."""
        return self._optimizer_of[parameter].master(parameter)

    def write(self, parameter: Tensor, value: Tensor) -> None:
        """Sets both halves from an FP32 value of the parameter's shape, on any device."""
        self._optimizer_of[parameter].set_master(parameter, value)

    def put_exact(self, module: nn.Module, state: dict[str, Any]) -> None:
        """Puts FP32 values into the module's state dict; names of one tied parameter share a tensor, as a file then has it once."""
        exact: dict[Tensor, Tensor] = {}
        for name, parameter in self._names(module):
            value = state.get(name)
            if isinstance(value, Tensor) and value.data_ptr() == parameter.data_ptr():  # else a hook of the module's made it
                if parameter not in exact:
                    exact[parameter] = self.exact(parameter)
                state[name] = exact[parameter]

    def take_exact(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Sets both halves from a state dict of FP32 values that the module has loaded."""
        for name, parameter in self._names(module):
            if isinstance(state.get(name), Tensor):
                self.write(parameter, state[name])

    def _names(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, p in module.named_parameters(remove_duplicate=False) if self.holds(p)]

    def join(self) -> None:
        """Makes the parameters FP32 again, with their exact values."""
        for parameter, optimizer in self._optimizer_of.items():
            _set_data(parameter, optimizer.master(parameter))
            del optimizer.state[parameter]["master_low"]
        for optimizer, masters in self._masters:
            optimizer.masters = masters
        self._optimizer_of.clear()

    def _split(self, parameter: Tensor, optimizer: HostAdamW) -> None:
        value = parameter.detach()
        _set_data(parameter, torch.empty_like(value, dtype=torch.bfloat16))
        self._optimizer_of[parameter] = optimizer
        optimizer.set_master(parameter, value)


def _set_data(parameter: Tensor, value: Tensor) -> None:
    """Replaces the parameter's memory by that of another dtype; its gradients stay FP32."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = value
    parameter.grad_dtype = torch.float32
    parameter.grad = gradient if gradient is None else gradient.float()
