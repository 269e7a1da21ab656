"""Kernels that the device has and the CPU lacks, or that the CPU reaches by another road."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _histc(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """CUDA counts integers, the CPU only floating point; Mixtral's router asks by device."""
    if values.is_floating_point():
        return aten.histc.default(values, *args, **kwargs)
    return aten.histc.default(values.double(), *args, **kwargs).to(values.dtype)


def _native_dropout(values: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Accelerators call this where the CPU multiplies by a scaled mask; the same draws and the same roundings as there."""
    if train is False or p == 0:
        return values.clone(), torch.ones_like(values, dtype=torch.bool)
    mask = torch.empty_like(values).bernoulli_(1 - p)
    return values * _scaled(mask, 1 - p), mask.bool()


def _native_dropout_backward(gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    return gradient * _scaled(mask.to(gradient.dtype), 1 / scale if scale else 0.0)


def _scaled(mask: Tensor, keep: float) -> Tensor:
    return mask.div_(keep) if keep else mask


_KERNELS: dict[Any, Callable[..., Any]] = {
    aten.histc.default: _histc,
    aten.native_dropout.default: _native_dropout,
    aten.native_dropout_backward.default: _native_dropout_backward,
}


def kernel(func: Any) -> Callable[..., Any]:
    """Returns what runs on raw memory for the operator `func`."""
    return _KERNELS.get(func, func)
