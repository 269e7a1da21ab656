"""What is sent for a parameter: a tensor as it lies on the host, or values made from it on the way."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter


class SplitWeights(Protocol):
    """Exact FP32 weights of which a BF16 parameter is the upper half; whoever updates them keeps the lower one."""

    def holds(self, parameter: Parameter) -> bool:
        """Whether the parameter is such an upper half."""

    def read(self, parameter: Parameter, out: Tensor, start: int = 0) -> None:
        """Writes exact values to `out` (FP32, one dimension), from element `start` on in the order of memory."""

    def write(self, parameter: Parameter, value: Tensor) -> None:
        """Sets both halves from `value`, FP32, of the parameter's shape, on any device."""


@dataclass(frozen=True)
class OnTheWay:
    """Values that exist nowhere on the host: a cast of a parameter, or the exact value of a split one.

    Args:
        parameter: What they are made from, without gaps in memory.
        dtype: Theirs.
        split: Joins the halves; None for a cast.
    """

    parameter: Parameter
    dtype: torch.dtype
    split: SplitWeights | None = None

    @property
    def nbytes(self) -> int:
        return self.parameter.numel() * self.dtype.itemsize

    def write(self, out: Tensor, start: int) -> None:
        """Makes the values from element `start` on, in the order of memory, as many as `out` (one dimension) holds."""
        if self.split is not None:
            self.split.read(self.parameter, out, start)
        else:
            out.copy_(in_memory_order(self.parameter.detach())[start : start + out.numel()])

    def whole(self) -> Tensor:
        """All values, in the parameter's shape and strides."""
        with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode could not be used in training
            out = torch.empty_like(self.parameter, dtype=self.dtype, requires_grad=False)
            self.write(in_memory_order(out), 0)
        return out


def in_memory_order(tensor: Tensor) -> Tensor:
    """A view of a tensor without gaps as one dimension, in the order in which its elements lie."""
    return tensor.as_strided((tensor.numel(),), (1,))


def exact_dtype(parameter: Parameter, split: SplitWeights | None) -> torch.dtype:
    """The dtype of the parameter's value: FP32 where the parameter is the upper half of it."""
    return torch.float32 if split is not None and split.holds(parameter) else parameter.dtype
