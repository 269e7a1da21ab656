"""Gradient features: a random projection of the gradient of each sample's loss, from one batched forward and backward.

Shapes: B samples, K features.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_megatrain.model_ops.collector import Collector, layers_of, rows_in_doubt
from lightning_megatrain.model_ops.context import (
    batch_axes_of,
    batch_size_of,
    device_of,
    on_device,
    precision_of,
    samples_of,
    step_of,
    trainer_of,
)
from lightning_megatrain.model_ops.hugging_face import head_parameters
from lightning_megatrain.model_ops.losses import compute_sample_losses, has_token_losses, means_of_token_losses
from lightning_megatrain.model_ops.preconditioning import AdamMoments, adam_moments
from lightning_megatrain.model_ops.projection import Kind, Projection
from lightning_megatrain.model_ops.trace import leave_no_trace


@dataclass(frozen=True)
class GradientSettings:
    """What `gradient_features` computes; two sets of features compare only if width, projection, seed and parameters agree."""

    width: int = 4096
    """Features per sample, K. A factored projection needs two like factors: a power of two is best."""
    projection: Kind = "factored"
    """`"factored"` (cheap: sketches a layer's inputs and output gradients) or `"dense"` (tight: every entry of the gradient has its own
    signs). See `Projection`."""
    seed: int = 0
    """Of the signs."""
    preconditioner: str | None = None
    """None for the gradient itself, `"adam"` for the step that Adam would make on the sample alone (LESS; see `AdamMoments`)."""
    parameters: tuple[str, ...] | None = None
    """Patterns (`"*.mlp.*"`) over the names of parameters that require grad; None for all of them."""

    def __post_init__(self) -> None:
        """Checks the settings."""
        if self.preconditioner not in (None, "adam"):
            raise ValueError(f"preconditioner={self.preconditioner!r} is neither None nor 'adam'.")
        if isinstance(self.parameters, str):
            raise TypeError(f"parameters={self.parameters!r} must be a sequence of patterns: ({self.parameters!r},).")
        if self.parameters is not None:
            object.__setattr__(self, "parameters", tuple(self.parameters))  # YAML gives a list
        self.make_projection()

    def make_projection(self) -> Projection:
        """Returns the linear map."""
        return Projection(self.width, self.projection, self.seed)


_ROWS_ARE_SAMPLES: "WeakKeyDictionary[nn.Module, set[Any]]" = WeakKeyDictionary()
"""For each module the layers, and the axes of the batch, of which it was seen that a layer's rows are the samples."""


