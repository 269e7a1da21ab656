"""The losses of single samples in the training step itself, without a second forward, and their weights in its loss.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from torch import Tensor

from lightning_megatrain.callbacks.errors import PolicyError
from lightning_megatrain.callbacks.step_losses import (
    WHAT_TO_RETURN,
    ModelOutput,
    StepLosses,
    differentiable,
    find_losses,
    watch_model,
)
from lightning_megatrain.callbacks.weight_window import WeightWindow
from lightning_megatrain.model_ops.hugging_face import at_least_fp32

Client = Callable[[StepLosses, Any], "Tensor | None"]
"""Sees the losses of a micro-batch and the micro-batch; returns a weight (B,) for each sample, or None to leave them."""

_TAPS: WeakKeyDictionary[pl.LightningModule, _Tap] = WeakKeyDictionary()


def tap_losses(module: pl.LightningModule, client: Client, name: str, tokens: bool = False) -> None:
    """Let ``client`` see the losses of every micro-batch and weight them; several clients' weights are multiplied.

    Args:
        module: Whose ``training_step`` is wrapped, on the instance.
        client: Called in each training step, after its forward and before backward.
        name: For error messages.
        tokens: Whether it needs the loss of each token, not of each sample only. Costs one more cross-entropy where the step returns
            only sums.
    """
    tap = _TAPS.get(module)
    if tap is None:
        tap = _TAPS[module] = _Tap(module)
    tap.clients[client] = name
    tap.tokens = tap.tokens or tokens


def untap_losses(module: pl.LightningModule, client: Client) -> None:
    """Take ``client`` away; the last one leaves the module as it was."""
    tap = _TAPS.get(module)
    if tap is not None and tap.clients.pop(client, None) is not None and not tap.clients:
        vars(module).pop("training_step", None)
        if tap.own_attribute is not None:
            module.training_step = tap.own_attribute  # type: ignore[method-assign]
        del _TAPS[module]


def finish_window(module: pl.LightningModule) -> None:
    """Correct the gradients once an optimizer step's last backward has run, before they are clipped; a second call does nothing."""
    if (tap := _TAPS.get(module)) is not None:
        tap.finish_window(module)


class _Tap:
    def __init__(self, module: pl.LightningModule) -> None:
        self.clients: dict[Client, str] = {}
        self.tokens = False
        self._window = WeightWindow()
        given = module.training_step
        self.own_attribute = vars(module).get("training_step")  # where the user has put one on the instance

        @functools.wraps(given)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            with watch_model(module) as outputs:
                result = given(*args, **kwargs)
            batch = kwargs["batch"] if "batch" in kwargs else args[0]
            with _DtypeContextManager(torch.float32):  # in a step of bf16-true the default is BF16
                return self._weigh(module, result, batch, outputs)

        module.training_step = training_step  # type: ignore[method-assign]

    def _weigh(self, module: pl.LightningModule, result: Any, batch: Any, outputs: list[ModelOutput]) -> Any:
        if result is None:
            return None  # the step is skipped
        given = result if isinstance(result, Mapping) else {"loss": result}
        try:
            losses = find_losses(module, given, batch, outputs, self.tokens)
        except TypeError as error:
            names = ", ".join(dict.fromkeys(self.clients.values()))
            raise PolicyError(f"{names} failed at step {module.trainer.global_step}: {error}") from error
        weights = [w for w in [client(losses, batch) for client in list(self.clients)] if w is not None]
        if not weights:
            return result
        factor_B = self._window.factors(torch.stack(weights).prod(0), losses.tokens_B / losses.divisor, module.trainer)
        if bool((factor_B == 1).all()):
            return result  # equal weights: the module's own loss, untouched
        loss = _weighted(module, given, losses, factor_B, outputs)
        return {**result, "loss": loss} if isinstance(result, Mapping) else loss

    def finish_window(self, module: pl.LightningModule) -> None:
        """Give the gradients of an accumulation window, whose last backward has run, the weights' mean over the whole window."""
        correction = self._window.finish()
        if correction != 1:
            torch._foreach_mul_([p.grad for p in module.parameters() if p.grad is not None], correction)


def _weighted(
    module: pl.LightningModule, given: Mapping[str, Any], losses: StepLosses, factor_B: Tensor, outputs: list[ModelOutput]
) -> Tensor:
    """Return sum of factor x token losses over the tokens: by the graph of the sample losses, else by scaling the logits' gradient.

    The factors' mean over tokens is 1, so scaling each sample's part of the gradient keeps the module's own way of averaging (over
    devices, over an accumulation window) and whatever else it adds to the loss. Reckoned in FP32, and returned in the dtype of the
    module's loss.
    """
    loss, sums_B = given["loss"], given.get("sample_losses")
    if isinstance(sums_B, Tensor) and sums_B.requires_grad:
        sums_B = at_least_fp32(sums_B)  # once, so that the gradients of the two means are summed before they are rounded
        weighted = (factor_B * sums_B).sum() / losses.tokens_B.sum().clamp(min=1)
        return (at_least_fp32(loss) + (weighted - _plain_mean(loss, sums_B, losses.tokens_B))).to(loss.dtype)
    made_of = differentiable(module, given, outputs)
    if made_of is None:
        raise PolicyError(
            f"{type(module).__name__} returns `sample_losses` without their graph, so they cannot be weighted.\n{WHAT_TO_RETURN}"
        )
    made_of.register_hook(lambda gradient: (gradient * factor_B.view(-1, *[1] * (gradient.dim() - 1))).to(gradient.dtype))
    total = losses.sums_B.sum()
    change = (factor_B * losses.sums_B).sum() / torch.where(total == 0, 1, total) - 1
    return (at_least_fp32(loss) + at_least_fp32(loss.detach()) * change).to(loss.dtype)


def _plain_mean(loss: Tensor, sums_B: Tensor, tokens_B: Tensor) -> Tensor:
    """Return the mean of the sample losses that is in ``loss``: over tokens, unless ``loss`` is the mean over samples of their means.

    Where the two are so near that rounding ``loss`` to its dtype could make one of the other, it is the one over tokens.
    """
    over_tokens, over_samples = sums_B.sum() / tokens_B.sum().clamp(min=1), (sums_B / tokens_B.clamp(min=1)).mean()
    rounding = max(1e-3, torch.finfo(loss.dtype).eps / 2)  # in BF16 2^-8
    close = functools.partial(torch.isclose, loss.to(over_tokens.dtype), rtol=rounding)
    return over_samples if close(over_samples) and not close(over_tokens) else over_tokens
