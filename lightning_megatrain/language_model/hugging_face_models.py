"""Finding and building Hugging Face causal language models."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")


def load_config(model: str | dict[str, Any], revision: str | None = None) -> PretrainedConfig:
    """Find a model's config without its weights.

    Args:
        model: A hub id, a local folder, or `model_type` and the fields of its config.
        revision: The version of a hub model.

    Raises:
        ValueError: There is no such model or type, or a field that its config does not know.
    """
    if isinstance(model, str):
        try:
            return AutoConfig.from_pretrained(model, revision=revision)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"No model config could be loaded from {model!r}: give a hub id or a folder with a config.json. ({error})"
            ) from error
    fields = dict(model)
    kind = fields.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"`model` has model_type={kind!r}, which transformers does not know: give one such as 'llama', with the fields of its config."
        )
    known = CONFIG_MAPPING[kind]()
    unknown = [field for field in fields if not hasattr(known, field)]
    if unknown:
        raise ValueError(f"`model` has the unknown key {unknown[0]!r}: {type(known).__name__} has no such field.")
    config = AutoConfig.for_model(kind, **fields)
    # Default special tokens of the type may lie outside a small vocabulary.
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, token, None)
        if token not in fields and isinstance(value, int) and value >= config.get_text_config().vocab_size:
            setattr(config, token, None)
    return config


def as_mapping(config: PretrainedConfig) -> dict[str, Any]:
    """Return a config as what `load_config` takes for one: without what others wrote into its file, which transformers hands on."""
    known = type(config)()
    return {key: value for key, value in config.to_diff_dict().items() if key == "model_type" or hasattr(known, key)}


def with_fields(described: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a model with some fields changed; with fewer layers, what it lists for each layer is cut too."""
    changed = {**described, **fields}
    for key in LAYER_COUNTS:
        before, after = described.get(key), fields.get(key)
        if isinstance(before, int) and isinstance(after, int) and after < before:
            cut = {name: value[:after] for name, value in described.items() if isinstance(value, list) and len(value) == before}
            changed = {**changed, **cut, **fields}
    return changed


def build_model(
    model: str | dict[str, Any],
    config: PretrainedConfig,
    revision: str | None,
    attn_implementation: str | None,
    lora: dict[str, Any] | None,
    pretrained: bool,
) -> PreTrainedModel:
    """Make a model in FP32 on the CPU, adapters included; the arguments are those of :class:`~lightning_megatrain.language_model.CausalLM`.

    Args:
        model: Where the weights are, if they are loaded.
        config: The model's.
        revision: The version of a hub model.
        attn_implementation: None: what transformers chooses.
        lora: Arguments of `peft.LoraConfig`. None: no adapters.
        pretrained: Load the weights; else they are random.
    """
    options: dict[str, Any] = {"dtype": torch.float32}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if pretrained:
        built = AutoModelForCausalLM.from_pretrained(model, revision=revision, **options)
    else:
        built = AutoModelForCausalLM.from_config(config, **options)
    if lora is not None:
        peft = import_peft()
        built = peft.get_peft_model(built, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    return built


def import_class(path: str) -> Any:
    """Return the class at a dotted path; ValueError where there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"`optimizer` is {path!r}, which cannot be imported: give a dotted path such as 'torch.optim.AdamW'. ({error})"
        ) from error


def import_peft() -> Any:
    """Return peft; ModuleNotFoundError says what to install."""
    try:
        return importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "`lora` needs peft: pip install 'lightning-megatrain[lora]', or leave `lora` out to train all weights."
        ) from error