def gradient_features(
    module: nn.Module,
    batch: Any,
    settings: GradientSettings | None = None,
    *,
    optimizers: Iterable[Optimizer] | None = None,
    losses: Callable[[nn.Module, Any], Tensor] | None = None,
) -> Tensor:
    """Returns the projected gradient of each sample's loss, from one batched forward and backward in evaluation mode that leaves no trace.

    Equal to a loop over batches of one, since in evaluation mode samples do not see each other. A batch whose size equals one of its other
    axes (its sequence length) is run as two, so that an axis of places is never taken for the axis of samples. So is a batch in which a
    layer has as many rows as there are samples, and another number than one for one sample: where the rows of a layer are in doubt (it is
    called with vectors (B, H), or an embedding with (B,)) the first sample's forward is run alone to see, once for each shape of batch.

    Args:
        module: a LightningModule (inside a Trainer: its device, precision, strategy and optimizers are used) or any `nn.Module`.
        batch: as the module's collate function makes it, on any device.
        settings: what to compute. (default: `GradientSettings()`)
        optimizers: whose state `preconditioner="adam"` reads. (default: the Trainer's)
        losses: gives the loss of each sample, (B,), differentiable. (default: the module's `compute_sample_losses`, or the mean of its
            `compute_token_losses` where no parameter of the output embedding is chosen, else the Hugging Face model's mean token loss,
            which takes the logits of all tokens)

    Returns:
        Features (B, K), FP32, on the device that computes. Memory beyond the forward and backward: blocks of 16 MiB, and for a
        preconditioned parameter that is used more than once the inputs and output gradients of its uses. Cost beyond it, factored: per
        token and linear layer k (in + out) + K multiplications with k the root of K; dense: per sample K times the number of parameters.

    Raises:
        NotImplementedError: under a strategy that shards parameters, or for a parameter whose per-sample gradient cannot be told (named in
            the message).
        ValueError: when no parameter matches, or Adam's state is not there.
        TypeError: when the loss of each sample is not known; see `sample_losses`.
    """
    settings = settings or GradientSettings()
    _refuse_sharded(module)
    selected = select_parameters(module, settings.parameters)
    adam: dict[str, AdamMoments] = {}
    if settings.preconditioner == "adam":
        trainer = trainer_of(module)
        adam = adam_moments(optimizers if optimizers is not None else trainer.optimizers if trainer is not None else [], selected.items())

    losses = losses or _losses_for(module, selected)
    layers = layers_of(module, selected)  # before the engine's step puts device copies in the parameters' places

    def features_of(part: Any) -> Tensor:
        collector = Collector(layers, selected, adam, settings.make_projection(), batch_size_of(part), device_of(module))
        with collector.attached(module):
            with precision_of(module):
                losses_B = losses(module, part)
            size = collector.batch_size
            with collector.paused():
                mistaken = bool(collector.doubtful) and rows_are_others(collector.doubtful, part)
            if not mistaken:
                return collector.collect(losses_B)
        return torch.cat([features_of(samples_of(part, 0, size - 1)), features_of(samples_of(part, size - 1, size))])

    def rows_are_others(suspects: set[nn.Module], part: Any) -> bool:
        """Returns whether one of some layers has for one sample another number of rows than one, so that its rows are not the samples."""
        seen = _ROWS_ARE_SAMPLES.setdefault(module, set())
        key = (frozenset(layers[layer][0] for layer in suspects), frozenset(batch_axes_of(part)))
        if key in seen:
            return False
        rows: list[int | None] = []

        def note(*call: Any) -> None:
            rows.append(rows_in_doubt(*call[:3]))

        handles = [layer.register_forward_hook(note, with_kwargs=True, prepend=True) for layer in suspects]
        try:
            with torch.no_grad(), precision_of(module):
                losses(module, samples_of(part, 0, 1))
        finally:
            for handle in handles:
                handle.remove()
        if all(n == 1 for n in rows):
            seen.add(key)
        return key not in seen

    # Autograd must record, also inside a validation loop: enabling grad does not leave inference mode.
    with torch.inference_mode(False), torch.enable_grad(), leave_no_trace(module), step_of(module):
        return torch.cat([features_of(part) for part in _unambiguous(on_device(batch, device_of(module)))])


def select_parameters(module: nn.Module, patterns: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """Returns the parameters that require grad and whose names match one of the patterns (None: all), by name.

    Raises:
        ValueError: when a pattern matches none.
    """
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in trainable):
            raise ValueError(
                f"The pattern {pattern!r} matches none of the {len(trainable)} parameters that require grad, such as {list(trainable)[:3]}."
            )
    selected = {name: p for name, p in trainable.items() if patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)}
    if not selected:
        raise ValueError(f"{type(module).__name__} has no parameter that requires grad, so its samples have no gradients.")
    return selected


def _losses_for(module: nn.Module, selected: dict[str, nn.Parameter]) -> Callable[[nn.Module, Any], Tensor]:
    """Losses that need no logits of all tokens may not call the output embedding, and what is not called has no taps."""
    if has_token_losses(module) and head_parameters(module).isdisjoint(selected.values()):
        return means_of_token_losses
    return compute_sample_losses


def _unambiguous(batch: Any) -> list[Any]:
    size = batch_size_of(batch)
    if size == 1 or size not in batch_axes_of(batch):
        return [batch]
    return [samples_of(batch, 0, size - 1), samples_of(batch, size - 1, size)]


def _refuse_sharded(module: nn.Module) -> None:
    trainer = trainer_of(module)
    wrapper = trainer.strategy.model if trainer is not None else None
    wrapped = wrapper is not None and wrapper is not module and not isinstance(wrapper, DistributedDataParallel)
    if wrapped or any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in module.parameters()):
        name = type(trainer.strategy).__name__ if trainer is not None else "this parallelism"
        raise NotImplementedError(
            f"gradient_features needs whole parameters, but {name} shards them. Use strategy='auto', 'ddp' or 'megatrain' (which trains "
            "models larger than the device)."
        )
