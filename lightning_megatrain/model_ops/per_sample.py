"""The gradient of one use of one parameter for each sample, kept as the factors it comes from.

Every parameter is seen as a matrix: the first axis by all the others, a vector as one column. A block of its per-sample gradients is made
when asked for, so nothing of size samples x parameters is ever held.

Shapes: B samples, T places where the layer was used per sample, R rows and C columns of the parameter, r some of the rows.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class SampleGradients(Protocol):
    """Per-sample gradients of a parameter (R, C), for a run of samples."""

    @property
    def samples(self) -> slice:
        """Which of the batch's samples."""

    @property
    def num_samples(self) -> int:
        """How many samples."""

    @property
    def device(self) -> torch.device:
        """Where blocks are made."""

    def touched_rows(self) -> Tensor | None:
        """Returns which rows are not zero for every sample, None for possibly all."""

    def block(self, rows_r: Tensor, columns: slice) -> Tensor:
        """Returns the gradients at some rows and a run of columns, (B, r, c)."""


@dataclass
class OuterProducts:
    """sum over t of left[b, t] right[b, t]^T: a linear layer."""

    samples: slice
    left_BTR: Tensor
    right_BTC: Tensor

    @property
    def num_samples(self) -> int:
        return len(self.left_BTR)

    @property
    def device(self) -> torch.device:
        return self.left_BTR.device

    def touched_rows(self) -> Tensor | None:
        return None

    def block(self, rows_r: Tensor, columns: slice) -> Tensor:
        return self.left_BTR[:, :, rows_r].transpose(1, 2) @ self.right_BTC[:, :, columns]


@dataclass
class Lookups:
    """sum over t of onehot(ids[b, t]) right[b, t]^T: an embedding."""

    samples: slice
    ids_BT: Tensor
    right_BTC: Tensor

    @property
    def num_samples(self) -> int:
        return len(self.ids_BT)

    @property
    def device(self) -> torch.device:
        return self.ids_BT.device

    def touched_rows(self) -> Tensor | None:
        return self.ids_BT.unique()

    def block(self, rows_r: Tensor, columns: slice) -> Tensor:
        order = rows_r.argsort()
        place_BT = torch.searchsorted(rows_r[order], self.ids_BT.contiguous()).clamp(max=len(rows_r) - 1)
        at_BT = order[place_BT]
        wanted_BT = rows_r[at_BT] == self.ids_BT
        right_BTc = self.right_BTC[:, :, columns] * wanted_BT.unsqueeze(-1)
        out = right_BTc.new_zeros(self.num_samples, len(rows_r), right_BTc.shape[-1])
        return out.scatter_add_(1, at_BT.unsqueeze(-1).expand_as(right_BTc), right_BTc)


@dataclass
class Explicit:
    """The gradients themselves: vectors, and modules of no known kind."""

    samples: slice
    gradient_BRC: Tensor

    @property
    def num_samples(self) -> int:
        return len(self.gradient_BRC)

    @property
    def device(self) -> torch.device:
        return self.gradient_BRC.device

    def touched_rows(self) -> Tensor | None:
        return None

    def block(self, rows_r: Tensor, columns: slice) -> Tensor:
        return self.gradient_BRC[:, rows_r, columns]


@dataclass
class Zeros:
    """No gradient at all: a parameter that took no part."""

    samples: slice
    like: Tensor  # for dtype and device

    @property
    def num_samples(self) -> int:
        return self.samples.stop - self.samples.start

    @property
    def device(self) -> torch.device:
        return self.like.device

    def touched_rows(self) -> Tensor | None:
        return None

    def block(self, rows_r: Tensor, columns: slice) -> Tensor:
        return self.like.new_zeros(self.num_samples, len(rows_r), columns.stop - columns.start)


@dataclass
class Sum:
    """The same parameter used more than once by the same samples."""

    parts: list[SampleGradients]

    @property
    def samples(self) -> slice:
        return self.parts[0].samples

    @property
    def num_samples(self) -> int:
        return self.parts[0].num_samples

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def touched_rows(self) -> Tensor | None:
        return None

    def block(self, rows_r: Tensor, columns: slice) -> Tensor:
        total = self.parts[0].block(rows_r, columns)
        for part in self.parts[1:]:
            total = total + part.block(rows_r, columns)
        return total


def summed(parts: list[SampleGradients], batch_size: int) -> SampleGradients:
    """Returns the sum over a batch of parts, each for all samples or explicit for one."""
    whole = [part for part in parts if part.num_samples == batch_size]
    single = [part for part in parts if part.num_samples != batch_size and isinstance(part, Explicit)]
    if single:
        first = single[0].gradient_BRC
        total_BRC = first.new_zeros(batch_size, *first.shape[1:])
        for part in single:
            total_BRC[part.samples] += part.gradient_BRC
        whole.append(Explicit(slice(0, batch_size), total_BRC))
    return whole[0] if len(whole) == 1 else Sum(whole)
