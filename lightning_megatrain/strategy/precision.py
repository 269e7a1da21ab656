"""What `Trainer(precision=...)` means when parameters stay on the host."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override


class HostPrecision(Precision):
    """Gradients are clipped on the host, by a norm that may be known already."""

    clip_by_known_norm: Callable[[Optimizer, float], bool] | None = None
    """Clips if it knows the norm, and says whether it did; set by the strategy."""

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.clip_by_known_norm is None or not self.clip_by_known_norm(optimizer, clip_val):
            super().clip_grad_by_norm(optimizer, clip_val)


class MegaTrainPrecision(HostPrecision):
    """``32-true``: everything is FP32."""


class MegaTrainMixedPrecision(HostPrecision, MixedPrecision):
    """``bf16-mixed``: FP32 parameters on the host, autocast to BF16 on the device."""

    def __init__(self) -> None:
        super().__init__("bf16-mixed", device="cpu")  # the strategy sets the device once it knows it

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # MixedPrecision refuses fused optimizers, for the sake of a gradient scaler that BF16 does not have
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


class MegaTrainHalfPrecision(HostPrecision, HalfPrecision):
    """``bf16-true``: everything on the device is BF16, while the parameters on the host stay FP32 and are what the optimizer updates."""

    def __init__(self) -> None:
        super().__init__("bf16-true")

    @override
    def convert_module(self, module: Module) -> Module:
        return module

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()


def host_precision(plugin: Precision | None) -> HostPrecision | None:
    """Returns the precision plugin to use in the place of the one the Trainer made.

    Raises:
        TypeError: `plugin` is no plugin.
        MisconfigurationException: The precision is one that cannot be trained right with parameters on the host.
    """
    if plugin is None or isinstance(plugin, HostPrecision):
        return plugin
    if not isinstance(plugin, Precision):
        raise TypeError(f"precision_plugin={plugin!r} is no plugin. Leave it out, and choose in Trainer(precision='bf16-mixed').")
    if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        return MegaTrainMixedPrecision()
    if type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
        return MegaTrainHalfPrecision()
    if type(plugin) is Precision:
        return MegaTrainPrecision()
    raise MisconfigurationException(
        f"strategy='megatrain' cannot train with precision={getattr(plugin, 'precision', type(plugin).__name__)!r}: FP16 needs a gradient "
        "scaler that works on host gradients, FP64 and quantised weights have no streamed form. Use Trainer(precision='bf16-mixed'), which "
        "needs no scaler, 'bf16-true' or '32-true'."
    )


def compute_dtype(plugin: Precision) -> torch.dtype | None:
    """The dtype in which parameters reach the device; None for their own."""
    return torch.bfloat16 if isinstance(plugin, MegaTrainHalfPrecision) else None
