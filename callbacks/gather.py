"""Rows of all ranks together."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor


def gather_rows(rows: Tensor, trainer: pl.Trainer) -> Tensor:
    """Return the rows of all ranks, rank after rank, also where ranks have different numbers of them (or none).

    Args:
        rows: (n, ...) of this rank; all axes but the first must agree over the ranks.
        trainer: Whose ranks.
    """
    if trainer.world_size == 1:
        return rows
    counts = [int(c) for c in trainer.strategy.all_gather(torch.tensor([len(rows)], device=rows.device)).flatten()]
    padded = torch.zeros(max(counts), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    padded[: len(rows)] = rows
    gathered = trainer.strategy.all_gather(padded).view(trainer.world_size, max(counts), *rows.shape[1:])
    return torch.cat([gathered[r, :c] for r, c in enumerate(counts)])
