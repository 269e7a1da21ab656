"""Puts other tensors where a module keeps its parameters, and puts the parameters back."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

Place = tuple[Any, Any]
"""A container (a module's `_parameters`, or a list held by a module) and the key of the parameter in it."""


def places_of(modules: Iterable[nn.Module]) -> dict[Parameter, list[Place]]:
    """Every place in which `modules` refer to a parameter: registered ones, and lists such as an LSTM's flat weights."""
    places: dict[Parameter, list[Place]] = defaultdict(list)
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[parameter].append((module._parameters, name))
        for value in vars(module).values():
            if isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, Parameter):
                        places[item].append((value, index))
    return places


def place(places: Iterable[Place], tensor: Tensor) -> None:
    """Puts `tensor` in all `places`."""
    for container, key in places:
        container[key] = tensor


@contextmanager
def placed(places: Sequence[Sequence[Place]], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Puts each tensor in its places while the context lasts, then what was there before."""
    before = [[container[key] for container, key in places_of_one] for places_of_one in places]
    try:
        for places_of_one, tensor in zip(places, tensors, strict=True):
            place(places_of_one, tensor)
        yield
    finally:
        for places_of_one, values in zip(places, before, strict=True):
            for (container, key), value in zip(places_of_one, values, strict=True):
                container[key] = value
