"""The loss of each token, and what counts as a token.

Shapes: B rows, T tokens a row, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lightning_megatrain.datamodules.packing import IGNORED


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each next token, (B, T - 1), in FP32 as transformers computes it."""
    losses = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(labels.shape[0], -1)


def tokens_without_padding(batch: dict[str, torch.Tensor]) -> int:
    """Tokens of a batch that are no padding."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    tokens = batch["input_ids"].numel()
    if "position_ids" not in batch:
        return tokens
    # A packed row's padding is its tail of position 0 and no label (and a last document of one token, which trains nothing either).
    padding = ((batch["labels"] == IGNORED) & (batch["position_ids"] == 0)).long()
    return tokens - int(padding.flip(1).cumprod(1).sum())
