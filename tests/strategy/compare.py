"""Runs the same thing under plain Lightning and under the strategy and compares every number, bit for bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_megatrain import MegaTrainStrategy
from tests.emulated import EmulatedAccelerator, emulated_device
from tests.trainers import quiet_trainer

Place = Literal["cpu", "emu"]
"""Where the strategy computes; plain Lightning computes on the CPU, whose kernels the emulated accelerator shares."""


MakeTrainer = Callable[..., L.Trainer]
"""Makes a Trainer from options of its own; plain or streamed, and where, is settled."""


def plain(**options: Any) -> L.Trainer:
    """A Trainer without the strategy."""
    return quiet_trainer(accelerator="cpu", **options)


@contextmanager
def streamed(place: Place, **strategy_options: Any) -> Iterator[MakeTrainer]:
    """Gives a function that makes Trainers with the strategy at `place`; optimizers stay as the user made them."""

    def make(**options: Any) -> L.Trainer:
        strategy = MegaTrainStrategy(**{"fused_optimizer": False} | strategy_options)
        return quiet_trainer(accelerator="cpu" if place == "cpu" else EmulatedAccelerator(), strategy=strategy, **options)

    with nullcontext() if place == "cpu" else emulated_device("lazy"):
        yield make


def both(run: Callable[[MakeTrainer], Any], place: Place, **strategy_options: Any) -> tuple[Any, Any]:
    """What `run` returns with plain Lightning and with the strategy, from the same seed."""
    torch.manual_seed(0)
    expected = run(plain)
    torch.manual_seed(0)
    with streamed(place, **strategy_options) as make:
        found = run(make)
    return expected, found


def assert_same(run: Callable[[MakeTrainer], Any], place: Place, **strategy_options: Any) -> Any:
    """Asserts that `run` returns the same tree of tensors and numbers in both; returns it."""
    expected, found = both(run, place, **strategy_options)
    differ = differences(expected, found)
    assert not differ, f"plain and megatrain differ in {len(differ)} places: {differ[:6]}"
    return found


def differences(expected: Any, found: Any) -> list[str]:
    """Paths at which two trees differ; tensors are compared bit for bit."""
    left, left_spec = pytree.tree_flatten_with_path(expected)
    right, right_spec = pytree.tree_flatten_with_path(found)
    if left_spec != right_spec:
        return [f"structure: {left_spec} and {right_spec}"]
    return [pytree.keystr(path) for (path, a), (_, b) in zip(left, right, strict=True) if not _equal(a, b)]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a.detach().cpu(), b.detach().cpu())
    return bool(a == b) and isinstance(a, Tensor) == isinstance(b, Tensor)


class Recorder(Callback):
    """Keeps losses and, before each optimizer step, all gradients; `everything` adds what training left in the module."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor | None]] = []
        self.loads = 0

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.gradients.append(gradients(pl_module))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(trainer.strategy, MegaTrainStrategy):
            self.loads = trainer.strategy.engine.accounting.loads.total()
            assert self.loads > 0, "no layer was streamed"

    def everything(self, module: L.LightningModule) -> dict[str, Any]:
        """Losses, gradients, and parameters and buffers at the end."""
        return {"losses": self.losses, "gradients": self.gradients, "state": state(module)}


def gradients(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """A copy of every parameter's gradient; all of them lie on the host, or are where plain Lightning has them."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in module.named_parameters()}


def state(module: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of parameters and persistent buffers, on the host."""
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
