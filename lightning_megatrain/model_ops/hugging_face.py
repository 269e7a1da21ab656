"""The Hugging Face model inside a module: finding it, calling it, and the loss of each sample from its logits.

Shapes: B samples, T tokens, V vocabulary or classes.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

Task = Literal["next_token", "token", "classification"]
IGNORED = -100  # Hugging Face's label of a token that does not count

_TASKS: dict[str, Task] = {
    "ForCausalLM": "next_token",
    "LMHeadModel": "next_token",
    "ForConditionalGeneration": "next_token",
    "ForMaskedLM": "token",
    "ForTokenClassification": "token",
    "ForSequenceClassification": "classification",
    "ForImageClassification": "classification",
    "ForAudioClassification": "classification",
    "ForVideoClassification": "classification",
}


def find_model(module: nn.Module) -> nn.Module | None:
    """Returns the one Hugging Face model (or PEFT model around it) in `module`, None if there is none.

    Of several, such as a student and its frozen teacher, the one that trains.

    Raises:
        ValueError: when more than one trains.
    """
    found = [m for m in _outermost(module) if isinstance(m, PreTrainedModel) or _is_peft(m)]
    if len(found) > 1:
        found = [m for m in found if any(p.requires_grad for p in m.parameters())] or found
    if len(found) > 1:
        names = [name for name, m in module.named_modules() if any(m is f for f in found)]
        raise ValueError(
            f"{type(module).__name__} holds {len(found)} Hugging Face models ({', '.join(names)}), and it is not clear which to ask. "
            "Define `compute_sample_losses(self, batch)` or `compute_embeddings(self, batch)` on the module, or pass one of the models."
        )
    return found[0] if found else None


def head_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters of the output embeddings of all Hugging Face models in `module`."""
    heads = [m.get_output_embeddings() for m in module.modules() if isinstance(m, PreTrainedModel)]
    return {parameter for head in heads if head is not None for parameter in head.parameters()}


def _outermost(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, PreTrainedModel) or _is_peft(module):
        return [module]
    found: list[nn.Module] = []
    for child in module.children():
        found += [m for m in _outermost(child) if not any(m is f for f in found)]
    return found


def _is_peft(module: nn.Module) -> bool:
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def base_of(model: nn.Module) -> PreTrainedModel:
    """Returns the Hugging Face model inside a PEFT model; any other model itself."""
    return model.get_base_model() if _is_peft(model) else model  # type: ignore[operator]


def task_of(model: nn.Module) -> Task:
    """Returns what `model` was built to predict, read from its class's name.

    Raises:
        NotImplementedError: for a head whose loss per sample is not known here.
    """
    base = base_of(model)
    for cls in type(base).__mro__:
        for ending, task in _TASKS.items():
            if cls.__name__.endswith(ending):
                return "token" if ending == "ForConditionalGeneration" and base.config.is_encoder_decoder else task
    raise NotImplementedError(
        f"The loss per sample of {type(base).__name__} is not known: only causal and masked language models, encoder-decoders, and "
        "sequence, "
        "token, image, audio and video classifiers are. Define `compute_sample_losses(self, batch)` on your module, returning a tensor of "
        "shape (B,)."
    )


def forward_arguments(model: nn.Module, batch: Any, **extra: Any) -> dict[str, Any]:
    """Returns what of `batch` the model's forward names, without labels and without a key-value cache.

    Args:
        model: a Hugging Face or PEFT model.
        batch: a mapping with `input_ids`, `attention_mask`, ...
        extra: further arguments, passed only where forward names them.

    Raises:
        TypeError: when `batch` is no mapping.
    """
    if not isinstance(batch, Mapping) and not hasattr(batch, "keys"):
        raise TypeError(
            f"A Hugging Face model needs a batch that is a mapping with `input_ids`, ..., but this one is a {type(batch).__name__}. Let "
            "the collate function "
            "return a dict, or define `compute_sample_losses(self, batch)` and `compute_embeddings(self, batch)` on your module."
        )
    base = base_of(model)
    named = inspect.signature(base.forward).parameters
    arguments = {k: batch[k] for k in batch if k in named and k not in ("labels", "past_key_values", "use_cache")}
    if base.config.is_encoder_decoder and "labels" in batch and not {"decoder_input_ids", "decoder_inputs_embeds"} & arguments.keys():
        arguments["decoder_input_ids"] = base.prepare_decoder_input_ids_from_labels(batch["labels"])
    return arguments | {k: v for k, v in {"use_cache": False, **extra}.items() if k in named}


def labels_of(batch: Any) -> Tensor:
    """Returns the labels.

    Raises:
        KeyError: when there are none.
    """
    if "labels" not in batch:
        raise KeyError(
            f"The batch has no `labels` (it has {sorted(batch.keys())}), so its samples have no loss. Let the collate function add them "
            f"(for a causal language model a copy of `input_ids` with {IGNORED} where a token does not count)."
        )
    return batch["labels"]


def token_losses_from_logits(logits_BTV: Tensor, labels_BT: Tensor, shift: bool) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropy of each token in FP32, zero where it does not count, and which count.

    Args:
        logits_BTV: any floating dtype.
        labels_BT: int64, -100 where a token does not count.
        shift: whether the logits at one place predict the label at the next (causal language models).

    Returns:
        Losses (B, T) and validity (B, T), at the places of the labels: with `shift` the first place never counts.
    """
    if shift:
        labels_BT = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)
    losses_BT = F.cross_entropy(
        at_least_fp32(logits_BTV).flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED, reduction="none"
    ).view_as(labels_BT)
    valid_BT = labels_BT != IGNORED
    if shift:
        losses_BT, valid_BT = losses_BT.roll(1, dims=1), valid_BT.roll(1, dims=1)
    return losses_BT, valid_BT


def classification_losses(logits_BV: Tensor, labels: Tensor, problem_type: str | None) -> Tensor:
    """Returns the loss of each sample in FP32, as Hugging Face defines it.

    Cross-entropy, or the mean over the outputs of squared error or of binary cross-entropy.

    Args:
        logits_BV: any floating dtype.
        labels: (B,) classes, or (B, V) targets.
        problem_type: the configuration's; None decides by the number of outputs and the labels' dtype, as Hugging Face does.
    """
    logits_BV = at_least_fp32(logits_BV)
    if problem_type is None:
        whole = labels.dtype in (torch.long, torch.int)
        problem_type = "regression" if logits_BV.shape[1] == 1 else "single_label_classification" if whole else "multi_label_classification"
    if problem_type == "single_label_classification":
        return F.cross_entropy(logits_BV, labels.view(-1), reduction="none")
    targets_BV = labels.view_as(logits_BV).to(logits_BV.dtype)
    if problem_type == "regression":
        return F.mse_loss(logits_BV, targets_BV, reduction="none").mean(1)
    return F.binary_cross_entropy_with_logits(logits_BV, targets_BV, reduction="none").mean(1)


def at_least_fp32(t: Tensor) -> Tensor:
    """Returns `t` in FP32, or as it is where it is wider."""
    return t.to(torch.promote_types(t.dtype, torch.float32))
