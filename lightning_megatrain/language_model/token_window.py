"""Weigh every label token of an accumulation window the same, however unequal its micro-batches are.

The window's gradient is the sum of all token losses over the number of its label tokens, C. Lightning hands the micro-batches over one
by one and divides each loss by their number N, and C is only known after the last. So each micro-batch's summed loss is divided by
the first one's count c, which keeps gradients near their final size, and after the last backward the gradients are multiplied once
by N c / C. Lightning calls `on_after_backward`, `on_before_optimizer_step` and gradient clipping after that, so they all see the
right gradient. With one micro-batch a window, or equal counts in all, the factor is one and nothing is touched.

Over several processes, whose gradients are averaged, `c` and `C` are means over the processes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class TokenWindow:
    """The counts of one accumulation window."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Forget the window before."""
        self.first_count = 0.0
        self.count = 0.0
        self.loss_sum = 0.0

    def add(self, loss_sum: float, count: float) -> None:
        """Count a micro-batch: the sum of its token losses and the number of its label tokens."""
        self.first_count = self.first_count or count
        self.count += count
        self.loss_sum += loss_sum

    @property
    def divisor(self) -> float:
        """What each summed loss is divided by. One while no label token has been seen, when the sum is zero too."""
        return self.first_count or 1.0

    @property
    def mean_loss(self) -> float:
        """Loss per label token so far."""
        return self.loss_sum / self.count

    def factor(self, micro_batches: int) -> float:
        """What the accumulated gradients lack, where each loss was further divided by `micro_batches`."""
        return micro_batches * self.divisor / self.count

    def correct(self, parameters: Iterable[nn.Parameter], micro_batches: int) -> None:
        """Multiply the accumulated gradients in place. One pass over them, none where the factor is one."""
        factor = self.factor(micro_batches)
        if factor != 1.0:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, factor)
