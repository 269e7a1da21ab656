"""Which pass of a streamed layer is running: the small surface through which model operations see the engine.

A streamed layer runs twice in a training step: once for its output, keeping nothing, and once more inside backward, with gradients
following. Hooks on modules inside the layer fire both times. What they keep in the first pass is kept for nothing, and the gradients of
what they see there never come; so they ask here.
"""

from contextvars import ContextVar
from typing import Literal
from weakref import WeakSet

from torch import nn

Pass = Literal["forward", "recompute"]

_PASS: ContextVar[Pass | None] = ContextVar("lightning_megatrain_pass", default=None)  # set by the engine around each run of a layer
_STREAMED: "WeakSet[nn.Module]" = WeakSet()  # kept by the engine: the layers it streams now


def current_pass() -> Pass | None:
    """Returns which pass of a streamed layer the caller runs in.

    Returns:
        `"forward"` while a streamed layer runs for its output only, `"recompute"` while it runs again inside backward with gradients
        following, None outside any streamed layer and in plain training.
    """
    return _PASS.get()


def is_streamed(layer: nn.Module) -> bool:
    """Returns whether the engine streams `layer` now.

    Autograd enters a streamed layer only through the tensors and host parameters that the layer was called with. Whoever wants gradients
    inside the layer, and none of its parameters', must make one of its inputs require grad.
    """
    return layer in _STREAMED
