"""What DistributedDataParallel cannot do with the gradients of split masters, told before a backward fails."""

from typing import Any

import torch
from torch import distributed, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

_watch: list[RemovableHandle] = []


def watch_data_parallel() -> None:
    """Have the next forward of a DistributedDataParallel refused if it holds BF16 parameters whose gradients are FP32.

    Its buckets have the parameters' dtype, whatever their `grad_dtype` and whenever it was set, so that backward would fail with "Expected
    BFloat16, got Float". An optimizer does not know who wraps its parameters, or when; so this watches the calls of modules up to the
    first of a DistributedDataParallel. Does nothing where there is no process group.
    """
    if not _watch and distributed.is_available() and distributed.is_initialized():
        _watch.append(register_module_forward_pre_hook(_refuse))


def _refuse(module: nn.Module, args: Any) -> None:
    if not isinstance(module, DistributedDataParallel) or not torch.is_grad_enabled():
        return
    _watch.pop().remove()
    unlike = sum(p.requires_grad and p.dtype is torch.bfloat16 and p.grad_dtype is torch.float32 for p in module.parameters())
    if unlike:
        raise TypeError(
            f"HostAdamW(masters='split') accumulates the gradients of {unlike} BF16 parameters in FP32, and DistributedDataParallel "
            "averages gradients only in the parameters' own dtype. Train FP32 parameters (model.float(), masters='fp32' and, in Lightning, "
            "Trainer(precision='bf16-mixed')), or let the gradients be BF16: set `parameter.grad_dtype = None` for each, after the "
            "optimizer was made."
        )
