"""Runs a subject under a Trainer and keeps every number."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_megatrain import MegaTrainStrategy
from tests.parity.subject import BATCHES, Batch, Subject

Numbers = dict[str, Tensor | None]

CLIPPING: dict[str, dict[str, Any]] = {
    "unclipped": {},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}

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
        self.trace.losses[f"batch {batch_idx}"] = _copy(loss)
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


class _Batches(Dataset[Batch]):
    def __init__(self, subject: Subject) -> None:
        self._batches = [subject.batch(index) for index in range(BATCHES)]

    def __len__(self) -> int:
        return len(self._batches)

    @override
    def __getitem__(self, index: int) -> Batch:
        return self._batches[index]


def train(
    subject: Subject, strategy: str | Strategy, accelerator: str | Accelerator, precision: Any, accumulation: int, clipping: str
) -> Trace:
    """Trains the subject on its batches and returns what that computed."""
    torch.manual_seed(1)
    net = subject.build().train()
    parts = _parts(net)
    task = _Task(net, subject)
    trainer = L.Trainer(
        max_epochs=1,
        devices=1,
        strategy=strategy,
        accelerator=accelerator,
        precision=precision,
        accumulate_grad_batches=accumulation,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **CLIPPING[clipping],
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
