"""The arguments and the results of a layer's call as flat lists of tensors.

Arguments and results are pytrees. A mapping or list given as an argument may be changed by the layer (Gemma 3n hands keys and values from
layer to layer in one): what the layer puts into it leaves the layer as a further output and is then put into the caller's own container.
"""

from collections import UserDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_megatrain.engine.hugging_face import PrivateCache

_TENSOR = object()  # stands where a tensor was


class _Opened(dict[Any, Any]):
    """A `UserDict` argument laid open, so that the tensors in it are seen; torch's pytrees treat it as a leaf."""

    def __init__(self, original: UserDict[Any, Any]) -> None:
        super().__init__(original.data)
        self.kind = original


def _flatten_opened(opened: _Opened) -> tuple[list[Any], tuple[Any, list[Any]]]:
    return list(opened.values()), (opened.kind, list(opened.keys()))


def _unflatten_opened(values: Any, context: tuple[Any, list[Any]]) -> UserDict[Any, Any]:
    """A new container of the same kind, never the caller's own."""
    kind, keys = context
    container = kind.__class__.__new__(kind.__class__)
    container.__dict__.update({key: value for key, value in vars(kind).items() if key != "data"})
    container.data = dict(zip(keys, values, strict=True))
    return container


pytree.register_pytree_node(_Opened, _flatten_opened, _unflatten_opened)


class Arguments:
    """One call's arguments: its tensors, and everything else."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._caller = (*args, *kwargs.values())
        opened = [_Opened(value) if isinstance(value, UserDict) else value for value in self._caller]
        keys = list(kwargs)
        self._positional, self._keys = len(args), keys
        leaves, self._spec = pytree.tree_flatten(opened)
        self.tensors: list[Tensor] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.number = len(self.tensors)
        self._constants = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def forget_tensors(self) -> None:
        """Drops the tensors: autograd keeps those that backward needs, and frees them when it is done."""
        self.tensors = []

    def rebuilt(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `tensors` in the place of their own, in new containers."""
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf.new() if isinstance(leaf, PrivateCache) else leaf for leaf in self._constants]
        values = pytree.tree_unflatten(leaves, self._spec)
        return tuple(values[: self._positional]), dict(zip(self._keys, values[self._positional :], strict=True))

    def changes(self, layer: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> list[tuple[int, Any, Any]]:
        """What the layer put into its mapping and list arguments, as (argument, key or None to append, value).

        Raises:
            RuntimeError: The layer took something out of a container, or changed one that lies inside another argument.
        """
        given = iter(tensors)
        before = pytree.tree_unflatten([next(given) if leaf is _TENSOR else leaf for leaf in self._constants], self._spec)
        after = (*args, *kwargs.values())
        found: list[tuple[int, Any, Any]] = []
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            changes = list(_container_changes(old, new))
            compared = isinstance(old, dict | UserDict | list | PrivateCache)
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
            if key is None:
                container.append(value)
            else:
                container[key] = value
        self._caller = ()


def _container_changes(old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict | UserDict):
        for key in old:
            if key not in new:
                yield "removed", key, None
        for key, value in new.items():
            if key not in old or not _same_leaves(old[key], value):
                yield "set", key, value
    elif isinstance(old, list):
        if len(new) < len(old) or any(not _same_leaves(a, b) for a, b in zip(old, new, strict=False)):
            yield "removed", None, None
        for value in new[len(old) :]:
            yield "appended", None, value


def _same_leaves(old: Any, new: Any) -> bool:
    if old is new:
        return True
    old_leaves, old_spec = pytree.tree_flatten(old)
    new_leaves, new_spec = pytree.tree_flatten(new)
    return old_spec == new_spec and all(a is b for a, b in zip(old_leaves, new_leaves, strict=True))


class Results:
    """What one call returned: its distinct tensors, and how to put the whole together from others in their place."""

    def __init__(self, value: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(value)
        self.tensors: list[Tensor] = []
        known: dict[int, int] = {}
        self._leaves: list[tuple[int | None, Any]] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self._leaves.append((None, leaf))
                continue
            if id(leaf) not in known:
                known[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf)
            self._leaves.append((known[id(leaf)], None))
        self._made = [(tensor.shape, tensor.dtype) for tensor in self.tensors]

    def drop_tensors(self) -> None:
        """Lets go of the tensors, and of the graph they hang in; the structure remains."""
        self.tensors = []

    def rebuilt(self, outputs: Sequence[Tensor]) -> Any:
        """The returned value with `outputs` in the place of its tensors; the structure is let go of, as constants in it may be large."""
        leaves = [constant if index is None else outputs[index] for index, constant in self._leaves]
        self._leaves = []
        return pytree.tree_unflatten(leaves, self._spec)

    def check_same(self, again: "Results", layer: str) -> None:
        """Raises RuntimeError if a second run returned tensors of other shapes or dtypes, or another number of them."""
        if self._made != again._made:
            raise RuntimeError(
                f"Streamed layer {layer!r} returned {_listed(again._made)} when backward ran it again, but {_listed(self._made)} in "
                f"forward: it depends on something that changed in between. Keep the layer on the device with resident=[{layer!r}]."
            )


def _listed(made: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in made) or "no tensor"
