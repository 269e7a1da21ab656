"""The loss of each sample, and of each token.

Shapes: B samples, T tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatrain.model_ops.context import batch_size_of, device_of, on_device, precision_of, step_of, through_wrapper
from lightning_megatrain.model_ops.hugging_face import (
    IGNORED,
    at_least_fp32,
    base_of,
    classification_losses,
    find_model,
    forward_arguments,
    labels_of,
    task_of,
    token_losses_from_logits,
)
from lightning_megatrain.model_ops.trace import leave_no_trace


def sample_losses(module: nn.Module, batch: Any) -> Tensor:
    """Returns the loss of each sample, from one batched forward in evaluation mode that leaves no trace.

    For a Hugging Face model it is the mean cross-entropy over the sample's own tokens (zero if none counts), so a batch of one gives the
    model's own loss. A module of another kind defines `compute_sample_losses(self, batch) -> (B,)`, which is also asked first where it
    exists. One that has the loss of each next token without making logits of all of them, as `CausalLM` has with `loss_slice`, defines
    `compute_token_losses(self, batch) -> (B, T - 1)`, zero where the label is `-100`; it is asked next.

    Args:
        module: a LightningModule (inside a Trainer: its device, precision and strategy are used) or any `nn.Module`.
        batch: as the module's collate function makes it, on any device.

    Returns:
        Losses (B,), FP32, detached, on the device that computes. The cost is one forward.

    Raises:
        TypeError: when the module neither holds a Hugging Face model nor defines the hook.
    """

    def call(b: Any) -> Tensor:
        with precision_of(module):
            return means_of_token_losses(module, b) if has_token_losses(module) else compute_sample_losses(module, b)

    with torch.no_grad(), leave_no_trace(module), step_of(module):
        return through_wrapper(module, call, on_device(batch, device_of(module)))


def token_losses(module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Returns the loss of each token, and which tokens count, from one batched forward in evaluation mode that leaves no trace.

    Args:
        module: as in `sample_losses`, defining `compute_token_losses` or holding a Hugging Face model that predicts tokens.
        batch: as in `sample_losses`.

    Returns:
        Losses (B, T), FP32, zero where a token does not count, and validity (B, T), both at the places of the labels.

    Raises:
        TypeError: when the module neither defines the hook nor holds a Hugging Face model.
        NotImplementedError: when its model does not predict tokens.
    """
    hook = hasattr(module, "compute_token_losses")
    model = None if hook else find_model(module)
    if model is None and not hook:
        raise TypeError(f"{type(module).__name__} holds no Hugging Face model, so its losses cannot be told apart by token.")
    if model is not None and task_of(model) == "classification":
        raise NotImplementedError(f"{type(base_of(model)).__name__} has one loss per sample, not one per token: use `sample_losses`.")

    def call(b: Any) -> tuple[Tensor, Tensor]:
        with precision_of(module):
            if model is None:
                return _token_losses_of_hook(module, b)
            logits_BTV = model(**forward_arguments(model, b)).logits
        return token_losses_from_logits(logits_BTV, labels_of(b), shift=task_of(model) == "next_token")

    with torch.no_grad(), leave_no_trace(module), step_of(module):
        return through_wrapper(module, call, on_device(batch, device_of(module)))


def compute_sample_losses(module: nn.Module, batch: Any) -> Tensor:
    """Returns the loss of each sample (B,) as a differentiable tensor, in whatever mode the module is; `sample_losses` is the safe form.

    Args:
        module: as in `sample_losses`.
        batch: on the device that computes.
    """
    hook = getattr(module, "compute_sample_losses", None)
    if hook is not None:
        losses_B = hook(batch)
        _check_shape(module, losses_B, batch)
        return at_least_fp32(losses_B)
    model = find_model(module)
    if model is None:
        raise TypeError(
            f"{type(module).__name__} holds no Hugging Face model, so the loss of each sample is not known. Define on it "
            "`compute_sample_losses(self, batch)`, returning a tensor of shape (B,), for example `F.cross_entropy(self(x), y, "
            "reduction='none')`."
        )
    task, labels = task_of(model), labels_of(batch)
    logits = model(**forward_arguments(model, batch)).logits
    if task == "classification":
        return classification_losses(logits, labels, base_of(model).config.problem_type)
    losses_BT, valid_BT = token_losses_from_logits(logits, labels, shift=task == "next_token")
    return losses_BT.sum(1) / valid_BT.sum(1).clamp(min=1)


def has_token_losses(module: nn.Module) -> bool:
    """Returns whether a module's samples have their losses from its `compute_token_losses`."""
    return hasattr(module, "compute_token_losses") and not hasattr(module, "compute_sample_losses")


def means_of_token_losses(module: nn.Module, batch: Any) -> Tensor:
    """Returns the loss of each sample (B,) as `compute_sample_losses` does, from a module's `compute_token_losses`."""
    losses_BT, valid_BT = _token_losses_of_hook(module, batch)
    return losses_BT.sum(1) / valid_BT.sum(1).clamp(min=1)


def _token_losses_of_hook(module: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Returns the losses (B, T) and validity (B, T) that `compute_token_losses` gives, at the places of the labels."""
    losses_BT, labels_BT = module.compute_token_losses(batch), labels_of(batch)
    if not isinstance(losses_BT, Tensor) or losses_BT.shape != labels_BT[:, 1:].shape:
        got = f"a tensor of shape {tuple(losses_BT.shape)}" if isinstance(losses_BT, Tensor) else f"a {type(losses_BT).__name__}"
        raise ValueError(
            f"{type(module).__name__}.compute_token_losses returned {got} for labels of shape {tuple(labels_BT.shape)}; return the loss of "
            f"each next token, shape {tuple(labels_BT[:, 1:].shape)}."
        )
    valid_BT = labels_BT != IGNORED
    valid_BT[:, 0] = False  # no token predicts the first
    return F.pad(at_least_fp32(losses_BT), (1, 0)), valid_BT


def _check_shape(module: nn.Module, losses: Any, batch: Any) -> None:
    size = batch_size_of(batch)
    if not isinstance(losses, Tensor) or losses.shape != (size,):
        got = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise ValueError(
            f"{type(module).__name__}.compute_sample_losses returned {got} for a batch of {size}; return one loss per sample, shape "
            f"({size},)."
        )
