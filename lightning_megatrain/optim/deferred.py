"""Updates before the next forward: each runs when its weights are next wanted, beside the device's work on those before."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from lightning_megatrain.optim.host_adamw import HostAdamW


class DeferredUpdates:
    """Takes the steps of a HostAdamW and runs each unit's part when it is asked for.

    Hyperparameters and gradients are those of the moment of `step`: `zero_grad()` may let go of the gradients, but nobody may write them.
    No thread is needed: on an accelerator the caller asks for a unit behind device work already queued, and the update runs beside that.

    Args:
        optimizer: The optimizer, whose `step` hands its work over until `close`.
        unit_of: What a parameter is updated with (its streamed layer); None: at once.
    """

    def __init__(self, optimizer: HostAdamW, unit_of: Callable[[Tensor], Hashable | None]) -> None:
        self._optimizer, self._unit_of = optimizer, unit_of
        self._due: dict[Hashable, list[tuple[Tensor, Tensor]]] = {}
        self._groups: list[dict[str, Any]] = []
        self._grad_scale = 1.0
        self._step_at_once = optimizer.take_step
        optimizer.take_step = self._take_step

    @property
    def any_due(self) -> bool:
        """Whether any unit has its update of the last step to come."""
        return bool(self._due)

    def run(self, unit: Hashable) -> None:
        """Updates the unit's parameters if that is due."""
        if unit in self._due:
            params, gradients = zip(*self._due.pop(unit), strict=True)
            self._optimizer.update(params, gradients, grad_scale=self._grad_scale, groups=self._groups)

    def drain(self) -> None:
        """Updates everything that is due."""
        for unit in list(self._due):
            self.run(unit)

    def close(self) -> None:
        """Updates everything that is due and gives `step` back to the optimizer."""
        self.drain()
        self._optimizer.take_step = self._step_at_once

    def _take_step(self, params: list[Tensor], grad_scale: float) -> None:
        self.drain()
        self._grad_scale = grad_scale
        self._groups = [{name: _kept(value) for name, value in group.items() if name != "params"} for group in self._optimizer.param_groups]
        self._optimizer.allocate(params)  # in their order, which is that of the state in a checkpoint
        units: defaultdict[Hashable | None, list[Tensor]] = defaultdict(list)
        for parameter in params:
            units[self._unit_of(parameter)].append(parameter)
        self._optimizer.update(units.pop(None, []), grad_scale=grad_scale, groups=self._groups)
        self._due = {unit: [(p, p.grad) for p in parameters if p.grad is not None] for unit, parameters in units.items()}


def _kept(value: Any) -> Any:
    """A hyperparameter as it is now: schedulers write into tensors."""
    return value.clone() if isinstance(value, Tensor) else value
