"""What surrounds a layer's forward and must surround its recompute in backward, so that both compute the same."""

import contextvars
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

T = TypeVar("T")


def generators_of(modules: Iterable[nn.Module]) -> list[torch.Generator]:
    """Random generators that modules hold among their attributes."""
    return [value for module in modules for value in vars(module).values() if isinstance(value, torch.Generator)]


class RandomState:
    """The global random generators (Python's, NumPy's, torch's on the host and on one device), and `generators` of a layer's own."""

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator]) -> None:
        self._own = [(generator, generator.get_state()) for generator in generators]
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device
        self._python_state = random.getstate()
        self._numpy_state: Any = np.random.get_state(legacy=False)
        self._host_state = torch.get_rng_state()
        self._device_state: Tensor | None = None if self._module is None else self._module.get_rng_state(device)

    def same_as(self, other: "RandomState") -> bool:
        """Whether nothing was drawn between the two."""
        ours, theirs = self._numpy_state["state"], other._numpy_state["state"]
        same = torch.equal(self._host_state, other._host_state) and self._python_state == other._python_state
        same = same and ours["pos"] == theirs["pos"] and np.array_equal(ours["key"], theirs["key"])
        same = same and all(torch.equal(a, b) for (_, a), (_, b) in zip(self._own, other._own, strict=True))
        if self._device_state is not None and other._device_state is not None:
            same = same and torch.equal(self._device_state, other._device_state)
        return same

    def now(self) -> "RandomState":
        """The state of the same generators now."""
        return RandomState(self._device, [generator for generator, _ in self._own])

    def restore(self) -> None:
        for generator, state in self._own:
            generator.set_state(state)
        random.setstate(self._python_state)
        np.random.set_state(self._numpy_state)
        torch.set_rng_state(self._host_state)
        if self._device_state is not None:
            self._module.set_rng_state(self._device_state, self._device)


@contextmanager
def random_state(state: RandomState | None) -> Iterator[None]:
    """Draws from `state` inside, and goes on outside as if nothing had been drawn; None draws nothing."""
    if state is None:
        yield
        return
    outside = state.now()
    state.restore()
    try:
        yield
    finally:
        outside.restore()


def _attention_kernels() -> tuple[bool, ...]:
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


def _set_attention_kernels(kernels: tuple[bool, ...]) -> None:
    flash, efficient, math, cudnn = kernels
    torch._C._set_sdp_use_flash(flash)
    torch._C._set_sdp_use_mem_efficient(efficient)
    torch._C._set_sdp_use_math(math)
    torch._C._set_sdp_use_cudnn(cudnn)


class Surroundings:
    """Autocast, default dtype, attention kernels, train and eval mode and context variables as they are when it is made.

    Backward runs after the forward's `with` blocks have been left, and on an accelerator in another thread.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._modules = modules
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in dict.fromkeys((device.type, "cpu"))
        ]
        self._default_dtype = torch.get_default_dtype()
        self._kernels = _attention_kernels()
        self._training = [module.training for module in modules]
        self._context = contextvars.copy_context()

    def run(self, function: Callable[[], T]) -> T:
        """Calls `function` in these surroundings and puts back what it found."""

        def inside() -> T:
            with ExitStack() as stack:
                for kind, enabled, dtype in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
                stack.enter_context(self._modes())
                return function()

        return self._context.copy().run(inside)

    @contextmanager
    def _modes(self) -> Iterator[None]:
        dtype, kernels, training = torch.get_default_dtype(), _attention_kernels(), [module.training for module in self._modules]
        try:
            torch.set_default_dtype(self._default_dtype)
            if kernels != self._kernels:
                _set_attention_kernels(self._kernels)
            self._set_training(self._training)
            yield
        finally:
            torch.set_default_dtype(dtype)
            if kernels != self._kernels:
                _set_attention_kernels(kernels)
            self._set_training(training)

    def _set_training(self, training: list[bool]) -> None:
        for module, mode in zip(self._modules, training, strict=True):
            module.training = mode


@contextmanager
def no_cast_cache() -> Iterator[None]:
    """Switches autocast's cache off: it would keep a cast copy of every streamed weight until the step's autocast ends."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
