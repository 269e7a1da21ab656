"""What the engine must know of Hugging Face transformers; does nothing where it was never imported."""

import copy
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


def private_caches(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces key-value caches among the arguments of a layer that will be recomputed by empty ones of its own.

    In training nothing reads the cache, but the layer writes it, and the recompute would write it a second time. Leaving it out altogether
    would change results in the last bit: what comes out of a cache is contiguous, and kernels choose by strides.

    Raises:
        ValueError: The cache already holds keys and values of this layer, which would attend to them.
    """
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or getattr(module, "_can_checkpoint_with_cache", False):
        return args, kwargs
    kinds = (caches.Cache, caches.EncoderDecoderCache)

    def private(value: Any) -> Any:
        if not isinstance(value, kinds):
            return value
        cache = PrivateCache(value, module)
        if cache.holds_states():
            raise ValueError(
                f"Layer {name!r} was given a {type(value).__name__} that already holds keys and values while gradients are wanted. A "
                "streamed layer is recomputed in backward, which would append to it twice. Run that forward under torch.no_grad(), or pass "
                "the prefix as inputs."
            )
        return cache

    return tuple(private(value) for value in args), {key: private(value) for key, value in kwargs.items()}


class PrivateCache:
    """Makes empty caches like one that was given to a layer."""

    def __init__(self, cache: Any, module: nn.Module) -> None:
        self._indices = {index for child in module.modules() if isinstance(index := getattr(child, "layer_idx", None), int)}
        self._empty = self._copy(cache)

    def new(self) -> Any:
        """Returns a new empty cache."""
        return self._copy(self._empty)

    def holds_states(self) -> bool:
        """Whether the cache holds states of this layer; other layers may have written theirs in this very call."""
        parts = (getattr(self._empty, "self_attention_cache", self._empty), getattr(self._empty, "cross_attention_cache", None))
        return any(_initialized(layer) for part in parts for index, layer in enumerate(getattr(part, "layers", ())) if self._ours(index))

    def _ours(self, index: int) -> bool:
        return not self._indices or index in self._indices

    def _copy(self, cache: Any) -> Any:
        """A shallow copy whose parts for this layer can be written without anyone else seeing it."""
        new = copy.copy(cache)
        for part in ("self_attention_cache", "cross_attention_cache"):
            if hasattr(cache, part):
                setattr(new, part, self._copy(getattr(cache, part)))
        if hasattr(cache, "is_updated"):
            new.is_updated = dict(cache.is_updated)
        if isinstance(getattr(cache, "layers", None), list):
            new.layers = [_copied(layer) if self._ours(index) else layer for index, layer in enumerate(cache.layers)]
        return new


def _copied(layer: Any) -> Any:
    """A copy of one layer's part of a cache; linear attention keeps its states in mappings."""
    new = copy.copy(layer)
    vars(new).update({name: copy.copy(value) for name, value in vars(layer).items() if isinstance(value, dict | list)})
    return new


def _initialized(layer: Any) -> bool:
    keys = bool(getattr(layer, "is_initialized", False)) and getattr(layer, "keys", None) is not None and layer.keys.numel() > 0
    return keys or any(getattr(layer, "has_previous_state", {}).values())


def _collector() -> Any:
    capturing = sys.modules.get("transformers.utils.output_capturing")
    return None if capturing is None else capturing._active_collector


def outer_collector() -> COLLECTED | None:
    """The lists in which the model call now running records what its layers produce (router logits, attentions), if it records any."""
    collector = _collector()
    collected: COLLECTED | None = None if collector is None else collector.get()
    return collected


def collected_keys() -> list[str]:
    """What the model call now running records."""
    return [key for key, value in (outer_collector() or {}).items() if isinstance(value, list)]


@contextmanager
def collecting(lists: COLLECTED | None) -> Iterator[None]:
    """Lets layers record into `lists` while the context lasts, or nowhere."""
    collector = _collector()
    if collector is None:
        yield
        return
    token = collector.set(lists)
    try:
        yield
    finally:
        collector.reset(token)
