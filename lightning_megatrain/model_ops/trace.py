"""Asking a model something without leaving a trace."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def leave_no_trace(module: nn.Module) -> Iterator[None]:
    """Runs its body with `module` in evaluation mode, and puts everything back as it was.

    Put back, also after an exception: train or eval mode of every submodule, plain tensor attributes and each parameter's `.grad` (by
    identity), and the random number generators of Python, NumPy, the CPU and the devices that hold parameters. The body works on copies of
    the buffers, so a graph of the caller's that saved one is still good. Parameters and the values of `.grad` are not copied: the body must
    not write them.

    Args:
        module: the module that the body runs.

    Yields:
        Nothing. The cost is one copy of the buffers.
    """
    modes = [(m, m.training) for m in module.modules()]
    buffers = [(m, dict(m._buffers)) for m in module.modules()]
    attributes = [(m, {k: v for k, v in vars(m).items() if isinstance(v, Tensor)}) for m in module.modules()]
    grads = [(p, p.grad) for p in module.parameters()]
    generators = _generator_states(module)
    copies = {id(b): b.detach().clone() for b in module.buffers()}
    module.eval()
    try:
        for submodule, originals in buffers:
            submodule._buffers.update({name: None if b is None else copies[id(b)] for name, b in originals.items()})
        yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode
        for submodule, originals in buffers:
            submodule._buffers.clear()
            submodule._buffers.update(originals)
        for submodule, tensors in attributes:
            for name in [k for k, v in vars(submodule).items() if isinstance(v, Tensor) and k not in tensors]:
                delattr(submodule, name)
            vars(submodule).update(tensors)
        for parameter, grad in grads:
            if parameter.grad is not grad:
                parameter.grad = grad
        _restore_generators(generators)


def _generator_states(module: nn.Module) -> dict[str, Any]:
    devices = {p.device for p in module.parameters()} | {b.device for b in module.buffers()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        devices.add(torch.device(accelerator.type, torch.accelerator.current_device_index()))
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "devices": [(d, _device_module(d).get_rng_state(d)) for d in devices if _device_module(d) is not None],
    }


def _restore_generators(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    for device, state in states["devices"]:
        _device_module(device).set_rng_state(state, device)


def _device_module(device: torch.device) -> Any:
    """Returns `torch.cuda` and its like for a device with a generator of its own, else None."""
    if device.type in ("cpu", "meta"):
        return None
    namespace = getattr(torch, device.type, None)
    return namespace if hasattr(namespace, "get_rng_state") else None
