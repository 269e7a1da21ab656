"""The loss of each token with the output embedding run over slices of tokens, so that logits never exist whole.

Shapes: B rows, T tokens a row, N = B x T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_megatrain.datamodules.packing import IGNORED
from lightning_megatrain.language_model.slices import over_slices
from lightning_megatrain.language_model.token_losses import token_losses
from lightning_megatrain.model_ops.hugging_face import base_of

_SEEN = 2  # tokens of a row that the model's own head gets to see while its hidden states are kept


class LossSlices:
    """The way from a model's call to the loss of each token, over slices where there are more tokens than fit one.

    Args:
        tokens: Tokens of a slice; None for all at once.
    """

    def __init__(self, tokens: int | None) -> None:
        self._tokens = tokens
        self._checked = self._refused = False

    def run(self, model: PreTrainedModel, call: Callable[[], Any], labels: Tensor, strategy: Strategy | None) -> tuple[Any, Tensor]:
        """Return a model's output and the cross-entropy of each next token, (B, T - 1) FP32, zero where the label is `-100`.

        A model that cannot be sliced is named in a warning, once, and runs whole. The first sliced run waits for the device.

        Args:
            model: A Hugging Face causal LM, or peft's wrapper around one.
            call: Calls it.
            labels: (B, T) int64.
            strategy: The Trainer's.
        """
        if self._tokens is not None and labels.numel() > self._tokens and not self._refused:
            try:
                return self._sliced(model, call, labels, self._tokens, strategy)
            except NotImplementedError as reason:
                self._refused = True
                rank_zero_warn(
                    f"{type(base_of(model)).__name__} makes logits of all {labels.numel()} tokens at once, in spite of "
                    f"loss_slice={self._tokens}: {reason}. loss_slice=None says that this is meant; smaller micro-batches need less memory."
                )
        outputs = call()
        return outputs, token_losses(outputs.logits, labels)

    def _sliced(
        self, model: PreTrainedModel, call: Callable[[], Any], labels: Tensor, tokens: int, strategy: Strategy | None
    ) -> tuple[Any, Tensor]:
        if strategy is not None and not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
            raise NotImplementedError(f"under {type(strategy).__name__} the head's weight is there in its own forward only")
        head, given = Head.of(model), list[Tensor]()
        with head.apart(given, loud=1.0 if self._checked else 64.0):  # loud, so that a soft cap on logits shows
            outputs = call()
        if not self._checked:
            if len(given) != 2 or given[0].shape[:-1] != labels.shape:
                raise NotImplementedError("it does not call its output embedding once on all hidden states")
            with torch.no_grad():
                own = head.logits(given[1], *head.weights)
            if own.shape != outputs.logits.shape or not torch.equal(own.float(), outputs.logits.float()):
                raise NotImplementedError("it does more between hidden states and logits than its config and attributes tell")
            self._checked = True
        outputs.logits = None
        return outputs, sliced_losses(head, given[0], labels, tokens)


def sliced_losses(head: Head, hidden: Tensor, labels: Tensor, tokens: int) -> Tensor:
    """Return the cross-entropy of each next token, (B, T - 1) FP32, zero where the label is `-100`.

    The head runs once more in backward, slice by slice. Gradients of its weights are summed over slices in FP32.

    Args:
        head: The model's.
        hidden: (B, T, H), what the head was to be given.
        labels: (B, T) int64.
        tokens: Tokens in a slice; the largest tensors are slice x V.
    """
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()  # not fewer hidden states, which would be a copy of them

    def losses(part_of_hidden: Tensor, part: slice, weights: Sequence[Tensor]) -> Tensor:
        logits = head.logits(part_of_hidden, *weights).float()
        return F.cross_entropy(logits, following[part], ignore_index=IGNORED, reduction="none")

    weights = head.weights
    result = over_slices(losses, tokens, hidden.flatten(0, 1), weights, [True] * len(weights), "loss_slice")
    return result.view_as(labels)[:, :-1]


@dataclass(frozen=True)
class Head:
    """What a model makes of its last hidden states: `logits = cap(scale * (hidden @ weight.T + bias))`."""

    linear: nn.Linear
    scale: float | None = None
    """Cohere's `logit_scale`."""
    divisor: float | None = None
    """Granite's `logits_scaling`."""
    cap: float | None = None
    """Gemma's `final_logit_softcapping`: logits stay within ± this."""

    def logits(self, hidden: Tensor, *weights: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., H), a weight and perhaps a bias, by the models' own operations in their order."""
        logits = F.linear(hidden, *weights)
        if self.scale is not None:
            logits = logits * self.scale
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """Read a model's head from its attributes and config.

        Raises:
            NotImplementedError: Its output embedding is no plain linear layer.
        """
        base = base_of(model)
        linear, config = base.get_output_embeddings(), base.config.get_text_config()
        if type(linear) is not nn.Linear:
            raise NotImplementedError(f"its output embedding is a {type(linear).__name__} and no nn.Linear")

        def number(owner: Any, name: str) -> float | None:
            value = getattr(owner, name, None)
            return value if isinstance(value, int | float) else None

        return cls(linear, number(base, "logit_scale"), number(config, "logits_scaling"), number(config, "final_logit_softcapping"))

    @property
    def weights(self) -> list[Tensor]:
        """The weight (V, H), and the bias (V,) where there is one, as they lie in the module now."""
        return [self.linear.weight] if self.linear.bias is None else [self.linear.weight, self.linear.bias]

    @contextmanager
    def apart(self, given: list[Tensor], loud: float = 1.0) -> Iterator[None]:
        """Keep from the model's own head all but the first tokens of each row.

        Args:
            given: Gets the hidden states (B, T, H) that the model gave its head, and what the head saw of them.
            loud: Factor on what the head sees.
        """

        def keep(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
            (hidden,) = args
            seen = hidden[:, :_SEEN].detach() * loud
            given.extend((hidden, seen))
            return (seen,)

        hook = self.linear.register_forward_pre_hook(keep)
        try:
            yield
        finally:
            hook.remove()
