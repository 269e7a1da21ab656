"""Which parameters autocast only ever uses as BF16, so that they can be streamed as BF16 with the same result."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_TELLING = {getattr(torch.Tensor, name).__get__ for name in ("dtype", "data", "itemsize", "nbytes")} | {
    torch.Tensor.element_size,
    torch.Tensor.type,
    torch.Tensor.is_floating_point,
}
"""Attributes and methods that tell a weight's dtype, or give it away unseen."""


class _AttributeWatch(TorchFunctionMode):
    """Sees code that asks for a weight's dtype: peft and T5 cast their input to it."""

    def __init__(self, index: dict[int, int], asked: set[int]) -> None:
        self._index, self._asked = index, asked

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if args and func in _TELLING and (index := self._index.get(id(args[0]))) is not None:
            self._asked.add(index)
        return func(*args, **(kwargs or {}))


class CastWatch(TorchDispatchMode):
    """Sees every use of some FP32 weights, and tells those of which each use was a cast to BF16."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self._index = {id(weight): index for index, weight in enumerate(weights)}
        self._casts: Counter[int] = Counter()
        self._other: set[int] = set()
        self._attributes = _AttributeWatch(self._index, self._other)

    def __enter__(self) -> "CastWatch":
        super().__enter__()
        self._attributes.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._attributes.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            index = self._index.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if index is not None:
                is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16
                if is_cast:
                    self._casts[index] += 1
                else:
                    self._other.add(index)
        operator: Callable[..., Any] = func
        return operator(*args, **kwargs)

    def cast_once(self) -> set[int]:
        """Indices of the weights that were cast to BF16 once and used in no other way.

        Lightning switches autocast's cache off, so a weight used twice is cast twice, and its two gradients are summed in FP32. Streamed
        as BF16 they would be summed in BF16.
        """
        return {index for index, casts in self._casts.items() if casts == 1} - self._other


def may_be_watched(modules: Sequence[nn.Module]) -> bool:
    """Whether a watched forward is the same as any other.

    Torch's transformer modules look for function modes before they take their fast path, which they do without gradients only.
    """
    return torch.is_grad_enabled() or not any(isinstance(m, nn.MultiheadAttention | nn.TransformerEncoderLayer) for m in modules)


def casting(device: torch.device) -> bool:
    """Whether autocast to BF16 is on for `device`."""
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) is torch.bfloat16
