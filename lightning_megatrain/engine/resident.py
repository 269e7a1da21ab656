"""Resident parameters: differentiable device copies of host parameters, in the module while the model runs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_megatrain.engine.accounting import Accounting, Holding
from lightning_megatrain.engine.autograd import differentiable_once, graph_is_kept, will_accumulate
from lightning_megatrain.engine.checksum import checksum
from lightning_megatrain.engine.gradients import Gradients, has_hooks
from lightning_megatrain.engine.lanes import Event, Lanes
from lightning_megatrain.engine.placement import Place, place, places_of
from lightning_megatrain.engine.sources import OnTheWay, SplitWeights, exact_dtype

_FIRST = 1 << 62
"""Above every number that autograd gives to a node; accumulators have the largest there is."""


class _Bind(torch.autograd.Function):
    """The device copy as a function of the host parameter: its gradient goes to the host."""

    @staticmethod
    def forward(ctx: Any, residents: "Residents", resident: "_Resident", copy: Tensor, parameter: Parameter) -> Tensor:
        ctx.residents, ctx.resident, ctx.parameter = residents, resident, parameter
        resident.outstanding.add(ctx)
        return copy.detach()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        residents: Residents = ctx.residents
        more_to_come = len(ctx.resident.outstanding) > 1
        if not graph_is_kept():
            ctx.resident.outstanding.discard(ctx)
        node = ctx.next_functions[-1][0]
        if not (will_accumulate(node, ctx.resident.name) and ctx.parameter.requires_grad):
            return None, None, None, None
        residents.gradients.expect(residents.on_backward_end)
        if has_hooks(ctx.parameter):
            return None, None, None, gradient.to(ctx.parameter.device, dtype=ctx.parameter.grad_dtype)
        residents.gradients.listen(node, ctx.parameter)
        residents.gradients.deliver([(ctx.parameter, gradient)], more_to_come)
        return None, None, None, None


def _run_when_ready(bound: Tensor) -> None:
    """Lets a copy's gradient go to the host once it is final, as the head's is before any layer's backward has run.

    Of what is ready autograd runs first what was made last, and a copy is made before all that uses it. Copies keep their own order.
    """
    if bound.grad_fn is not None:
        bound.grad_fn._set_sequence_nr(_FIRST + bound.grad_fn._sequence_nr())  # type: ignore[attr-defined]


@dataclass(eq=False)
class _Resident:
    """One resident parameter and its device copy."""

    name: str
    parameter: Parameter
    dtype: torch.dtype
    places: list[Place]
    split: SplitWeights | None
    """Keeps the other half of the parameter's value; None where the parameter is the whole value."""
    copy: Tensor | None = None
    bound: Tensor | None = None
    holding: Holding | None = None
    version: int = 0
    """Of the copy when it was taken."""
    bits: Tensor | None = None
    """Its checksum then: code may write it through `.data`, which no version tells. None where that is known not to happen."""
    stamp: tuple[int, int, bool] | None = None
    outstanding: "WeakSet[Any]" = field(default_factory=WeakSet)
    """Copies, this one and those of earlier calls, whose backward may still come: leaves it when the last has run, or its graph is gone."""

    def now(self) -> tuple[int, int, bool]:
        return self.parameter._version, self.parameter.data_ptr(), self.parameter.requires_grad

    def keep_replacement(self) -> None:
        """Writes to the host what code gave the bound copy by assigning to its `.data`, which the copy itself does not see."""
        if self.bound is not None and self.copy is not None and self.bound.untyped_storage()._cdata != self.copy.untyped_storage()._cdata:
            self.set_host(self.bound)

    def host_value(self) -> Tensor:
        """The value to take a copy of, in the copy's dtype where it has to be made, else as it lies."""
        if self.split is not None and self.dtype is torch.float32:
            return OnTheWay(self.parameter, self.dtype, self.split).whole()
        return self.parameter.detach()

    def set_host(self, value: Tensor) -> None:
        """Writes to the host what code made of the copy."""
        with torch.no_grad():
            if self.split is not None:
                self.split.write(self.parameter, value)
            else:
                self.parameter.copy_(value)


