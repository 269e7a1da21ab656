"""Runs a subject under a Trainer and keeps every number."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_megatrain import MegaTrainStrategy
from tests.parity.subject import BATCHES, Batch, Subject
from tests.parity.table import Settings
from tests.trainers import quiet_trainer

Numbers = dict[str, Tensor | None]

CLIPPING: dict[str, dict[str, Any]] = {
    "unclipped": {},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}
# Micro-batches a step, by the epoch from which on. Five epochs of two batches make steps of 1, 1, 1, 1, 2, 2 and 2. With another clipping
# at each step in turn, steps of one and steps of two are clipped in every way.
EPOCHS, BATCHES_AN_EPOCH, ACCUMULATION = 5, 2, {0: 1, 2: 2}

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # a dozen lines for each of hundreds of runs


@dataclass
class Trace:
    """What a run computed, in order, on the host. None is a gradient that is not there."""

    losses: Numbers = field(default_factory=dict)
    gradients: Numbers = field(default_factory=dict)
    """By moment, and in each moment in the order of backward."""
    state: Numbers = field(default_factory=dict)
    """Parameters and buffers in the end."""
    module: dict[str, Any] = field(default_factory=dict)
    """What the module is made of in the end, other than numbers."""
    streamed: set[str] = field(default_factory=set)
    """Classes of the streamed layers."""
    kinds_of_steps: set[tuple[bool, str]] = field(default_factory=set)
    """Whether a step took several micro-batches, and how its gradients were clipped, for each kind of step that there was."""

    def sections(self) -> Iterator[tuple[str, Numbers]]:
        yield "loss", self.losses
        yield "gradient", self.gradients
        yield "state", self.state


class _Task(L.LightningModule):
    def __init__(self, net: nn.Module, subject: Subject) -> None:
        super().__init__()
        self.net = net
        self.subject = subject
        self.trace = Trace()

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.subject.loss(self.net, batch)
        self.trace.losses[f"batch {len(self.trace.losses)}"] = _copy(loss)
        return loss

    @override
    def on_after_backward(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, MegaTrainStrategy):
            self.trace.streamed = {type(layer.module).__name__ for layer in strategy.engine.layers}
        self._keep_gradients(f"batch {len(self.trace.losses) - 1}")

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._keep_gradients(f"optimizer step {self.global_step}")

    def _keep_gradients(self, moment: str) -> None:
        for name, parameter in reversed(list(self.net.named_parameters())):
            self.trace.gradients[f"{name} at {moment}"] = _copy(parameter.grad)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2, weight_decay=0.1)


class _EveryKindOfStep(_Task):
    """Clips each step's gradients in another way."""

    _begun = 0

    @override
    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        micro_batches, self._begun = len(self.trace.losses) - self._begun, len(self.trace.losses)
        clipping = tuple(CLIPPING)[self.global_step % len(CLIPPING)]
        self.trace.kinds_of_steps.add((micro_batches > 1, clipping))
        self.clip_gradients(optimizer, **CLIPPING[clipping])


class _Batches(Dataset[Batch]):
    def __init__(self, subject: Subject) -> None:
        self._batches = [subject.batch(index) for index in range(BATCHES)]

    def __len__(self) -> int:
        return len(self._batches)

    @override
    def __getitem__(self, index: int) -> Batch:
        return self._batches[index]


def train(subject: Subject, strategy: str | Strategy, accelerator: str | Accelerator, precision: Any, settings: Settings | None) -> Trace:
    """Trains the subject on its batches and returns what that computed."""
    torch.manual_seed(1)
    net = subject.build().train()
    parts = _parts(net)
    task = _Task(net, subject) if settings else _EveryKindOfStep(net, subject)
    options: dict[str, Any]
    if settings:
        options = {"max_epochs": 1, "accumulate_grad_batches": settings.accumulation, **CLIPPING[settings.clipping]}
    else:
        schedule = GradientAccumulationScheduler(ACCUMULATION)
        options = {"max_epochs": EPOCHS, "limit_train_batches": BATCHES_AN_EPOCH, "callbacks": schedule}
    trainer = quiet_trainer(
        devices=1,
        strategy=strategy,
        accelerator=accelerator,
        precision=precision,
        **options,
    )
    torch.manual_seed(2)
    trainer.fit(task, DataLoader(_Batches(subject), batch_size=None))
    assert all(tensor.device.type == "cpu" for tensor in (*net.parameters(), *net.buffers()))
    task.trace.state = {name: _copy(value) for name, value in (*net.named_parameters(), *net.named_buffers())}
    task.trace.module = {name: part is parts.get(name) for name, part in _parts(net).items()}
    task.trace.module |= {"state": list(net.state_dict()), "modes": [module.training for module in net.modules()]}
    return task.trace


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu().clone()


def _parts(net: nn.Module) -> dict[str, object]:
    """What a module consists of: its parameters and buffers, and the names of all that hangs on its modules (a `forward`, say)."""
    parts: dict[str, object] = dict(net.named_parameters(remove_duplicate=False))
    parts |= net.named_buffers(remove_duplicate=False)
    for path, module in net.named_modules(remove_duplicate=False):
        parts |= {f"attribute {path}.{name}": None for name in vars(module)}
    return parts
