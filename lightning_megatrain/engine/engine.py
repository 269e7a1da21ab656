"""The engine: takes the place of a module's forwards and streams its layers from host memory."""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from lightning_megatrain.engine.accounting import Accounting
from lightning_megatrain.engine.device_buffers import DeviceBuffers
from lightning_megatrain.engine.forwards import Forwards
from lightning_megatrain.engine.gradients import Gradients
from lightning_megatrain.engine.host import Clock, HostLayer, Mode
from lightning_megatrain.engine.kept_layers import DeviceBudget
from lightning_megatrain.engine.landing import Landed
from lightning_megatrain.engine.lanes import lanes_of
from lightning_megatrain.engine.layers import find_layers
from lightning_megatrain.engine.options import check_module, check_options, refuse_lazy, saved_inputs_budget
from lightning_megatrain.engine.passes import _STREAMED
from lightning_megatrain.engine.pinning import PAGE_LOCKERS, LockedMemory, copy_read_only
from lightning_megatrain.engine.resident import Residents
from lightning_megatrain.engine.saved_inputs import SavedInputs
from lightning_megatrain.engine.sources import SplitWeights
from lightning_megatrain.engine.stream import Phase, Stream, Updates
from lightning_megatrain.engine.streamed_layer import run_layer
from lightning_megatrain.engine.transfer import HostToDevice


