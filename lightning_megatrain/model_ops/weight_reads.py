"""How often a streamed layer reads its weights: what the graph does not show, as autograd sees the whole layer as one operation."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_megatrain.engine.passes import current_pass


class WeightReads(TorchFunctionMode):
    """Counts the operations on weights while a streamed layer runs for its output.

    Args:
        weights: For each streamed layer the module, and the name in it, of each weight to watch, by the weight's name in the whole model.
    """

    def __init__(self, weights: Mapping[nn.Module, Mapping[str, tuple[nn.Module, str]]]) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._weights = weights
        self._running: Mapping[str, tuple[nn.Module, str]] = {}

    def enter(self, layer: nn.Module | None) -> None:
        """Takes note that `layer` runs next; None: one that is not watched."""
        self._running = self._weights.get(layer, {}) if layer is not None else {}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation; counts the weights it is given, unless all it tells is a size, a dtype or the like."""
        result = func(*args, **(kwargs or {}))
        if self._running and current_pass() == "forward" and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            self.counts.update(name for name, (module, local) in self._running.items() if id(module._parameters.get(local)) in given)
        return result
