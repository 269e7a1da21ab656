"""Other functions in the place of modules' forwards."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class Forwards:
    """Puts functions in the place of modules' forwards, and puts these back. True while any is replaced."""

    def __init__(self) -> None:
        self._own: dict[nn.Module, Any] = {}
        """The forward that a module had as an attribute of its own; None for its class's."""

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._own

    def __bool__(self) -> bool:
        return bool(self._own)

    def replace(self, module: nn.Module, replacement: Callable[..., Any]) -> None:
        """Calls `replacement` with the module, its plain forward, and the arguments as a tuple and a dict.

        A bound method takes the forward's place: `deepcopy` binds it to the copy, which then runs plain.
        """
        own = module.__dict__.get("forward")
        plain: Callable[..., Any] = (
            own.__func__ if isinstance(own, MethodType) else type(module).forward if own is None else _ignoring_self(own)
        )

        @functools.wraps(plain)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return replacement(self, plain, args, kwargs)

        forward.__name__ = "forward"  # a bound method is pickled by its name, and becomes the class's own again
        self._own[module] = own
        module.forward = MethodType(forward, module)

    def put_back(self) -> None:
        """Gives every module its own forward."""
        for module, own in self._own.items():
            if own is None:
                del module.forward
            else:
                module.forward = own
        self._own.clear()


def _ignoring_self(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return forward
