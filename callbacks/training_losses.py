"""The losses of single samples in the training step itself, without a second forward, and their weights in its loss.

Shapes: B samples, T tokens, V vocabulary or classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatrain.callbacks.errors import PolicyError
from lightning_megatrain.callbacks.gather import gather_rows
from lightning_megatrain.model_ops.hugging_face import (
    IGNORED,
    base_of,
    classification_losses,
    find_model,
    labels_of,
    task_of,
    token_losses_from_logits,
)

WHAT_TO_RETURN = (
    "Return from `training_step` a dict with the scalar `loss` and one of\n"
    "  `sample_losses`: the loss of each sample (B,), with its graph; with `sample_tokens` (B,) too, each is a sum over so many tokens;\n"
    "    `loss` is their mean, and what you add to it is kept as it is\n"
    "  `token_losses`: the cross-entropy of each next token (B, T - 1) from which `loss` is made, with its graph, where the batch holds "
    "`labels`; with `loss_divisor`, what `loss` divides their sum by, if not by their number\n"
    "  `logits`: of the loss, with their graph, where the batch holds `labels`\n"
    "or train a Hugging Face model whose output has `logits` (a fused cross-entropy has none)."
)


@dataclass(frozen=True)
class StepLosses:
    """The losses of one micro-batch, detached.

    Attributes:
        losses_BT: (B, T) FP32, zero where a token does not count. T is 1 where only samples are told apart.
        counts_BT: (B, T) FP32, how many tokens each stands for: 1 or 0, or a sample's number of tokens.
        given_divisor: What the module divides the sum of the losses by, where it is not the number of tokens of this micro-batch.
    """

    losses_BT: Tensor
    counts_BT: Tensor
    given_divisor: float | None = None

    @property
    def divisor(self) -> float:
        """What the module divides the sum of the losses by."""
        return self.given_divisor or max(float(self.tokens_B.sum()), 1.0)

    @property
    def sums_B(self) -> Tensor:
        """Sum of each sample's token losses."""
        return self.losses_BT.sum(1)

    @property
    def tokens_B(self) -> Tensor:
        """Tokens of each sample that count."""
        return self.counts_BT.sum(1)

    @property
    def means_B(self) -> Tensor:
        """Mean token loss of each sample, zero without a token."""
        return self.sums_B / self.tokens_B.clamp(min=1)


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


@dataclass
class _Output:
    """What the Hugging Face model was asked and answered."""

    labels: Tensor | None
    logits: Tensor | None


class _Tap:
    def __init__(self, module: pl.LightningModule) -> None:
        self.clients: dict[Client, str] = {}
        self.tokens = False
        self._window = _Window()
        given = module.training_step
        self.own_attribute = vars(module).get("training_step")  # where the user has put one on the instance

        @functools.wraps(given)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            with _watch_model(module) as outputs:
                result = given(*args, **kwargs)
            batch = kwargs["batch"] if "batch" in kwargs else args[0]
            return self._weigh(module, result, batch, outputs)

        module.training_step = training_step  # type: ignore[method-assign]

    def _weigh(self, module: pl.LightningModule, result: Any, batch: Any, outputs: list[_Output]) -> Any:
        if result is None:
            return None  # the step is skipped
        given = result if isinstance(result, Mapping) else {"loss": result}
        try:
            losses = _losses(module, given, batch, outputs, self.tokens)
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


class _Window:
    """The mean weight of a token over the micro-batches of one optimizer step, on all ranks, each token counted as the loss counts it.

    It is known only with the last micro-batch. All are weighted relative to the mean weight in the first, and the gradient is corrected at
    the end, so that micro-batches of unlike weights keep their relation: with batches of one sample it is all there is.
    """

    def __init__(self) -> None:
        self._step = -1
        self._first_mean = self._counted = self._weighted = 0.0
        self._touched = False

    def factors(self, weights_B: Tensor, counted_B: Tensor, trainer: pl.Trainer) -> Tensor:
        """Return each sample's weight over the mean weight in the window's first micro-batch that has a token, (B,).

        Args:
            weights_B: Of a token of each sample.
            counted_B: How much each sample's tokens together count in the module's loss.
            trainer: Whose ranks.
        """
        if trainer.global_step != self._step:
            self.__init__()  # type: ignore[misc]
            self._step = trainer.global_step
        all_G, counted_G = gather_rows(weights_B, trainer).double(), gather_rows(counted_B, trainer).double()
        counted, weighted = float(counted_G.sum()), float((all_G * counted_G).sum())
        if self._first_mean == 0 and counted and not weighted:
            self._counted, self._touched = self._counted + counted, True
            return torch.zeros_like(weights_B)  # none of these samples counts
        if self._first_mean == 0:
            equal = bool((all_G == all_G[0]).all())
            self._first_mean = float(all_G[0]) if equal else weighted / (counted or 1.0)
        if self._first_mean == 0:
            return torch.ones_like(weights_B)  # nothing has counted yet
        self._counted, self._weighted = self._counted + counted, self._weighted + weighted
        self._touched |= bool((all_G != self._first_mean).any())
        return (weights_B.double() / self._first_mean).to(weights_B.dtype)

    def finish(self) -> float:
        """Return the factor that is left for the gradient of the window, and begin a new one."""
        correction = self._first_mean * self._counted / self._weighted if self._touched and self._weighted else 1.0
        self.__init__()  # type: ignore[misc]
        return 1.0 if abs(correction - 1) < 1e-9 else correction  # rounding, where there was one micro-batch


def _weighted(module: pl.LightningModule, given: Mapping[str, Any], losses: StepLosses, factor_B: Tensor, outputs: list[_Output]) -> Tensor:
    """Return sum of factor x token losses over the tokens: by the graph of the sample losses, else by scaling the logits' gradient.

    The factors' mean over tokens is 1, so scaling each sample's part of the gradient keeps the module's own way of averaging (over
    devices, over an
    accumulation window) and whatever else it adds to the loss.
    """
    sums_B = given.get("sample_losses")
    if isinstance(sums_B, Tensor) and sums_B.requires_grad:
        loss, weighted = given["loss"], (factor_B * sums_B).sum() / losses.tokens_B.sum().clamp(min=1)
        return loss + (weighted - _plain_mean(loss, sums_B, losses.tokens_B))
    logits = _token_losses(given)
    if logits is None:
        logits = given.get("logits") if not outputs else _one_call(module, outputs).logits
    if logits is None:
        raise PolicyError(
            f"{type(module).__name__} returns `sample_losses` without their graph, so they cannot be weighted.\n{WHAT_TO_RETURN}"
        )
    logits.register_hook(lambda gradient: gradient * factor_B.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1)))
    loss, total = given["loss"], losses.sums_B.sum()
    change = (factor_B * losses.sums_B).sum() / torch.where(total == 0, 1, total) - 1
    return loss + (loss.detach() * change).to(loss.dtype)


def _plain_mean(loss: Tensor, sums_B: Tensor, tokens_B: Tensor) -> Tensor:
    """Return the mean of the sample losses that is in ``loss``: over tokens, unless ``loss`` is the mean over samples of their means."""
    over_tokens, over_samples = sums_B.sum() / tokens_B.sum().clamp(min=1), (sums_B / tokens_B.clamp(min=1)).mean()
    by_samples = torch.isclose(loss, over_samples, rtol=1e-3) and not torch.isclose(loss, over_tokens, rtol=1e-3)
    return over_samples if by_samples else over_tokens


def _check_shape(module: pl.LightningModule, given: Mapping[str, Any], name: str) -> None:
    """Refuse what is not one number for each sample."""
    values = given.get(name)
    if values is None:
        return
    if not isinstance(values, Tensor):
        raise TypeError(f"`{name}` of {type(module).__name__}.training_step must be a tensor (B,), got a {type(values).__name__}.")
    last = getattr(module.trainer.train_dataloader, "last", None)
    size = len(values.flatten()) if last is None else len(last.index)
    if values.shape != (size,):
        raise TypeError(
            f"`{name}` of {type(module).__name__}.training_step must be (B,) = ({size},), one number for each sample, got "
            f"{tuple(values.shape)}."
        )


def _losses(module: pl.LightningModule, given: Mapping[str, Any], batch: Any, outputs: list[_Output], tokens: bool) -> StepLosses:
    """Find the losses of the samples in what the step returned, or in what its model answered."""
    for name in ("sample_losses", "sample_tokens"):
        _check_shape(module, given, name)
    each_BT = _token_losses(given)
    if each_BT is not None:
        losses_BT, valid_BT = F.pad(each_BT.detach().float(), (1, 0)), labels_of(batch) != IGNORED  # each at the place of its label
        valid_BT = F.pad(valid_BT[:, 1:], (1, 0))
        divisor = given.get("loss_divisor")
        return StepLosses(losses_BT, valid_BT.float(), None if divisor is None else float(divisor))
    sums_B = given.get("sample_losses")
    outputs[:] = [o for o in outputs if o.logits is not None and o.logits.requires_grad]
    logits = given.get("logits")
    logits = logits if isinstance(logits, Tensor) and logits.requires_grad else None
    if isinstance(sums_B, Tensor) and not (tokens and (outputs or logits is not None)):
        counts_B = given.get("sample_tokens", torch.ones_like(sums_B))
        return StepLosses(sums_B.detach().float().unsqueeze(1), counts_B.detach().float().unsqueeze(1))
    if outputs:
        return _losses_of_model(module, _one_call(module, outputs), batch)
    if logits is not None:
        labels = given.get("labels", batch["labels"] if isinstance(batch, Mapping) else batch[1])
        return _losses_like(given["loss"], logits, labels)
    raise TypeError(f"The losses of single samples are not known in {type(module).__name__}.training_step.\n{WHAT_TO_RETURN}")


def _token_losses(given: Mapping[str, Any]) -> Tensor | None:
    losses_BT = given.get("token_losses")
    return losses_BT if isinstance(losses_BT, Tensor) and losses_BT.requires_grad else None


def _one_call(module: pl.LightningModule, outputs: list[_Output]) -> _Output:
    if len(outputs) > 1:
        raise TypeError(
            f"{type(module).__name__}.training_step calls its model {len(outputs)} times, so it is not known which call's losses are "
            f"meant.\n{WHAT_TO_RETURN}"
        )
    return outputs[0]


def _losses_of_model(module: pl.LightningModule, output: _Output, batch: Any) -> StepLosses:
    model, logits = find_model(module), output.logits
    assert model is not None
    assert logits is not None
    labels = labels_of(batch) if output.labels is None else output.labels
    task = task_of(model)
    if task == "classification":
        losses_B = classification_losses(logits.detach(), labels, base_of(model).config.problem_type)
        return StepLosses(losses_B.unsqueeze(1), torch.ones_like(losses_B).unsqueeze(1))
    losses_BT, valid_BT = token_losses_from_logits(logits.detach(), labels, shift=task == "next_token")
    return StepLosses(losses_BT, valid_BT.float())


def _losses_like(loss: Tensor, logits: Tensor, labels: Tensor) -> StepLosses:
    """Return the cross-entropies whose mean is ``loss``: of classes, of tokens, or of next tokens."""
    tried = []
    logits, mean_loss = logits.detach().float(), loss.detach().float()
    for shift in (False, True):
        if shift and (logits.dim() < 3 or labels.dim() < 2):
            continue
        out, wanted = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
        if out.shape[:-1] != wanted.shape:
            continue
        each = F.cross_entropy(out.flatten(0, -2), wanted.flatten(), reduction="none", ignore_index=-100).view(len(labels), -1)
        counts = (wanted != -100).float().view(len(labels), -1)
        mean = each.sum() / counts.sum().clamp(min=1)
        tried.append(float(mean))
        if torch.isclose(mean, mean_loss, rtol=2e-2):  # the module may have computed it in BF16, with 8 bits
            return StepLosses(each, counts)
    raise TypeError(
        f"The step's loss is {float(mean_loss):.6g}, but its `logits` {tuple(logits.shape)} and the batch's labels "
        f"{tuple(labels.shape)} give "
        f"{' or '.join(f'{t:.6g}' for t in tried) or 'nothing'} as cross-entropy.\n{WHAT_TO_RETURN}"
    )


@contextmanager
def _watch_model(module: pl.LightningModule) -> Iterator[list[_Output]]:
    """Note each call of the module's Hugging Face model."""
    outputs: list[_Output] = []
    model = find_model(module)
    if model is None:
        yield outputs
        return

    def note(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        outputs.append(_Output(kwargs.get("labels"), logits))

    handle = model.register_forward_hook(note, with_kwargs=True)
    try:
        yield outputs
    finally:
        handle.remove()
