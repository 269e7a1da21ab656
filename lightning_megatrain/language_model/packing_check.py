"""Whether a model keeps packed documents apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers import PreTrainedModel


@torch.no_grad()
def check_packing(model: PreTrainedModel, run: Callable[[dict[str, torch.Tensor]], Any], device: torch.device, rounding: float) -> None:
    """Refuse a model whose packed documents see each other.

    Two tiny documents change places in a row. Where documents do not see each other their logits stay the same but for
    rounding. The median over tokens decides, as rounding may send single tokens to another expert. The cost is one forward.

    Args:
        model: The model.
        run: Calls it on a batch of `input_ids` and `position_ids`.
        device: Where it runs.
        rounding: The relative change of logits that is put down to rounding: 1e-3 in FP32, 2e-2 in BF16 with its 8 bits over some layers.

    Raises:
        MisconfigurationException: It does not keep them apart, or its logits are not finite.
    """
    positions = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 0, 1]])
    ids = torch.tensor([[0, 1, 2, 3, 4], [2, 3, 4, 0, 1]]) * 7 % model.config.get_text_config().vocab_size
    training = model.training
    model.eval()
    try:
        logits = run({"input_ids": ids.to(device), "position_ids": positions.to(device)}).logits.float()
    finally:
        model.train(training)
    if not logits.isfinite().all():
        raise MisconfigurationException(
            f"{type(model).__name__} ({model.config.model_type}) makes logits that are not finite: look at its weights, "
            "and at the checkpoint that they come from."
        )
    swapped = torch.cat([logits[1, 3:], logits[1, :3]])
    change = ((logits[0] - swapped).abs().amax(-1) / logits[0].abs().amax(-1)).median().item()
    if not change <= rounding:
        raise MisconfigurationException(
            f"{type(model).__name__} ({model.config.model_type}) does not keep packed documents apart: its logits change "
            f"by {change:.1%} with a document's neighbour. Set packing='padded' in the datamodule."
        )
