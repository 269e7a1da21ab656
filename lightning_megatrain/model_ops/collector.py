"""Collects the features of one batch while backward passes through the layers.

Taps on the outputs of layers see each layer's output gradients as backward reaches it; they are projected at once and let go. No parameter
gradient is computed: backward runs to a root that every tap is joined to, and to nothing else, so `.grad` is not touched under any
strategy.

Shapes: B samples, K features.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatrain.engine.passes import current_pass, is_streamed
from lightning_megatrain.model_ops.layer_gradients import Call, gradients_of, is_closed_form, unit_parameters
from lightning_megatrain.model_ops.per_sample import SampleGradients, Zeros, summed
from lightning_megatrain.model_ops.preconditioning import AdamMoments
from lightning_megatrain.model_ops.projection import Projection
from lightning_megatrain.model_ops.taps import TENSOR, Join, Tap
from lightning_megatrain.model_ops.weight_reads import WeightReads

LayerNames = tuple[str, dict[str, str]]  # a layer's path, and for its parameters' names in it their names in the whole module


class Collector:
    """The features of one batch, in the making."""

    def __init__(
        self,
        layers: dict[nn.Module, LayerNames],
        selected: dict[str, nn.Parameter],
        adam: dict[str, AdamMoments],
        projection: Projection,
        batch_size: int,
        device: torch.device,
    ) -> None:
        self.selected, self.adam, self.projection, self.batch_size = selected, adam, projection, batch_size
        dtype = torch.promote_types(next(iter(selected.values())).dtype, torch.float32)
        self.features_BK = torch.zeros(batch_size, projection.width, dtype=dtype, device=device)
        self.root = torch.zeros((), device=device, requires_grad=True)
        self.layers = layers
        self.uses: Counter[str] = Counter()  # of each parameter in forward
        self.reports: Counter[str] = Counter()  # of each parameter's uses in backward
        self.waiting: defaultdict[str, list[SampleGradients]] = defaultdict(list)  # Adam is not linear: it needs the sum over all uses
        self.done = {name: torch.zeros(batch_size, dtype=torch.bool) for name in selected}
        self.awaited: dict[nn.Module, str] = {}  # layers that have run for their output only
        self.in_backward = self.replaying = False
        self.doubtful: set[nn.Module] = set()  # layers that ran on so few axes that their rows may be others than the samples
        self.reads = WeightReads({})

    @contextmanager
    def attached(self, module: nn.Module) -> Iterator[None]:
        """Runs its body with taps on the layers."""
        handles = [layer.register_forward_hook(self._on_call, with_kwargs=True, prepend=True) for layer in self.layers]
        streamed = [m for m in module.modules() if is_streamed(m) and any(child in self.layers for child in m.modules())]
        handles += [layer.register_forward_pre_hook(self._before_streamed, with_kwargs=True) for layer in streamed]
        self.reads = WeightReads({layer: self._weights_in(layer) for layer in streamed})
        try:
            with self.reads if streamed else nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Sees nothing of what runs in its body."""
        self.replaying = True
        self.reads.enter(None)
        try:
            yield
        finally:
            self.replaying = False

    def collect(self, losses_B: Tensor) -> Tensor:
        """Returns the features (B, K) of the gradients of `losses_B`, which a forward with this collector attached gave.

        Raises:
            ValueError: when there is not one loss per sample.
            NotImplementedError: when a parameter was used where no tap sees it.
            RuntimeError: when a streamed layer was not run again in backward.
        """
        if losses_B.shape != (self.batch_size,):
            raise ValueError(f"The losses have shape {tuple(losses_B.shape)} for a batch of {self.batch_size}; give one per sample.")
        self._refuse_unseen(losses_B)
        self.in_backward = True
        torch.autograd.backward(losses_B.sum(), inputs=[self.root])
        if self.awaited:
            raise RuntimeError(
                f"{len(self.awaited)} layers, `{next(iter(self.awaited.values()))}` among them, ran for their output, but backward never "
                "ran them again, so their "
                "gradients are unknown. Does the loss depend on them? If not, leave them out with `parameters=`."
            )
        with torch.no_grad():
            for name in list(self.waiting):  # one of its uses had no part in the loss and never reported
                self._add(name, summed(self.waiting.pop(name), self.batch_size))
            for name in self.adam:  # where the gradient is zero Adam's step is not
                for sample in (~self.done[name]).nonzero().flatten().tolist():
                    self._add(name, Zeros(slice(sample, sample + 1), self.features_BK))
        return self.features_BK

    def _weights_in(self, streamed: nn.Module) -> dict[str, tuple[nn.Module, str]]:
        """Returns where the weights that a call of their own layer reads exactly once are, by their names."""
        inside = [child for child in streamed.modules() if child in self.layers and is_closed_form(child)]
        return {name: (child, local) for child in inside for local, name in self.layers[child][1].items()}

    def _before_streamed(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Autograd enters a streamed layer through its inputs or its parameters; as no parameter takes part, an input must."""
        if not self.replaying:
            self.reads.enter(layer)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        place = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
        if place is None or self.replaying or not torch.is_grad_enabled():
            return None
        leaves[place] = Join.apply(self.root, leaves[place])
        return pytree.tree_unflatten(leaves, structure)

    def _on_call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self.replaying:
            return None
        path, names = self.layers[layer]
        if not self.in_backward:
            self._refuse_other_device(path, output)
            self.uses.update(names.values())
            if self.batch_size > 1 and rows_in_doubt(layer, args, kwargs) == self.batch_size:
                self.doubtful.add(layer)
        if current_pass() == "forward":
            self.awaited[layer] = path
            return None
        self.awaited.pop(layer, None)
        if not torch.is_grad_enabled():
            return None
        inputs, structure = pytree.tree_flatten((args, kwargs))
        # A layer without closed form runs again in backward, with the weights it has now.
        weights = {} if is_closed_form(layer) else {n: t.detach() for n, t in (*layer.named_parameters(), *layer.named_buffers())}
        marked = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in inputs]
        device = self.features_BK.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        call = Call(layer, path, list(names), self.batch_size, marked, structure, weights, autocast)
        return Tap.on(output, self.root, self.receive, call, [leaf for leaf in inputs if isinstance(leaf, Tensor)])

    def _refuse_other_device(self, path: str, output: Any) -> None:
        other = {leaf.device for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)} - {self.features_BK.device}
        if other:
            raise NotImplementedError(
                f"`{path}` computes on {other.pop()}, but the module's parameters are on {self.features_BK.device}. What an engine streams "
                "to an accelerator has gradient features inside a Trainer with strategy='megatrain'."
            )

    def receive(self, call: Call, grad_outputs: list[Tensor | None]) -> None:
        """Takes the output gradients of one call of a layer."""
        names = self.layers[call.layer][1]
        self.replaying = True
        try:
            with torch.no_grad(), torch.autocast(self.features_BK.device.type, enabled=False):
                for local, gradients in gradients_of(call, grad_outputs):
                    if self.adam and self.uses[names[local]] > 1:
                        self.waiting[names[local]].append(gradients)
                    else:
                        self._add(names[local], gradients)
                self.reports.update(names.values())
                for name in names.values():
                    if name in self.waiting and self.reports[name] == self.uses[name]:
                        self._add(name, summed(self.waiting.pop(name), self.batch_size))
        finally:
            self.replaying = False

    def _add(self, name: str, gradients: SampleGradients) -> None:
        shape = self.selected[name].shape
        self.projection.add(self.features_BK, name, (shape[0], shape[1:].numel()) if shape else (1, 1), gradients, self.adam.get(name))
        self.done[name][gradients.samples] = True

    def _refuse_unseen(self, losses_B: Tensor) -> None:
        """Finds parameters in the graph that no layer's call accounts for: their gradients would be silently wrong."""
        edges = _edges_to_leaves(losses_B)
        closed = {name for layer, (_, names) in self.layers.items() for name in names.values() if is_closed_form(layer)}
        for name, parameter in self.selected.items():
            used = max(edges[id(parameter)], self.reads.counts[name])
            if used > 0 and (self.uses[name] == 0 or (name in closed and used > self.uses[name])):
                raise NotImplementedError(
                    f"`{name}` is used outside a call of the module that owns it (as `F.linear(x, module.weight)` does, or a compiled "
                    "model), so its gradient for each "
                    "sample is not seen. Call the module instead, or leave the parameter out with `parameters=`."
                )


def rows_in_doubt(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Returns the rows of a layer's first input if these may be others than the samples.

    So it is for indices (P,) into an embedding and for vectors (P, H): of places that are the same for all samples, or tokens routed to
    an expert. With more axes, as language models have, the first is the samples' (None).
    """
    first = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    axes = 1 if isinstance(layer, nn.Embedding) else 2
    return len(first) if first is not None and first.dim() == axes else None


def layers_of(module: nn.Module, selected: dict[str, nn.Parameter]) -> dict[nn.Module, LayerNames]:
    """Returns each layer that uses selected parameters, with its names.

    Raises:
        NotImplementedError: for a parameter that lies loose around streamed layers, or modules that run over slices of tokens.
    """
    if any(hasattr(layer, "token_slice") for layer in module.modules()):
        raise NotImplementedError(
            "MLPs and norms run over slices of tokens (`token_slice`), where the gradients of single samples are not seen. Set "
            "token_slice=None for this operation."
        )
    names = {id(p): name for name, p in selected.items()}
    layers: dict[nn.Module, LayerNames] = {}
    inside: set[nn.Module] = set()  # of a layer that reads its children's parameters
    for path, layer in module.named_modules():
        own = {} if layer in inside else {local: names[id(p)] for local, p in unit_parameters(layer) if id(p) in names}
        if isinstance(layer, nn.MultiheadAttention):
            inside.update(layer.children())
        if not own:
            continue
        if not is_closed_form(layer) and any(is_streamed(m) for m in layer.modules() if m is not layer):
            raise NotImplementedError(
                f"`{next(iter(own.values()))}` belongs to `{path}` ({type(layer).__name__}), which holds streamed layers, and its "
                "gradient for each sample would need all "
                "of them again for every sample. Leave it out with `parameters=`."
            )
        layers[layer] = (path, own)
    return layers


def _edges_to_leaves(losses_B: Tensor) -> Counter[int]:
    """Returns how often each leaf tensor, by id, is used in the graph of `losses_B`."""
    edges: Counter[int] = Counter()
    seen, stack = set(), [losses_B.grad_fn]
    while stack:
        node = stack.pop()
        for following, _ in node.next_functions if node is not None else ():
            if following is None:
                continue
            if hasattr(following, "variable"):
                edges[id(following.variable)] += 1
            elif following not in seen:
                seen.add(following)
                stack.append(following)
    return edges
