"""Where and how a model runs: its device, its precision, and the wrapper its strategy put around it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_megatrain.engine import Engine

T = TypeVar("T")


def trainer_of(module: nn.Module) -> "pl.Trainer | None":
    """Returns the Trainer that `module` is attached to, None for a plain module or outside any Trainer."""
    trainer = getattr(module, "_trainer", None)
    return trainer if isinstance(trainer, pl.Trainer) else None


def device_of(module: nn.Module) -> torch.device:
    """Returns the device that computes: the strategy's root device while a Trainer runs, else where the first parameter is."""
    trainer = trainer_of(module)
    if trainer is not None and trainer.state.status == TrainerStatus.RUNNING:
        return trainer.strategy.root_device
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def step_of(module: nn.Module) -> AbstractContextManager[None]:
    """Returns the engine's step under the megatrain strategy, where all of an operation belongs; elsewhere a context that does nothing."""
    trainer = trainer_of(module)
    running = trainer is not None and trainer.state.status == TrainerStatus.RUNNING
    engine = getattr(trainer.strategy, "engine", None) if trainer is not None and running else None
    return engine.step() if isinstance(engine, Engine) else nullcontext()


@contextmanager
def precision_of(module: nn.Module) -> Iterator[None]:
    """Runs its body in the precision of the Trainer that `module` is attached to; outside one changes nothing."""
    trainer = trainer_of(module)
    if trainer is None:
        yield
    else:
        with trainer.precision_plugin.forward_context():
            yield


def on_device(batch: Any, device: torch.device) -> Any:
    """Returns `batch` with every tensor on `device`, and none that was made in inference mode (autograd cannot save those)."""
    batch = move_data_to_device(batch, device)
    return apply_to_collection(batch, Tensor, lambda t: t.clone() if t.is_inference() else t)


def through_wrapper(module: nn.Module, call: Callable[[Any], T], batch: Any) -> T:
    """Returns `call(batch)`, inside the forward of the strategy's wrapper where that is what gathers the weights.

    FSDP and DeepSpeed gather parameters in their own forward. DDP does not, and would expect a backward: it is passed by.
    """
    trainer = trainer_of(module)
    wrapper = trainer.strategy.model if trainer is not None and trainer.state.status == TrainerStatus.RUNNING else None
    if wrapper is None or wrapper is module or isinstance(wrapper, DistributedDataParallel):
        return call(batch)
    patched, previous = "forward" in vars(module), module.forward

    def restore() -> None:
        if patched:
            module.forward = previous
        else:
            vars(module).pop("forward", None)

    def redirected(inner_batch: Any) -> T:
        restore()  # at once: `call` may want the real forward
        return call(inner_batch)

    module.forward = redirected
    try:
        return wrapper(batch)
    finally:
        restore()


def batch_size_of(batch: Any) -> int:
    """Returns the number of samples: the first axis of `input_ids`, else of the first tensor in `batch`."""
    if hasattr(batch, "keys") and "input_ids" in batch:
        return len(batch["input_ids"])
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda t: sizes.append(len(t)) if t.dim() else None)
    if not sizes:
        raise ValueError("The batch holds no tensor with a sample axis, so the number of samples is unknown.")
    return sizes[0]


def samples_of(batch: Any, start: int, stop: int) -> Any:
    """Returns samples `start` to `stop` of `batch`: every tensor with the batch's first axis is cut, the rest is left as it is."""
    size = batch_size_of(batch)
    return apply_to_collection(batch, Tensor, lambda t: t[start:stop] if t.dim() and len(t) == size else t)


def batch_axes_of(batch: Any) -> set[int]:
    """Returns the lengths of all axes of the batch's tensors but the first."""
    lengths: set[int] = set()
    apply_to_collection(batch, Tensor, lambda t: lengths.update(t.shape[1:]))
    return lengths
