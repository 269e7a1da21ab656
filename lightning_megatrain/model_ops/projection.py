"""Random projections of per-sample gradients to a fixed width.

Each parameter has its own independent signs and the projections of all parameters are summed, so that in expectation the inner product of
two projected gradients is the inner product of the two whole gradients. A parameter used twice is projected by the same signs both times:
by linearity the sum is right.

Shapes: B samples, T places per sample, K features; R, C rows and columns of a parameter; k_R x k_C = K.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_megatrain.model_ops.per_sample import Lookups, OuterProducts, SampleGradients
from lightning_megatrain.model_ops.preconditioning import AdamMoments
from lightning_megatrain.model_ops.signs import key_of, rademacher

Kind = Literal["factored", "dense"]

MAX_ELEMENTS = 2**22  # of any block made here: 16 MiB in FP32


@dataclass(frozen=True)
class Projection:
    """A linear map from gradients to `width` features.

    `"dense"`: signs / sqrt(K) for every entry of the gradient, the Johnson-Lindenstrauss transform: the inner product of x and y is
    preserved with variance at most (|x|^2 |y|^2 + (x.y)^2) / K. `"factored"`: a matrix's gradient G becomes L G S^T with independent signs
    L (k_R, R) / sqrt(k_R) and S (k_C, C) / sqrt(k_C), as in LoGra (arXiv 2405.13954), so a linear layer's is (L g)(S a)^T and its gradient
    is never made; vectors stay dense. Its variance for one matrix is at most ((1 + 2/k_R)(1 + 2/k_C) - 1) |x|^2 |y|^2, reached by gradients
    of rank one; over many layers it averages out.
    """

    width: int = 4096
    kind: Kind = "factored"
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the settings."""
        if self.kind not in ("factored", "dense"):
            raise ValueError(f"projection={self.kind!r} is neither 'factored' nor 'dense'.")
        if self.width < 1:
            raise ValueError(f"width={self.width} must be at least 1.")
        if self.kind == "factored" and self.sides[1] > 4 * self.sides[0]:
            raise ValueError(
                f"width={self.width} does not split into two like factors ({self.sides[0]} x {self.sides[1]} is the nearest), which a "
                "factored projection needs. "
                f"Use width={2 ** round(math.log2(self.width))}, or projection='dense'."
            )

    @property
    def sides(self) -> tuple[int, int]:
        """The factors (k_R, k_C) of the width nearest to its root."""
        k_r = next(k for k in range(math.isqrt(self.width), 0, -1) if self.width % k == 0)
        return k_r, self.width // k_r

    def add(self, features_BK: Tensor, name: str, shape: tuple[int, int], gradients: SampleGradients, adam: AdamMoments | None) -> None:
        """Adds the projection of one parameter's gradients to the rows of `features_BK` that belong to its samples.

        Args:
            features_BK: accumulates, FP32.
            name: the parameter's, which chooses the signs.
            shape: (R, C).
            gradients: of this parameter.
            adam: if given, gradients are preconditioned first; they must then be complete (a nonlinear map does not split into parts).
        """
        if self.kind == "dense" or shape[1] == 1:
            projected = self._dense(name, shape, gradients, adam)
        elif adam is None and isinstance(gradients, OuterProducts | Lookups):
            projected = self._from_factors(name, gradients)
        else:
            projected = self._from_blocks(name, shape, gradients, adam)
        features_BK[gradients.samples] += projected

    def _dense(self, name: str, shape: tuple[int, int], gradients: SampleGradients, adam: AdamMoments | None) -> Tensor:
        key, (rows_total, columns_total) = key_of(self.seed, name, "dense"), shape
        out_BK: Tensor | None = None
        columns_step = max(1, min(columns_total, MAX_ELEMENTS // self.width))
        for rows_r in self._rows(gradients, rows_total, columns_step * max(self.width, gradients.num_samples), adam):
            for start in range(0, columns_total, columns_step):
                columns = slice(start, min(start + columns_step, columns_total))
                block_Brc = _block(gradients, rows_r, columns, adam)
                flat = (rows_r.view(-1, 1) * columns_total + torch.arange(columns.start, columns.stop, device=rows_r.device)).flatten()
                part_BK = block_Brc.flatten(1) @ rademacher(key, flat, self.width, block_Brc.dtype)
                out_BK = part_BK if out_BK is None else out_BK.add_(part_BK)
        if out_BK is None:
            raise ValueError(f"`{name}` is empty.")
        return out_BK / math.sqrt(self.width)

    def _from_factors(self, name: str, gradients: OuterProducts | Lookups) -> Tensor:
        """L (left^T right) S^T, without making the product in the middle."""
        (k_r, k_c), scale = self.sides, 1 / math.sqrt(self.width)
        right_BTk = _times_signs(gradients.right_BTC, key_of(self.seed, name, "columns"), k_c)
        left_key = key_of(self.seed, name, "rows")
        if isinstance(gradients, Lookups):
            ids, inverse_BT = gradients.ids_BT.unique(return_inverse=True)
            left_BTk = rademacher(left_key, ids, k_r, right_BTk.dtype)[inverse_BT]
        else:
            left_BTk = _times_signs(gradients.left_BTR, left_key, k_r)
        return (left_BTk.transpose(1, 2) @ right_BTk).flatten(1) * scale

    def _from_blocks(self, name: str, shape: tuple[int, int], gradients: SampleGradients, adam: AdamMoments | None) -> Tensor:
        (k_r, k_c), (rows_total, columns_total) = self.sides, shape
        out_Bkk: Tensor | None = None
        for rows_r in self._rows(gradients, rows_total, columns_total * gradients.num_samples, adam):
            block_BrC = _block(gradients, rows_r, slice(0, columns_total), adam)
            right_Brk = _times_signs(block_BrC, key_of(self.seed, name, "columns"), k_c)
            left_rk = rademacher(key_of(self.seed, name, "rows"), rows_r, k_r, right_Brk.dtype)
            part_Bkk = left_rk.T @ right_Brk
            out_Bkk = part_Bkk if out_Bkk is None else out_Bkk.add_(part_Bkk)
        if out_Bkk is None:
            raise ValueError(f"`{name}` is empty.")
        return out_Bkk.flatten(1) / math.sqrt(self.width)

    def _rows(self, gradients: SampleGradients, total: int, elements_per_row: int, adam: AdamMoments | None) -> list[Tensor]:
        """Returns the rows to visit, in runs whose blocks stay within `MAX_ELEMENTS`; preconditioned rows without gradient are not zero."""
        rows = gradients.touched_rows() if adam is None else None
        if rows is None:
            rows = torch.arange(total, device=gradients.device)
        return list(rows.split(max(1, MAX_ELEMENTS // max(1, elements_per_row))))


def _block(gradients: SampleGradients, rows_r: Tensor, columns: slice, adam: AdamMoments | None) -> Tensor:
    block_Brc = gradients.block(rows_r, columns)
    return block_Brc if adam is None else adam.direction(block_Brc, rows_r, columns)


def _times_signs(x_: Tensor, key: int, width: int) -> Tensor:
    """Returns `x_ @ signs` over the last axis, the signs made in blocks of `MAX_ELEMENTS`."""
    out: Tensor | None = None
    for rows in torch.arange(x_.shape[-1], device=x_.device).split(max(1, MAX_ELEMENTS // width)):
        whole = len(rows) == x_.shape[-1]
        part = (x_ if whole else x_[..., int(rows[0]) : int(rows[-1]) + 1]) @ rademacher(key, rows, width, x_.dtype)
        out = part if out is None else out.add_(part)
    if out is None:
        raise ValueError("A layer without inputs or outputs cannot be projected.")
    return out
