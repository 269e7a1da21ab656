"""Which hooks of a training run are code that this package does not know.

Whoever updates weights late, keeps a gradient in BF16 or folds a clip into the update must be sure that nobody looks in between. Nothing
can see a foreign function read a tensor; but it can be known that no foreign function runs.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from torch import nn
from torch.optim import Optimizer

_KNOWN_CALLBACKS = {
    *(Callback, DeviceStatsMonitor, EarlyStopping, GradientAccumulationScheduler, LearningRateMonitor, ModelCheckpoint, ModelSummary),
    *(OnExceptionCheckpoint, RichModelSummary, RichProgressBar, ThroughputMonitor, Timer, TQDMProgressBar),
    *(base for callback in (ModelCheckpoint, RichProgressBar, TQDMProgressBar) for base in callback.__mro__[1:-1]),
}
"""Callbacks that see weights and gradients through the strategy's state dictionaries alone."""
_KNOWN_PACKAGES = ("lightning.", "lightning_megatrain.")

GRADIENTS = (
    "backward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "configure_gradient_clipping",
    "clip_gradients",
    "on_before_zero_grad",
    "optimizer_zero_grad",
)
"""Hooks that run between the first backward of a step and the next step's, and may look at gradients."""

BETWEEN_STEPS = (
    "optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_model_eval",
    "on_train_end",
    "on_exception",
)
"""Hooks that run between an optimizer's step and the end of the next forward."""

OWN_STEPS = ("training_step", "forward", "configure_model", "configure_optimizers")
"""What a module does itself, or can hang hooks on."""


def unknown_hooks(trainer: Trainer, module: LightningModule, hooks: Sequence[str]) -> list[str]:
    """Names those of `hooks` that are the user's callbacks', module's or datamodule's own, such as ``"MyCallback.on_train_batch_end"``.

    What a dataset, a sampler or the function of a `LambdaLR` does is not asked: they would have to hold the module.
    """
    found = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        found += [f"{type(callback).__name__}.{hook}" for hook in hooks if hasattr(Callback, hook) and not _known_in(callback, hook)]
    for owner in (module, getattr(trainer, "datamodule", None)):
        if owner is not None:
            found += [f"{type(owner).__name__}.{hook}" for hook in hooks if not _is_ours(owner, hook)]
    return found


def unknown_to_the_step(optimizers: Sequence[Optimizer], schedulers: Iterable[Any]) -> list[str]:
    """Names hooks on the optimizers' steps, and schedulers that are not torch's: they run between a step and the next forward."""
    found = []
    for optimizer in optimizers:
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            found.append(f"a hook on {type(optimizer).__name__}'s step")
    return found + [type(one).__name__ for one in schedulers if not type(one).__module__.startswith((*_KNOWN_PACKAGES, "torch."))]


def hooks_on(module: nn.Module) -> str | None:
    """Names a hook that somebody hung on a module or a parameter; those of torch, Lightning, transformers and this package are known."""
    for child in module.modules():  # without their names, which take four times as long: this runs before each micro-batch
        for hooks in (child._forward_pre_hooks, child._forward_hooks, child._backward_pre_hooks, child._backward_hooks):
            if hooks and not all(map(_made_by_known_code, hooks.values())):
                name = next(name for name, one in module.named_modules() if one is child)
                return f"a hook on {name or type(module).__name__}"
        for parameter in child._parameters.values():
            if parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
                return f"a hook on {next(name for name, one in module.named_parameters() if one is parameter)}"
    return None


def _made_by_known_code(hook: Any) -> bool:
    made_by = getattr(getattr(hook, "func", hook), "__module__", None) or type(hook).__module__
    return made_by.startswith((*_KNOWN_PACKAGES, "torch.", "transformers."))


def _known_in(callback: Callback, hook: str) -> bool:
    return hook not in vars(callback) and _owner(callback, hook) in _KNOWN_CALLBACKS


def _is_ours(part: LightningModule | LightningDataModule, hook: str) -> bool:
    if hook in vars(part) and hook != "forward":  # the engine puts its own in the place of `forward`
        return False
    owner = _owner(part, hook)
    return owner is None or owner.__module__.startswith((*_KNOWN_PACKAGES, "torch.nn."))


def _owner(object_: object, attribute: str) -> type | None:
    return next((cls for cls in type(object_).__mro__ if attribute in vars(cls)), None)
