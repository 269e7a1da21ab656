"""Objects that hold tensors in their attributes: dataclasses, `UserDict`s, and plain objects made for the purpose."""

import dataclasses
from collections import UserDict
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatrain.engine.hugging_face import PrivateCache

_PLAIN_NEW: Any = object.__new__


class _Open:
    """A record laid open as a node of a pytree; torch's own pytrees treat such objects as leaves, and their tensors would go unseen."""

    def __init__(self, kind: type, values: dict[str, Any]) -> None:
        self.kind, self.values = kind, values


def _flatten(node: _Open) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return list(node.values.values()), (node.kind, tuple(node.values))


def _unflatten(values: Any, context: tuple[type, tuple[str, ...]]) -> Any:
    """A new object of the same kind, made without its constructor."""
    kind, names = context
    record: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(record, name, value)  # frozen dataclasses too
    return record


pytree.register_pytree_node(_Open, _flatten, _unflatten)


def attributes(record: Any) -> dict[str, Any]:
    """The record's attributes by name, those in slots of a dataclass too."""
    fields = [field.name for field in dataclasses.fields(record)] if dataclasses.is_dataclass(record) else []
    return {**{name: getattr(record, name) for name in fields if hasattr(record, name)}, **getattr(record, "__dict__", {})}


def is_record(value: Any) -> bool:
    """Whether `value` is an object whose attributes hold tensors, or are made to, and of which another can be made."""
    if isinstance(value, Tensor | nn.Module | PrivateCache | type) or type(value).__new__ is not _PLAIN_NEW:
        return False
    settings = getattr(value, "__dataclass_params__", None)
    if isinstance(value, UserDict) or (settings is not None and not settings.frozen):
        return True  # a layer may put tensors into one that is still empty
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(list(attributes(value).values())))


def laid_open(tree: Any) -> Any:
    """The tree with the records in it as nodes, at any depth."""

    def opened(leaf: Any) -> Any:
        if not is_record(leaf):
            return leaf
        return _Open(type(leaf), {name: laid_open(value) for name, value in attributes(leaf).items()})

    return pytree.tree_map(opened, tree)
