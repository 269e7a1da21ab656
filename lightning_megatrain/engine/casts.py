"""Which parameters autocast only ever uses as BF16, so that they can be streamed as BF16 with the same result."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class CastWatch(TorchDispatchMode):
    """Sees every use of some FP32 weights, and tells those of which each use was a cast to BF16."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self._index = {id(weight): index for index, weight in enumerate(weights)}
        self._cast: set[int] = set()
        self._other: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            index = self._index.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if index is not None:
                is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16
                (self._cast if is_cast else self._other).add(index)
        operator: Callable[..., Any] = func
        return operator(*args, **kwargs)

    def otherwise_used(self) -> set[int]:
        """Indices of the weights that were used by anything else."""
        return self._other

    def only_cast(self) -> set[int]:
        """Indices of the weights that were used, and each time by a cast to BF16."""
        return self._cast - self._other


def casting(device: torch.device) -> bool:
    """Whether autocast to BF16 is on for `device`."""
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) is torch.bfloat16
