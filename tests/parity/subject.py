"""What a parity case trains: a module, its loss and its batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
BATCHES = 4  # with accumulation over 3 the last window holds one batch


@dataclass(frozen=True)
class Subject:
    """A model as its user would write it."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Callable[[int], Batch]
    """The batch of that number; batches differ in content and often in shape."""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the strategy that this model needs."""
    streamed: tuple[str, ...] = ("Block",)
    """Classes of the layers that must be found."""


def text(index: int, vocabulary: int = 64, width: int = 9) -> Batch:
    """Two sequences of unequal length, padded on the right, the padding out of the loss. ids, mask, labels: (2, T)."""
    torch.manual_seed(100 + index)
    length = width + index % 2
    ids = torch.randint(3, vocabulary - 1, (2, length))  # 0 to 2 and the last are special
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length - 2 - index % 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def numbers(*shape: int) -> Callable[[int], Batch]:
    """Batches of features x: `shape` and targets y of the same shape."""

    def batch(index: int) -> Batch:
        torch.manual_seed(100 + index)
        return {"x": torch.randn(shape), "y": torch.randn(shape)}

    return batch


def own_loss(module: nn.Module, batch: Batch) -> Tensor:
    """The loss that a Hugging Face model computes itself, or that a module of ours returns."""
    output = module(**batch)
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss
