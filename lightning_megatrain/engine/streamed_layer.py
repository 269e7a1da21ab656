"""A streamed layer as one operation on its inputs and its host parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from lightning_megatrain.engine import hugging_face
from lightning_megatrain.engine.accounting import Holding, storages
from lightning_megatrain.engine.autograd import differentiable_once, graph_is_kept, will_accumulate
from lightning_megatrain.engine.buffers import BufferPlace
from lightning_megatrain.engine.calls import Arguments, Results
from lightning_megatrain.engine.casts import CastWatch, casting, may_be_watched
from lightning_megatrain.engine.checksum import checksums
from lightning_megatrain.engine.gradients import has_hooks
from lightning_megatrain.engine.host import HostLayer, Mode, Stamp
from lightning_megatrain.engine.passes import _PASS, Pass, current_pass
from lightning_megatrain.engine.placement import placed
from lightning_megatrain.engine.refusals import (
    node,
    nothing_saved,
    reentrant_checkpoints_named,
    refuse_captured,
    refuse_otherwise_computed,
    refuse_written,
    unwritten,
    written_in_place,
)
from lightning_megatrain.engine.saved_inputs import SavedCall
from lightning_megatrain.engine.surroundings import RandomState, Surroundings, no_cast_cache, random_state

if TYPE_CHECKING:
    from lightning_megatrain.engine.engine import Engine


def run_layer(engine: "Engine", layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a streamed layer: what its `forward` is while the engine is installed."""
    if not torch.is_grad_enabled():
        return _run_without_graph(engine, layer, args, kwargs)
    if torch._C._current_graph_task_id() != -1 and current_pass() is None:
        raise RuntimeError(
            f"Streamed layer {layer.name!r} was called with gradients inside a backward, as activation checkpointing around it does. "
            "Streamed layers are recomputed already, and would run a third time. Take torch.utils.checkpoint off the modules that hold it."
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"Streamed layer {layer.name!r} was called under a torch.func transform (vmap, grad, jvp), which cannot see through it. Call "
            "the model without the transform, or keep the layer on the device with "
            f"resident=[{layer.name!r}]."
        )
    arguments = Arguments(*hugging_face.private_caches(layer.module, layer.name, args, kwargs))
    borrowed = [container[key] for (container, key), *_ in layer.borrowed]
    inputs = [*arguments.tensors, *borrowed]
    if not any(tensor.requires_grad for tensor in (*inputs, *layer.parameters)):
        return _run_without_graph(engine, layer, args, kwargs)
    call = _Call(engine, layer, arguments, len(inputs))
    # a layer that runs within another's forward saves nothing that backward will want
    moves = engine.saved_inputs.moves and current_pass() is None
    with engine.saved_inputs.saving(layer.name, inputs, arguments.number) if moves else nullcontext() as saved:
        call.moved = None if saved is None else ref(saved)
        outputs = _StreamedLayer.apply(call, *inputs, *layer.parameters)
    return call.returned(outputs)


