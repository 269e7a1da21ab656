"""What the strategy refuses or changes of a user's optimizers and callbacks."""

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuses an optimizer that works on a device; warns where it would round FP32 updates to BF16."""
    elsewhere = {str(p.device) for group in optimizer.param_groups for p in group["params"] if p.device.type != "cpu"}
    for state in optimizer.state.values():
        elsewhere |= {str(value.device) for value in state.values() if isinstance(value, Tensor) and value.device.type != "cpu"}
    if elsewhere:
        raise MisconfigurationException(
            f"{type(optimizer).__name__} holds parameters or state on {', '.join(sorted(elsewhere))}, but with strategy='megatrain' both "
            "stay in host memory. Create the optimizer from the module's own parameters in configure_optimizers(), and load its state "
            "through Trainer.fit(ckpt_path=...)."
        )
    trained_in_bf16 = sum(p.dtype is torch.bfloat16 and p.requires_grad for group in optimizer.param_groups for p in group["params"])
    if trained_in_bf16 and getattr(optimizer, "masters", None) != "split":
        rank_zero_warn(
            f"{trained_in_bf16} trainable parameters are BF16 and {type(optimizer).__name__} keeps no FP32 masters: updates below 1/256 of "
            "a weight are lost. Load the model in FP32 (dtype='float32'), or use HostAdamW(masters='split')."
        )


def keep_averages_on_host(trainer: Trainer) -> None:
    """Weight averages are a whole model more, which the callbacks would put on the device."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, WeightAveraging):
            continue
        if callback._device is None:
            callback._device = torch.device("cpu")
            rank_zero_warn(
                f"{type(callback).__name__} keeps its average in host memory: on the device it would take as much memory as the whole "
                "model."
            )
        elif torch.device(callback._device).type != "cpu":
            raise MisconfigurationException(
                f"{type(callback).__name__}(device={str(callback._device)!r}) would put a whole copy of the model on the device, which "
                "strategy='megatrain' is there to avoid. Use device='cpu'."
            )
