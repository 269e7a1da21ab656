"""Two operations of autograd that change no value: one sees a layer's output gradients, one makes a tensor depend on the root."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatrain.model_ops.layer_gradients import Call

TENSOR = object()  # stands in a call's inputs where a tensor was

Receive = Callable[[Call, list[Tensor | None]], None]


class Tap(torch.autograd.Function):
    """Passes a layer's outputs on and, in backward, its inputs and output gradients to `receive`.

    Copies, since a model may write its layers' outputs in place.
    """

    @staticmethod
    def on(output: Any, root: Tensor, receive: Receive, call: Call, inputs: list[Tensor]) -> Any:
        """Returns `output`, a tensor or any nest of them, tapped."""
        leaves, structure = pytree.tree_flatten(output)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        tapped = Tap.apply(root, receive, call, len(places), *[leaves[i] for i in places], *inputs)
        for place, tensor in zip(places, tapped, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, structure)

    @staticmethod
    def forward(ctx: Any, root: Tensor, receive: Receive, call: Call, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Copies the first `count` tensors, the outputs; the others are the layer's inputs."""
        outputs, inputs = tensors[:count], tensors[count:]
        ctx.save_for_backward(*inputs)  # as autograd saves: activation checkpointing drops and remakes them
        ctx.receive, ctx.call, ctx.shapes = receive, call, [o.shape for o in outputs]
        ctx.set_materialize_grads(False)
        return tuple(_own_row_for_each_sample(o, call).clone() for o in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Reports the gradients and passes them on."""
        inputs = ctx.saved_tensors  # once: activation checkpointing gives them once
        if any(g is not None for g in grads):
            given = iter(inputs)
            ctx.receive(replace(ctx.call, inputs=[next(given) if leaf is TENSOR else leaf for leaf in ctx.call.inputs]), list(grads))
        passed_on = [None if g is None else g.sum_to_size(shape) for g, shape in zip(grads, ctx.shapes, strict=True)]
        return (None, None, None, None, *passed_on, *[None] * len(inputs))


class Join(torch.autograd.Function):
    """Copies a tensor, so that it requires grad because the root does."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, tensor: Tensor) -> Tensor:
        """Copies."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Passes the gradient on."""
        return None, grad


def _own_row_for_each_sample(output: Tensor, call: Call) -> Tensor:
    """Gives each sample its own copy of an output they share (embeddings of positions), so that their gradients arrive apart."""
    if call.batch_size == 1:
        return output
    if output.dim() > 1 and len(output) == 1:
        return output.expand(call.batch_size, *output.shape[1:])
    if isinstance(call.layer, nn.Embedding) and output.dim() == 2 and len(output) != call.batch_size:
        return output.expand(call.batch_size, *output.shape)
    return output
