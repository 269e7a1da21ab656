"""From a layer's inputs and the gradients of its outputs to the gradient of each of its parameters for each sample.

Linear layers, embeddings and norms have closed forms over the whole batch. Any other module runs again for one sample at a time: right for
all, slower.

Shapes: B samples, T places per sample, H features.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from transformers.pytorch_utils import Conv1D

from lightning_megatrain.model_ops.per_sample import Explicit, Lookups, OuterProducts, SampleGradients

Gradients = Iterator[tuple[str, SampleGradients]]  # the parameter's name in its module, and its gradients


@dataclass
class Call:
    """One call of a layer: what it was given, and the weights it ran with."""

    layer: nn.Module
    path: str  # the layer's, for messages
    wanted: list[str]  # names, in the layer, of the parameters whose gradients are wanted
    batch_size: int
    inputs: list[Any]  # leaves of (args, kwargs)
    structure: pytree.TreeSpec
    weights: Mapping[str, Tensor]  # parameters and buffers, as they were bound during the call
    autocast: torch.dtype | None  # what autocast rounded to during the call

    @property
    def first_input(self) -> Tensor:
        return next(leaf for leaf in self.inputs if isinstance(leaf, Tensor))


def gradients_of(call: Call, grad_outputs: list[Tensor | None]) -> Gradients:
    """Yields the per-sample gradients of the wanted parameters.

    Args:
        call: the layer's call.
        grad_outputs: of each floating output, the sample axis first; None for one the loss does not depend on.

    Raises:
        NotImplementedError: when the layer's input does not have the samples along its first axis.
    """
    return _kind_of(call)(call, grad_outputs)


def is_closed_form(layer: nn.Module) -> bool:
    """Returns whether the layer uses each parameter exactly once in a call, in a way known here."""
    return type(layer).forward in (nn.Linear.forward, Conv1D.forward, nn.Embedding.forward, nn.LayerNorm.forward, nn.RMSNorm.forward)


def unit_parameters(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters that a call of the layer uses: its own, and those of children that it reads without calling them."""
    yield from layer.named_parameters(recurse=isinstance(layer, nn.MultiheadAttention))


def _kind_of(call: Call) -> Callable[[Call, list[Tensor | None]], Gradients]:
    kinds = {nn.Linear.forward: _linear, Conv1D.forward: _conv1d, nn.LayerNorm.forward: _norm, nn.RMSNorm.forward: _norm}
    layer, forward = call.layer, type(call.layer).forward
    if forward is nn.Embedding.forward and not layer.scale_grad_by_freq:
        return _embedding
    if forward in kinds:
        return kinds[forward]
    elementwise = all(call.weights[name].shape == call.first_input.shape[-1:] for name in call.wanted)
    return _norm_by_autograd if re.search(r"(RMS|Layer)Norm$", type(layer).__name__) and elementwise else _one_sample_at_a_time


def _linear(call: Call, grad_outputs: list[Tensor | None]) -> Gradients:
    """Y = W a + b: sum over t of g a^T, and of g."""
    g_BTR, a_BTC = _by_sample(call, grad_outputs[0]), _by_sample(call, _as_computed(call))
    if "weight" in call.wanted:
        yield "weight", OuterProducts(_all(call), g_BTR, a_BTC)
    if "bias" in call.wanted:
        yield "bias", Explicit(_all(call), g_BTR.sum(1).unsqueeze(-1))


def _conv1d(call: Call, grad_outputs: list[Tensor | None]) -> Gradients:
    """Y = a W + b, as GPT-2 has it."""
    g_BTC, a_BTR = _by_sample(call, grad_outputs[0]), _by_sample(call, _as_computed(call))
    if "weight" in call.wanted:
        yield "weight", OuterProducts(_all(call), a_BTR, g_BTC)
    if "bias" in call.wanted:
        yield "bias", Explicit(_all(call), g_BTC.sum(1).unsqueeze(-1))


def _embedding(call: Call, grad_outputs: list[Tensor | None]) -> Gradients:
    g_BTC, ids = _by_sample(call, grad_outputs[0]), call.first_input
    if ids.dim() == 1 and g_BTC.shape[1] > 1 and call.batch_size > 1:
        ids = ids.unsqueeze(0)  # one row of places for all samples
    ids_BT = ids.expand(call.batch_size, *ids.shape[1:]).reshape(call.batch_size, -1) if call.batch_size > 1 else ids.reshape(1, -1)
    padding: Any = call.layer.padding_idx
    if padding is not None:
        g_BTC = g_BTC * ids_BT.ne(padding).unsqueeze(-1)
    yield "weight", Lookups(_all(call), ids_BT, g_BTC)


