"""Tells whether a tensor was written where its version does not, as through `.data`."""

from collections.abc import Iterable

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """The sum of the tensor's bits as integers, left on its device."""
    with torch.inference_mode(False), torch.no_grad():
        flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        return flat.view(_INTEGERS[flat.element_size()]).sum()


def checksums(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Checksums of the ordinary ones among `tensors`, neither sparse nor nested."""
    return [checksum(tensor) for tensor in tensors if tensor.layout is torch.strided and not tensor.is_nested]