class Residents:
    """The resident parameters of one module.

    On the CPU, in their own dtype, they need nothing: the module uses them where they lie. Otherwise a device copy is taken at the start
    of each step and bound into the module while the step lasts. It is taken again when an optimizer stepped or `requires_grad` was
    switched within the step. What code writes into a copy (a clamp, a codebook) is written back before the next optimizer step.
    """

    def __init__(
        self,
        root: nn.Module,
        parameters: Mapping[str, Parameter],
        lanes: Lanes,
        gradients: Gradients,
        compute_dtype: torch.dtype | None,
        accounting: Accounting,
        on_backward_end: Sequence[Callable[[], None]],
        versions_trusted: Callable[[], bool],
        split: SplitWeights | None = None,
    ) -> None:
        self.gradients, self.on_backward_end = gradients, on_backward_end
        self._versions_trusted = versions_trusted
        self._lanes, self._accounting = lanes, accounting
        places = places_of(root.modules())
        every = [
            _Resident(
                name,
                parameter,
                compute_dtype if compute_dtype and parameter.is_floating_point() else exact_dtype(parameter, split),
                places[parameter],
                split if split is not None and split.holds(parameter) else None,
            )
            for name, parameter in parameters.items()
        ]
        self._residents = [one for one in every if not lanes.in_host_memory or one.dtype != one.parameter.dtype]
        self._of_module = {
            module: found
            for module in root.modules()
            if (found := [one for one in self._residents if any(container is module._parameters for container, _ in one.places)])
        }
        self._bound = False
        self._last_read: Event | None = None

    def bind(self) -> None:
        """Takes the device copies and puts them into the module."""
        self.write_back()
        self._bound = True
        for resident in self._residents:
            self._take(resident)

    def unbind(self) -> None:
        """Puts the host parameters back into the module."""
        self._bound = False
        for resident in self._residents:
            resident.keep_replacement()
        for resident in self._residents:
            for container, key in resident.places:
                with suppress(LookupError):  # code took the parameter out of the module
                    if container[key] is resident.bound:
                        container[key] = resident.parameter
            resident.bound = None

    def check(self, module: nn.Module) -> None:
        """Called in a step before `module` runs: binds again what was unbound, written or switched by `requires_grad` since."""
        if not self._bound:
            self.bind()
        for resident in self._of_module.get(module, ()):
            if resident.stamp != resident.now():
                self._take(resident)

    def write_back(self) -> None:
        """Writes to the host what code wrote into device copies since they were taken."""
        for resident, copy in self._written():
            resident.set_host(copy)
            resident.stamp = resident.now()
            self._note_value(resident, copy)

    def settle(self) -> None:
        """Waits until the copies have read the host's parameters; code we do not know may write them next."""
        if self._last_read is not None:
            self._lanes.synchronize(self._last_read, "resident parameters read")
            self._last_read = None

    def close(self) -> None:
        """Gives up the device copies, after writing back."""
        self.settle()
        self.write_back()
        for resident in self._residents:
            resident.copy = resident.holding = resident.bits = None

    def _written(self) -> list[tuple[_Resident, Tensor]]:
        """The copies that code wrote. Where checksums must tell, the host waits for the device, once for all of them."""
        copies = [(resident, resident.copy, resident.bits) for resident in self._residents if resident.copy is not None]
        written = [(resident, copy) for resident, copy, _ in copies if copy._version != resident.version]
        asked = [(resident, copy, bits) for resident, copy, bits in copies if copy._version == resident.version and bits is not None]
        if asked:
            now, before = torch.stack([checksum(copy) for _, copy, _ in asked]), torch.stack([bits for *_, bits in asked])
            written += [(resident, copy) for (resident, copy, _), other in zip(asked, (now != before).tolist(), strict=True) if other]
        return written

    def _note_value(self, resident: _Resident, copy: Tensor) -> None:
        resident.version, resident.bits = copy._version, None if self._versions_trusted() else checksum(copy)

    def _take(self, resident: _Resident) -> None:
        """A new tensor each time: a graph of an earlier forward may still use the last one."""
        was_bound, resident.bound, resident.copy, resident.holding = resident.bound, None, None, None
        if was_bound is not None:
            place(resident.places, resident.parameter)
            del was_bound
        source = resident.host_value()
        with torch.inference_mode(False):
            copy = torch.empty_like(source, dtype=resident.dtype, device=self._lanes.device)
            if source.dtype == resident.dtype and source.data_ptr() == resident.parameter.data_ptr():
                self._lanes.compute.copy(copy, source)
            else:
                copy.copy_(source.to(resident.dtype))  # memory of this moment, which the host waits for
            resident.copy = copy
            self._note_value(resident, copy)
            with torch.enable_grad():
                resident.bound = _Bind.apply(self, resident, copy, resident.parameter)
                _run_when_ready(resident.bound)
        resident.holding = self._accounting.hold("resident", [copy])
        resident.stamp = resident.now()
        place(resident.places, resident.bound)
        if not self._lanes.in_host_memory:
            self._accounting.bytes_to_device += copy.nbytes
            self._last_read = self._lanes.compute.record()
