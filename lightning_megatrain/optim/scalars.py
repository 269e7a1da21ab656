"""The numbers of one step of one parameter group."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any


class Scalars(ctypes.Structure):
    """The numbers of one step of one group, each rounded to FP32 once; `struct scalars` of host_adamw.c, field by field.

    Attributes:
        grad_scale: multiplies the gradient; negative to maximize.
        l2: weight decay added to the gradient (Adam).
        keep: factor on the weight, `1 - lr * weight_decay` (AdamW).
        step_size: `lr / (1 - beta1^t)`.
        one_minus_beta1: of the first moment.
        beta2: of the second moment.
        one_minus_beta2: likewise.
        inv_sqrt_correction2: `(1 - beta2^t)^-1/2`.
        eps: added to the root.
    """

    _fields_ = (
        ("grad_scale", ctypes.c_float),
        ("l2", ctypes.c_float),
        ("keep", ctypes.c_float),
        ("step_size", ctypes.c_float),
        ("one_minus_beta1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("one_minus_beta2", ctypes.c_float),
        ("inv_sqrt_correction2", ctypes.c_float),
        ("eps", ctypes.c_float),
    )

    @classmethod
    def of(cls, group: Mapping[str, Any], t: int, grad_scale: float) -> Scalars:
        """The numbers of a group's step t, the first being 1."""
        lr, decay, (beta1, beta2) = float(group["lr"]), float(group["weight_decay"]), map(float, group["betas"])
        decoupled = group["decoupled_weight_decay"]
        return cls(
            grad_scale=-grad_scale if group["maximize"] else grad_scale,
            l2=0.0 if decoupled else decay,
            keep=1 - lr * decay if decoupled else 1.0,
            step_size=lr / (1 - beta1**t),
            one_minus_beta1=1 - beta1,
            beta2=beta2,
            one_minus_beta2=1 - beta2,
            inv_sqrt_correction2=(1 - beta2**t) ** -0.5,
            eps=float(group["eps"]),
        )
