"""What the engine must know of Hugging Face transformers; does nothing where it was never imported."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

COLLECTED = dict[str, list[Any]]


def recomputable_layers(root: nn.Module) -> dict[str, nn.Module]:
    """Layers that Hugging Face marks as safe to recompute, by path."""
    layers = sys.modules.get("transformers.modeling_layers")
    if layers is None:
        return {}
    return {name: module for name, module in root.named_modules() if isinstance(module, layers.GradientCheckpointingLayer)}


def checkpointed_modules(root: nn.Module) -> list[str]:
    """Paths of modules for which Hugging Face's own activation checkpointing is switched on."""
    return [name for name, module in root.named_modules() if getattr(module, "gradient_checkpointing", False) is True]


def without_caches(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Takes key-value caches out of the arguments of a layer that will be recomputed, as activation checkpointing does.

    A recompute would append to the cache a second time, and in training nothing reads it.

    Raises:
        ValueError: The cache already holds keys and values: the layer would attend to them, so dropping it would change the result.
    """
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or getattr(module, "_can_checkpoint_with_cache", False):
        return args, kwargs

    def dropped(value: Any) -> Any:
        if not isinstance(value, caches.Cache):
            return value
        if _layer_holds_states(value, module):
            raise ValueError(
                f"Layer {name!r} was given a {type(value).__name__} that already holds keys and values while gradients are wanted. A "
                "streamed layer is recomputed in backward, which would append to it twice. Run that forward under torch.no_grad(), or pass "
                "the prefix as inputs."
            )
        return None

    kwargs = {key: dropped(value) for key, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return tuple(dropped(value) for value in args), kwargs


def _layer_holds_states(cache: Any, module: nn.Module) -> bool:
    """Whether `cache` holds states of this layer; other layers may have written theirs in this very call."""
    indices = {index for child in module.modules() if isinstance(index := getattr(child, "layer_idx", None), int)}
    return any(
        bool(getattr(layer, "is_initialized", False)) and getattr(layer, "keys", None) is not None and layer.keys.numel() > 0
        for part in (getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None))
        for index, layer in enumerate(getattr(part, "layers", ()))
        if not indices or index in indices
    )


def _collector() -> Any:
    capturing = sys.modules.get("transformers.utils.output_capturing")
    return None if capturing is None else capturing._active_collector


def outer_collector() -> COLLECTED | None:
    """The lists in which the model call now running records what its layers produce (router logits, attentions), if it records any."""
    collector = _collector()
    collected: COLLECTED | None = None if collector is None else collector.get()
    return collected


@contextmanager
def fresh_collector(outer: COLLECTED | None) -> Iterator[COLLECTED]:
    """Records what a layer produces in lists of its own, so that it can leave the layer as further outputs."""
    collected: COLLECTED = {key: [] for key, value in (outer or {}).items() if isinstance(value, list)}
    if not collected:
        yield collected
        return
    collector = _collector()
    token = collector.set(collected)
    try:
        yield collected
    finally:
        collector.reset(token)
