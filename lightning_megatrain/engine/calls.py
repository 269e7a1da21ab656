"""The arguments and the results of a layer's call as flat lists of tensors.

Both are trees of tuples, lists, mappings and of objects that hold tensors in their attributes (see `records`). Whatever a layer puts into
a mapping, a list or an object that it was given (Gemma 3n hands keys and values from layer to layer in one) leaves the layer as a further
output and is then put into the caller's own.
"""

from collections import UserDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_megatrain.engine.hugging_face import PrivateCache
from lightning_megatrain.engine.records import attributes, is_record, laid_open


@dataclass(frozen=True)
class _TensorAt:
    """Stands where a tensor was, in a list of leaves."""

    index: int


def _taken_out(tree: Any) -> tuple[list[Tensor], list[Any], Any]:
    """The distinct tensors of a tree, its leaves with places for them, and its structure."""
    leaves, spec = pytree.tree_flatten(laid_open(tree))
    tensors: dict[int, tuple[_TensorAt, Tensor]] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.setdefault(id(leaf), (_TensorAt(len(tensors)), leaf))
    places = [tensors[id(leaf)][0] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return [tensor for _, tensor in tensors.values()], places, spec


def _put_back(places: Sequence[Any], spec: Any, tensors: Sequence[Tensor]) -> Any:
    return pytree.tree_unflatten([tensors[leaf.index] if isinstance(leaf, _TensorAt) else leaf for leaf in places], spec)


class Arguments:
    """One call's arguments: its distinct tensors (what is one object stays one), and everything else."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._caller = (*args, *kwargs.values())
        self._positional, self._keys = len(args), list(kwargs)
        self.tensors, self._places, self._spec = _taken_out(list(self._caller))
        self.number = len(self.tensors)

    def forget_tensors(self) -> None:
        """Drops the tensors: autograd keeps those that backward needs, and frees them when it is done."""
        self.tensors = []

    def rebuilt(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `tensors` in the place of their own, in new containers."""
        places = [leaf.new() if isinstance(leaf, PrivateCache) else leaf for leaf in self._places]
        values = _put_back(places, self._spec, tensors)
        return tuple(values[: self._positional]), dict(zip(self._keys, values[self._positional :], strict=True))

    def changes(self, layer: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> list[tuple[int, Any, Any]]:
        """What the layer put into its mapping and list arguments, as (argument, key or None to append, value).

        Raises:
            RuntimeError: The layer took something out of a container, or changed one that lies inside another argument.
        """
        before = _put_back(self._places, self._spec, tensors)
        after = (*args, *kwargs.values())
        found: list[tuple[int, Any, Any]] = []
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            changes = list(_container_changes(old, new))
            compared = isinstance(old, dict | UserDict | list | PrivateCache) or is_record(old)
            if any(kind == "removed" for kind, _, _ in changes) or (not compared and not _same_leaves(old, new)):
                raise RuntimeError(
                    f"Streamed layer {layer!r} took something out of, or changed inside, a container it was given as argument {index}. "
                    "Backward runs the layer again and could not give it the same argument. Return the new value instead, or keep the "
                    f"layer on the device with resident=[{layer!r}]."
                )
            found += [(index, key, value) for _, key, value in changes]
        return found

    def apply_changes(self, changes: Sequence[tuple[int, Any, Any]]) -> None:
        """Puts what the layer put into its copies of the containers into the caller's own, and lets go of these."""
        for index, key, value in changes:
            container = self._caller[index]
            if isinstance(container, list):
                container.append(value)
            elif isinstance(container, dict | UserDict):
                container[key] = value
            else:
                setattr(container, key, value)
        self._caller = ()


def _container_changes(old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict | UserDict) or is_record(old):
        was, now = (dict(x) if isinstance(x, dict | UserDict) else attributes(x) for x in (old, new))
        for key in was:
            if key not in now:
                yield "removed", key, None
        for key, value in now.items():
            if key not in was or not _same_leaves(was[key], value):
                yield "set", key, value
    elif isinstance(old, list):
        if len(new) < len(old) or any(not _same_leaves(a, b) for a, b in zip(old, new, strict=False)):
            yield "removed", None, None
        for value in new[len(old) :]:
            yield "appended", None, value


def _same_leaves(old: Any, new: Any) -> bool:
    if old is new:
        return True
    old_leaves, old_spec = pytree.tree_flatten(laid_open(old))
    new_leaves, new_spec = pytree.tree_flatten(laid_open(new))
    return old_spec == new_spec and all(a is b for a, b in zip(old_leaves, new_leaves, strict=True))


class Results:
    """What one call returned: its distinct tensors, and how to put the whole together from others in their place."""

    def __init__(self, value: Any) -> None:
        self.tensors, self._places, self._spec = _taken_out(value)
        self._made = [(tensor.shape, tensor.dtype) for tensor in self.tensors]

    def drop_tensors(self) -> None:
        """Lets go of the tensors, and of the graph they hang in; the structure remains."""
        self.tensors = []

    def rebuilt(self, outputs: Sequence[Tensor]) -> Any:
        """The returned value with `outputs` in the place of its tensors; the structure is let go of, as constants in it may be large."""
        value = _put_back(self._places, self._spec, outputs)
        self._places = []
        return value

    def check_same(self, again: "Results", layer: str) -> None:
        """Raises RuntimeError if a second run returned tensors of other shapes or dtypes, or another number of them."""
        if self._made != again._made:
            raise RuntimeError(
                f"Streamed layer {layer!r} returned {_listed(again._made)} when backward ran it again, but {_listed(self._made)} in "
                f"forward: it depends on something that changed in between. Keep the layer on the device with resident=[{layer!r}]."
            )


def _listed(made: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in made) or "no tensor"