def _run_without_graph(engine: "Engine", layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nothing will be differentiated, so the layer gets the caller's own arguments."""
    with engine.weights(layer, "inference", _mode(engine, layer)) as streamed, no_cast_cache(), _running("forward"):
        weights = list(streamed)
        # kernels of recurrent layers ask whether weights require grad, in inference mode too; copies made in that mode cannot be told to
        if engine.exact or not torch.is_inference_mode_enabled():
            weights = [_leaf(weight, p.requires_grad) for weight, p in zip(streamed, layer.parameters, strict=True)]
        with placed(layer.places, weights), unwritten(layer, weights, by_value=False), _watch_casts(engine, layer, weights):
            output = layer.forward(*args, **kwargs)
    if torch.is_grad_enabled():
        refuse_captured(layer, [t for t in Results(output).tensors if t.requires_grad], (), -1)
    return output


class _Call:
    """One call of a streamed layer in a forward with gradients: what backward must know to run it again."""

    def __init__(self, engine: "Engine", layer: HostLayer, arguments: Arguments, number_of_inputs: int) -> None:
        self.engine, self.layer, self.arguments, self.number_of_inputs = engine, layer, arguments, number_of_inputs
        self.mode = _mode(engine, layer)
        self.collected_keys = hugging_face.collected_keys()
        with hugging_face.collecting(None):  # what is recorded hangs in the graph that will hold this object
            self.surroundings = Surroundings(layer.modules, engine.device)
        self.random: RandomState | None = RandomState(engine.device, layer.generators)
        self.buffers: dict[BufferPlace, Tensor] = {}
        self.stamp: Stamp = ()
        """That of the weights with which the forward ran."""
        self.results: Results | None = None
        self.bits: list[Tensor] | None = None
        """Checksums of what the layer's first forward returned."""
        self.saved: Holding | None = None
        self.moved: ref[SavedCall] | None = None
        """What autograd saved, where saved inputs are moved to the host."""
        self._outstanding = False

    def run(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Results:
        """Runs the module's own forward (its hooks have run outside) and gathers everything that leaves it."""
        tensors, borrowed = inputs[: self.arguments.number], inputs[self.arguments.number :]
        args, kwargs = self.arguments.rebuilt(tensors)
        collected: hugging_face.COLLECTED = {key: [] for key in self.collected_keys}
        with placed([*self.layer.places, *self.layer.borrowed], [*weights, *borrowed]), hugging_face.collecting(collected or None):
            try:
                output = self.layer.forward(*args, **kwargs)
            except RuntimeError as error:
                if "a leaf Variable that requires grad" in str(error):
                    raise RuntimeError(written_in_place(self.layer, "an input tensor")) from error
                raise
        changes = self.arguments.changes(self.layer.name, args, kwargs, tensors)
        return Results((output, changes, collected))

    def run_again(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Results:
        """Runs the layer in backward, from the random state and the buffers that its forward started from."""
        with (
            torch.enable_grad(),
            random_state(self.random),
            self.layer.buffers.restored(self.buffers),
            _running("recompute"),
        ):
            try:
                results = self.run(inputs, weights)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise RuntimeError(
                    f"Streamed layer {self.layer.name!r} failed when backward ran it again, though its forward had not ({error}): "
                    "something that it reads was changed in between. Leave it in place until backward() is done, pass it as an argument, "
                    f"or keep the layer on the device with resident=[{self.layer.name!r}]."
                ) from error
        assert self.results is not None
        self.results.check_same(results, self.layer.name)
        if self.bits is not None:
            refuse_otherwise_computed(self.layer, self.bits, results.tensors, self.engine.exact)
        return results

    def outstanding(self, value: bool) -> None:
        """Says whether a backward of this call may still come."""
        self.layer.outstanding += int(value) - int(self._outstanding)
        self._outstanding = value

    def __del__(self) -> None:
        if getattr(self, "_outstanding", False):  # torch.compile makes objects without calling __init__
            self.outstanding(False)

    def returned(self, outputs: Sequence[Tensor]) -> Any:
        """The layer's output made of `outputs`; what it recorded and what it put into containers goes where it belongs."""
        assert self.results is not None
        output, changes, collected = self.results.rebuilt(outputs)
        self.arguments.apply_changes(changes)
        recorded = hugging_face.outer_collector() or {}
        for key, values in collected.items():
            recorded[key].extend(values)
        return output


class _StreamedLayer(torch.autograd.Function):
    """Forward keeps only the inputs; backward brings the weights in again, runs the layer again, and differentiates it.

    The host parameters are inputs, so that autograd decides what requires grad. Their gradients are accumulated here, where autograd would
    have, and None is returned for them; only those that someone hooked are returned, on the host.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        engine, layer = call.engine, call.layer
        given, parameters = tensors[: call.number_of_inputs], tensors[call.number_of_inputs :]
        inputs = [_leaf(tensor, tensor.requires_grad) for tensor in given]
        versions = [tensor._version for tensor in inputs]
        with (
            engine.weights(layer, "forward", call.mode) as streamed,
            torch.enable_grad(),
            no_cast_cache(),
            _running("forward"),
            layer.buffers.watched(call.buffers),
        ):
            call.stamp = layer.stamp()  # of now, as an update may have waited for this load
            weights = [_leaf(weight, parameter.requires_grad) for weight, parameter in zip(streamed, parameters, strict=True)]
            first = node() if layer.first_forward() else None
            with (
                unwritten(layer, weights, by_value=first is not None),
                _watch_casts(engine, layer, weights),
                saved_tensors_hooks(lambda tensor: None, nothing_saved(layer)),
            ):
                results = call.run(inputs, weights)
        if first is not None:
            refuse_captured(layer, results.tensors, [*inputs, *weights], first._sequence_nr())
        refuse_written(layer, inputs, versions)
        if first is not None or engine.exact:  # reading the answer waits for the device, so only once there
            call.bits = checksums(results.tensors)
        if call.random is not None and call.random.same_as(call.random.now()):
            call.random = None  # nothing was drawn
        call.results = results
        ctx.call, ctx.parameters = call, parameters
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given)
        if call.moved is None:
            call.saved = engine.accounting.hold("saved inputs", call.arguments.tensors)
        call.arguments.forget_tensors()
        call.outstanding(True)
        memory = {storage._cdata for tensor in inputs for storage in storages(tensor)}
        # .data has a version of its own and is no view, so that the caller may write it in place; what shares an input's memory must share
        # its version
        outputs = [t.detach() if any(s._cdata in memory for s in storages(t)) else t.data for t in results.tensors]
        ctx.mark_non_differentiable(*[out for out, made in zip(outputs, results.tensors, strict=True) if not made.requires_grad])
        results.drop_tensors()
        return tuple(outputs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        engine, layer = call.engine, call.layer
        number, parameters = call.number_of_inputs, ctx.parameters
        nodes = [node for node, _ in ctx.next_functions][-len(parameters) :] if parameters else []
        wanted = [node is not None and will_accumulate(node, layer.name) for node in nodes]
        needed = ctx.needs_input_grad[1 : 1 + number]
        if not any(wanted) and not any(needed):
            return (None,) * (1 + number + len(parameters))
        inputs = [_leaf(tensor, needs) for tensor, needs in zip(ctx.saved_tensors, needed, strict=True)]
        if layer.stamp() != call.stamp:
            raise RuntimeError(
                f"A parameter of streamed layer {layer.name!r} was written between its forward and its backward (by an optimizer step, "
                "say). Backward runs the layer again and would use the new weights. Call backward() before the write, or run the forward "
                "again after it."
            )
        moved = None if call.moved is None else call.moved()
        if moved is not None:
            moved.ahead()
        engine.gradients.expect(engine.on_backward_end)
        for accumulator, want, parameter in zip(nodes, wanted, parameters, strict=True):
            if want and not has_hooks(parameter):
                engine.gradients.listen(accumulator, parameter)

        with engine.weights(layer, "backward", call.mode) as streamed:
            weights = [_leaf(weight, want) for weight, want in zip(streamed, wanted, strict=True)]
            results = call.surroundings.run(lambda: call.run_again(inputs, weights))
            # edges, not the outputs themselves: what nobody saved is given back before backward runs
            pairs = [
                (get_gradient_edge(out), grad)
                for out, grad in zip(results.tensors, grad_outputs, strict=True)
                if grad is not None and out.requires_grad
            ]
            del results
            leaves = [leaf for leaf in (*inputs, *weights) if leaf.requires_grad]
            # outside of the forward's surroundings, as plain backward is: autocast would reach into it
            if pairs:
                with reentrant_checkpoints_named(layer):
                    torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs], inputs=leaves)
            del pairs
        more_to_come = layer.outstanding > 1
        if not graph_is_kept():
            call.outstanding(False)
        layer.set_mode(call.mode._replace(decided=True))  # as its weights will be sent for the next call
        arrived = [(parameter, weight.grad) for parameter, weight in zip(parameters, weights, strict=True) if weight.grad is not None]
        engine.gradients.deliver([(p, grad) for p, grad in arrived if not has_hooks(p)], more_to_come)
        returned = {p: grad.to(p.device, dtype=p.grad_dtype) for p, grad in arrived if has_hooks(p)}
        if call.saved is not None:
            call.saved.release()
        if moved is not None:
            moved.used()
        return (None, *[leaf.grad for leaf in inputs], *[returned.get(parameter) for parameter in parameters])


def _mode(engine: "Engine", layer: HostLayer) -> Mode:
    training = layer.module.training
    return Mode(training, casting(engine.device), not layer.casts_undecided(training))


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if requires_grad else leaf


@contextmanager
def _running(name: Pass) -> Iterator[None]:
    token = _PASS.set(name)
    try:
        yield
    finally:
        _PASS.reset(token)


@contextmanager
def _watch_casts(engine: "Engine", layer: HostLayer, weights: Sequence[Tensor]) -> Iterator[None]:
    """In the first forward of each mode under BF16 autocast, sees which weights are only ever cast."""
    training = layer.module.training
    if not (engine.casts_streamed and casting(engine.device) and layer.casts_undecided(training)):
        yield
        return
    if not may_be_watched(layer.modules):
        layer.decide_casts(training, set())
        yield
        return
    fp32 = [index for index, weight in enumerate(weights) if weight.dtype is torch.float32]
    watch = CastWatch([weights[index] for index in fp32])
    with watch:
        yield
    layer.decide_casts(training, {fp32[index] for index in watch.cast_once()})
