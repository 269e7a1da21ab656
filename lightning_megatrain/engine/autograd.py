"""Questions to the autograd engine."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import Node


def will_accumulate(node: Node, name: str) -> bool:
    """Whether the backward now running would accumulate into the leaf of `node`.

    Raises:
        RuntimeError: The backward is `torch.autograd.grad` with respect to that leaf.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:
        if "autograd.grad" not in str(error):
            raise
        raise RuntimeError(
            f"torch.autograd.grad() was asked for the gradient of {name!r}, whose weights are streamed from host memory: its gradient goes "
            "straight to .grad and cannot be returned. Call loss.backward() (or backward(inputs=[...])) and read .grad instead."
        ) from None


def graph_is_kept() -> bool:
    """Whether the backward now running leaves its graph for another one (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a backward run without recording, and refuses to be differentiated itself.

    `torch.autograd.function.once_differentiable` refuses only when an incoming gradient requires grad; a gradient penalty on a sum would
    be dropped without a word.

    Raises:
        RuntimeError: The backward was called with ``create_graph=True``.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            name = ctx.call.layer.name if hasattr(ctx, "call") else ctx.resident.name
            raise RuntimeError(
                f"Double backward (create_graph=True) went through {name!r}, whose weights are streamed from host memory: its gradient is "
                "computed apart from the graph and cannot be differentiated again. Keep the modules that the double backward passes "
                f"through on the device with resident=[...], or train this model with strategy='auto'."
            )
        with torch.no_grad():
            return backward(ctx, *gradients)

    return checked