def _norm(call: Call, grad_outputs: list[Tensor | None]) -> Gradients:
    """Y = w x^ + b: sum over t of g x^, and of g."""
    layer, x = call.layer, _fp32(call.first_input)
    shape: tuple[int, ...] = tuple(layer.normalized_shape)  # type: ignore[arg-type]
    normalised = F.layer_norm(x, shape, eps=layer.eps) if isinstance(layer, nn.LayerNorm) else F.rms_norm(x, shape, eps=layer.eps)  # type: ignore[arg-type]
    axes = len(shape)
    g_BTH, x_BTH = _by_sample(call, grad_outputs[0], axes), _by_sample(call, normalised, axes)
    if "weight" in call.wanted:
        yield "weight", Explicit(_all(call), _matrix((g_BTH * x_BTH).sum(1), shape))
    if "bias" in call.wanted:
        yield "bias", Explicit(_all(call), _matrix(g_BTH.sum(1), shape))


def _norm_by_autograd(call: Call, grad_outputs: list[Tensor | None]) -> Gradients:
    """A norm of another make: its weights, repeated for each sample, are broadcast against its input, and autograd tells them apart."""
    args, kwargs = pytree.tree_unflatten([_fp32(leaf) for leaf in call.inputs], call.structure)
    x, size = call.first_input, call.batch_size
    grad = _fp32(grad_outputs[0])
    leaves = {
        name: _fp32(call.weights[name]).detach().expand(size, *[1] * (x.dim() - 2), x.shape[-1]).clone().requires_grad_()
        for name in call.wanted
    }
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        output = functional_call(call.layer, {**_fp32_all(call.weights), **leaves}, args, kwargs)
        _by_sample(call, output)
        found = torch.autograd.grad(output, list(leaves.values()), grad)
    for name, g in zip(leaves, found, strict=True):
        yield name, Explicit(_all(call), g.reshape(size, -1, 1))


def _one_sample_at_a_time(call: Call, grad_outputs: list[Tensor | None]) -> Gradients:
    """Any module whose tensors have the samples along their first axis: runs it again in FP32 for each sample and asks autograd."""
    weights, size = _fp32_all(call.weights), call.batch_size
    for sample in range(size):
        args, kwargs = pytree.tree_unflatten([_fp32(_sample(leaf, sample, size)) for leaf in call.inputs], call.structure)
        leaves = {name: weights[name].detach().clone().requires_grad_() for name in call.wanted}
        with torch.enable_grad(), torch.autocast(call.first_input.device.type, enabled=False):
            output = functional_call(call.layer, {**weights, **leaves}, args, kwargs)
            outputs = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
            pairs = [
                (o, _fp32(_sample(g, sample, size)))
                for o, g in zip(outputs, grad_outputs, strict=True)
                if g is not None and o.requires_grad
            ]
            found = (
                torch.autograd.grad([o for o, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True) if pairs else []
            )
        for name, g in zip(leaves, found, strict=bool(pairs)):
            if g is not None:
                yield name, Explicit(slice(sample, sample + 1), _matrix(g.unsqueeze(0), tuple(g.shape)))


def _by_sample(call: Call, t: Tensor | None, axes: int = 1) -> Tensor:
    """Returns (B, T, H) in FP32: the last `axes` axes joined to H, those in between joined to T, one row shared by all samples repeated."""
    if t is None:
        raise ValueError(f"`{call.path}` got no gradient.")
    size, shape = call.batch_size, t.shape
    if size > 1 and (t.dim() <= axes or shape[0] not in (1, size)):
        raise NotImplementedError(
            f"`{call.path}` ({type(call.layer).__name__}) was called with a tensor of shape {tuple(shape)} in a batch of {size} samples, "
            "so the sample of each row "
            "is unknown (a mixture of experts does this). Use batch_size=1, where every row belongs to the one sample, or leave the layer "
            "out with `parameters=`."
        )
    t = _fp32(t).reshape(shape[0] if size > 1 else 1, -1, *shape[t.dim() - axes :]).flatten(2)
    return t.expand(size, -1, -1)


def _as_computed(call: Call) -> Tensor:
    """Returns a linear layer's input as autocast rounded it: autograd, too, multiplies with the rounded one."""
    x = call.first_input
    return x.to(call.autocast) if call.autocast is not None and x.dtype == torch.float32 else x


def _sample(leaf: Any, sample: int, size: int) -> Any:
    return leaf[sample : sample + 1] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size else leaf


def _fp32(t: Any) -> Any:
    """Returns a floating tensor in FP32 or wider, anything else as it is."""
    return t.to(torch.promote_types(t.dtype, torch.float32)) if isinstance(t, Tensor) and t.is_floating_point() else t


def _fp32_all(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _fp32(weight) for name, weight in weights.items()}


def _matrix(gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns (B, R, C): the parameter's first axis by all others, a vector as one column."""
    return gradient.reshape(len(gradient), shape[0] if shape else 1, -1)


def _all(call: Call) -> slice:
    return slice(0, call.batch_size)
