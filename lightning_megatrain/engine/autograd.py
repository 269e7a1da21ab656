"""Questions to the autograd engine."""

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