class Engine:
    """Trains a module on `device` while its parameters stay in host memory.

    ``with Engine(model, "cuda"):`` is all a plain training loop needs: the optimizer works on the module's own parameters and their
    `.grad`, on the host. Inputs may be on the device or on the host; when the module is called with host tensors only, it answers with
    host tensors. On leaving, the module is as it came.

    ::

        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with Engine(model, "cuda"):
            for batch, target in data:
                loss = loss_function(model(batch), target)
                loss.backward()          # every gradient is on the host when this returns
                optimizer.step()
                optimizer.zero_grad()

    Gradients are plain training's bit for bit where kernels repeat, but for a few sums in another order (``docs/design.md`` lists them). Of
    several calls in one backward, two: a resident parameter that a call uses more than once (tied embeddings) is summed call by call, in
    plain training use by use (the last bits); and within one autocast region plain training casts a weight once for all calls and sums its
    gradients in BF16, which is done in FP32 here (half an ulp of BF16 for each call after the first; none with ``cache_enabled=False``).

    Args:
        module: The module; its parameters must be on the CPU. They keep their identity, and their storage (unless it is a read-only map).
        device: Where to compute. On the CPU nothing is copied, but layers are streamed and recomputed all the same.
        layers: Class names or path patterns of the modules to stream; see `find_layers` for what happens when it is left out.
        resident: Class names or path patterns of modules to keep on the device.
        slots: Device buffers for weights, each of the size of the largest layer. Two let one layer load while another runs.
        staging_buffers: Host buffers for gradients, each of the size of the largest layer's gradients. Two let one be emptied while one
            fills.
        compute_dtype: The dtype in which floating-point parameters reach the device; None for their own. Gradients arrive in that dtype
            and are accumulated in the parameter's.
        stream_casts: Under BF16 autocast, send parameters as BF16 that autocast would only ever cast to BF16: half the bytes, the same
            result. Costs 2 bytes of host memory for each such parameter.
        saved_inputs: Where layers keep their inputs for backward: ``"device"``; ``"host"``, which leaves those of two calls on the device
            whatever the depth; or the bytes that may stay on the device (``20 << 30`` or ``"20GiB"``), beside those of one call on their
            way. The first layers' go to the host. They are brought back one layer ahead of backward, and the numbers are the same. Costs
            host memory for them, and the bus once each way, beside the layers' computation. Without meaning on the CPU.
        device_memory: Device memory that training may use in all, as bytes (``20 << 30`` or ``"20GiB"``) or ``"auto"``, what is free after
            the first optimizer step less a tenth of the device's. As many layers as fit beside that step's peak then keep their weights on
            the device: loaded once a step instead of twice, or, with `trust_versions`, once an optimizer step, and never again when frozen.
            The numbers are the same. None keeps none. Later steps must not need more than the first did. Without meaning on the CPU.
        trust_versions: Weights are only ever written in ways that can be told (optimizers of torch's kind, in-place operations, new
            storage, `weights_changed`), never through `.data`. Copies on the device then outlive steps and backwards.
        tell: Called with what was decided while training, in one line.
        working_copies: Keep what travels in another dtype beside its parameter (2 bytes more for BF16), made once a step. False casts
            at every load, one pass over host memory more.
        split: Knows the parameters that are the upper halves of FP32 weights: these travel with their exact value.
        progress: Called with the bytes of each range of host memory that was page-locked.

    Raises:
        TypeError: An option is of the wrong kind. ValueError: Nothing can be streamed, a parameter is not on the CPU, or an option is out
        of range.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str = "cpu",
        *,
        layers: Sequence[str] | None = None,
        resident: Sequence[str] | None = None,
        slots: int = 2,
        staging_buffers: int = 2,
        compute_dtype: torch.dtype | None = None,
        stream_casts: bool = True,
        saved_inputs: int | str = "device",
        device_memory: int | str | None = None,
        trust_versions: bool = False,
        tell: Callable[[str], None] = lambda text: None,
        working_copies: bool = True,
        split: SplitWeights | None = None,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.device = torch.device(device)
        self.casts_streamed = stream_casts and compute_dtype is None
        self.trust_versions = trust_versions
        """Whether what the host can see tells of every write of a weight; may be set while training."""
        check_options(
            layers=layers,
            resident=resident,
            slots=slots,
            staging_buffers=staging_buffers,
            stream_casts=stream_casts,
            saved_inputs=saved_inputs,
            device_memory=device_memory,
            working_copies=working_copies,
        )
        refuse_lazy(module)
        found = find_layers(module, layers, resident)
        check_module(module, found)
        self.module = module
        self.parameters = dict(module.named_parameters())
        """The host parameters by path; the module itself shows device copies of the resident ones while it runs."""
        self._owned = set(self.parameters.values())
        self._staging_buffers = staging_buffers
        self._clock = Clock()
        self.accounting = Accounting()
        self._lanes = lanes_of(self.device)
        if self._lanes.in_host_memory:
            for option, value, default in (("saved_inputs", saved_inputs, "device"), ("device_memory", device_memory, None)):
                if value != default:
                    warnings.warn(f"{option}={value!r} is without meaning on the CPU, where the host is the device.", stacklevel=2)
        self._device_budget = (
            None if device_memory is None or self._lanes.in_host_memory else DeviceBudget(device_memory, self.device, self.accounting)
        )
        self.exact = self._lanes.in_host_memory
        """Whether kernels repeat bit for bit."""
        locker = PAGE_LOCKERS.get(self.device.type)
        self.memory = LockedMemory(locker() if locker else None)
        if not self._lanes.in_host_memory:
            copy_read_only(module.parameters())
            self.memory.lock(module.parameters(), progress)
        transfer = HostToDevice(self._lanes, self.memory)
        self.transfer = transfer
        if not self._lanes.in_host_memory:
            transfer.prepare(list(module.parameters()))
        resident_parameters = set(found.resident.values())
        self.layers = [
            HostLayer(index, name, layer, layer.forward, resident_parameters, compute_dtype, self.memory.allocate, working_copies, split)
            for index, (name, layer) in enumerate(found.streamed.items())
        ]
        self._layer_of = {layer.module: layer for layer in self.layers}
        self._layers_of_parameter: dict[Parameter, HostLayer] = {
            parameter: layer for layer in self.layers for parameter in layer.parameters
        }
        self.on_backward_end: list[Callable[[], None]] = [self._backward_ended]
        self._stream = Stream(self.layers, self._lanes, transfer, slots, self._clock, self.accounting)
        self.kept_layers = ""
        """What was decided about layers that keep their weights on the device, in one line; empty before."""
        self._stepped, self._tell = False, tell
        self.gradients = Gradients(self._lanes, self._make_staging, self.accounting)
        self.saved_inputs = SavedInputs(self._lanes, self.memory, self.accounting, saved_inputs_budget(saved_inputs))
        self._residents = Residents(
            module,
            found.resident,
            self._lanes,
            self.gradients,
            compute_dtype,
            self.accounting,
            self.on_backward_end,
            lambda: self.trust_versions,
            split,
        )
        self._buffers = DeviceBuffers(module, self.device, compute_dtype, self.accounting)
        self._depth = 0
        self._forwards = Forwards()
        for child in _outside_layers(module, self._layer_of):
            self._forwards.replace(child, self._streamed if child in self._layer_of else self._within_scope)
        _STREAMED.update(self._layer_of)
        self._optimizer_hook = register_optimizer_step_post_hook(self._optimizer_stepped)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step: resident parameters are on the device and in the module while it lasts. Steps within a step are part of it.

        A call of the module is a step by itself. Open one around code that uses parameters outside of any module's forward.
        """
        if self._depth == 0:
            self._begin()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._residents.unbind()
                self._settle()

    @contextmanager
    def weights(self, layer: HostLayer, phase: Phase, mode: Mode) -> Iterator[Sequence[Tensor]]:
        """The layer's weights on the device, for as long as work that reads them is being queued."""
        layer.set_mode(mode)
        weights = self._stream.acquire(layer, phase)
        try:
            yield weights
        finally:
            self._stream.release(layer)

    def weights_changed(self) -> None:
        """Says that host weights may have been written in a way that autograd does not see."""
        self._clock.tick()

    def layer_of(self, parameter: Tensor) -> HostLayer | None:
        """The streamed layer that a parameter belongs to; None for a resident one."""
        return self._layers_of_parameter.get(cast(Parameter, parameter))

    def update_before_load(self, updates: Updates | None) -> None:
        """Lets `updates` write a layer's weights just before they are next sent, beside the device's work on the layers before it.

        Nobody but the engine may read those weights, nor write their gradients, until the update has run. None: no more.
        """
        self._stream.updates = updates

    def update_in_backward(self, update: Callable[[Landed], None] | None) -> None:
        """Gives the gradients of streamed layers to `update` as they land, in the place of `.grad`; they are gone when it returns.

        It may write the layer's weights. Gradients of resident parameters go to `.grad`. None: no more.
        """

        def use_at_once(gradients: Landed) -> Landed:
            streamed = [pair for pair in gradients if pair[0] in self._layers_of_parameter]
            if streamed and update is not None:
                update(streamed)  # a load still under way was a wrong guess: it carries the stamp of before, and is never used
            return [pair for pair in gradients if pair[0] not in self._layers_of_parameter]

        self.gradients.landing.use_at_once = None if update is None else use_at_once

    def close(self) -> None:
        """Puts the module back as it came and gives up all memory. May be called twice."""
        if not self._forwards:
            return
        self._optimizer_hook.remove()
        self._forwards.put_back()
        for layer in self._layer_of:
            _STREAMED.discard(layer)
        self._layer_of.clear()
        self._residents.unbind()
        if torch._C._current_graph_task_id() == -1:
            self.gradients.abandon()
        self._stream.close()
        self.saved_inputs.close()
        self._residents.close()
        self._buffers.close()
        self.memory.close()

    def _begin(self) -> None:
        if torch._C._current_graph_task_id() == -1:  # not inside a backward: what is left over is of a step that failed
            self.gradients.abandon()
            self._stream.abandon()
            self.saved_inputs.collect()
            if self._stepped and self._device_budget is not None and torch.is_grad_enabled():
                self._keep_layers(self._device_budget)
        self._may_have_been_written()
        self._residents.bind()
        self._stream.begin(torch.is_grad_enabled())

    def _settle(self) -> None:
        self._stream.settle()
        self._residents.settle()

    def _backward_ended(self) -> None:
        self._settle()
        self._residents.write_back()
        self._residents.unbind()
        self._may_have_been_written()

    def _may_have_been_written(self) -> None:
        """Code we do not know has run, or will before we are asked again."""
        if not self.trust_versions:
            self._clock.tick()

    def _keep_layers(self, budget: DeviceBudget) -> None:
        """Once, at the first step after an optimizer's: all that a step needs has been on the device by then."""
        self._device_budget = None
        kept, self.kept_layers = budget.choose(self.layers)
        self._stream.keep(kept)
        self._tell(self.kept_layers)

    def _optimizer_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]} & self._owned
        if not stepped:
            return
        for layer in {id(layer): layer for p in stepped if (layer := self._layers_of_parameter.get(p)) is not None}.values():
            layer.updates += 1
        self._stepped = True
        self._may_have_been_written()
        self._residents.unbind()

    def _make_staging(self) -> list[Tensor]:
        nbytes = max(*(layer.gradient_bytes for layer in self.layers), 1 << 20)
        return [self.memory.allocate(nbytes) for _ in range(self._staging_buffers)]

    def _streamed(self, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self._layer_of.get(module)
        if layer is None:
            return plain(module, *args, **kwargs)
        if replaced := layer.replaced():
            on_host = [name for name, p in module.named_parameters() if p.device.type == "cpu"]
            if on_host and not self._lanes.in_host_memory:
                raise RuntimeError(
                    f"Streamed layer {layer.name!r} no longer holds the parameters it had when training began ({', '.join(replaced)} was "
                    "replaced, as pruning and re-parametrizing do). Change the module before training, or train with "
                    "Trainer(strategy='auto')."
                )
            return plain(module, *args, **kwargs)
        return self._within(module, lambda *args, **kwargs: run_layer(self, layer, args, kwargs), args, kwargs)

    def _within_scope(self, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module not in self._forwards:
            return plain(module, *args, **kwargs)
        return self._within(module, functools.partial(plain, module), args, kwargs)

    def _within(self, module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `function` in a step. The outermost call may be given host tensors, and then answers with host tensors."""
        if self._depth:
            self._residents.check(module)
            return function(*args, **kwargs)
        if self._lanes.in_host_memory:
            with self.step():
                return function(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        from_host = bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors)
        if from_host:
            args, kwargs = _moved((args, kwargs), self.device)
        with self.step():
            output = function(*args, **kwargs)
        return _moved(output, torch.device("cpu")) if from_host else output


def _moved(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def _outside_layers(root: nn.Module, layers: dict[nn.Module, HostLayer]) -> list[nn.Module]:
    """The streamed layers, and the modules around them that run and have parameters or hold such that have."""
    inner = {child for layer in layers for child in layer.modules() if child is not layer}
    return [module for module in root.modules() if module not in inner and _runs(module) and next(module.parameters(), None) is not None]


def _runs(module: nn.Module) -> bool:
    """Whether the module has a forward; a `ModuleList` has none."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward
