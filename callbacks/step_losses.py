"""The losses of single samples in what a training step returned, or in what its model answered.

Shapes: B samples, T tokens, V vocabulary or classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

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


@dataclass
class ModelOutput:
    """What the Hugging Face model was asked and answered."""

    labels: Tensor | None
    logits: Tensor | None


@contextmanager
def watch_model(module: pl.LightningModule) -> Iterator[list[ModelOutput]]:
    """Note each call of the module's Hugging Face model."""
    outputs: list[ModelOutput] = []
    model = find_model(module)
    if model is None:
        yield outputs
        return

    def note(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        outputs.append(ModelOutput(kwargs.get("labels"), logits))

    handle = model.register_forward_hook(note, with_kwargs=True)
    try:
        yield outputs
    finally:
        handle.remove()


def find_losses(module: pl.LightningModule, given: Mapping[str, Any], batch: Any, outputs: list[ModelOutput], tokens: bool) -> StepLosses:
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


def differentiable(module: pl.LightningModule, given: Mapping[str, Any], outputs: list[ModelOutput]) -> Tensor | None:
    """Return what the loss is made of, with its graph and a row for each sample: the token losses, else the logits, else None."""
    losses_BT = _token_losses(given)
    if losses_BT is not None:
        return losses_BT
    return _one_call(module, outputs).logits if outputs else given.get("logits")


def _token_losses(given: Mapping[str, Any]) -> Tensor | None:
    losses_BT = given.get("token_losses")
    return losses_BT if isinstance(losses_BT, Tensor) and losses_BT.requires_grad else None


def _one_call(module: pl.LightningModule, outputs: list[ModelOutput]) -> ModelOutput:
    if len(outputs) > 1:
        raise TypeError(
            f"{type(module).__name__}.training_step calls its model {len(outputs)} times, so it is not known which call's losses are "
            f"meant.\n{WHAT_TO_RETURN}"
        )
    return outputs[0]


def _losses_of_model(module: pl.LightningModule, output: ModelOutput, batch: Any) -> StepLosses:
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
