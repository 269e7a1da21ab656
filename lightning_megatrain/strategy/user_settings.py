"""What the strategy refuses or changes of a user's Trainer, module, optimizers and callbacks."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator, MPSAccelerator
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer


def refuse_several(devices: list[torch.device] | None) -> None:
    """Refuses more than one device."""
    if devices and len(devices) > 1:
        raise MisconfigurationException(
            f"strategy='megatrain' trains on one device and was given {len(devices)}. Set Trainer(devices=1); to train one model on "
            "several devices, use strategy='fsdp' or 'deepspeed_stage_3_offload'."
        )


def refuse_nodes(number: int) -> None:
    """Refuses more than one machine, each of which would train a model of its own."""
    if number > 1:
        raise MisconfigurationException(
            f"strategy='megatrain' trains on one device and num_nodes is {number}. Set Trainer(num_nodes=1); to train one model on several "
            "machines, use strategy='fsdp' or 'deepspeed_stage_3_offload'."
        )


def refuse_compiled(module: LightningModule) -> None:
    """Refuses a module that went through `torch.compile`, which leaves this mark."""
    if getattr(module, "_compiler_ctx", None) is not None:
        raise MisconfigurationException(
            "strategy='megatrain' cannot train a LightningModule that went through torch.compile(): the compiled graph would hold "
            "every weight on the device. Pass the module as it is, and compile functions inside its layers."
        )


def refuse_settings(accelerator: Accelerator | None, layer_sync: Any) -> None:
    """Refuses an accelerator that has no memory of its own, and batch norms that work across devices."""
    if isinstance(accelerator, MPSAccelerator):
        raise MisconfigurationException(
            "strategy='megatrain' does not support MPS: its memory is the host's own, so streaming weights would save nothing. Use "
            "Trainer(strategy='auto')."
        )
    if layer_sync is not None:
        raise MisconfigurationException(
            "strategy='megatrain' trains on one device, where sync_batchnorm has nothing to synchronise. Set Trainer(sync_batchnorm=False)."
        )


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
