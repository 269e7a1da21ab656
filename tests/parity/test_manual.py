"""Several backwards in a step train alike, plain and streamed."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_megatrain import MegaTrainStrategy
from tests.emulated import EmulatedAccelerator, emulated_device
from tests.parity.stacks import WIDTH, Dropping, Stack
from tests.trainers import quiet_trainer


class _Manual(L.LightningModule):
    """Steps each of two optimizers by itself; keeps a copy of every gradient before each step."""

    automatic_optimization = False

    def __init__(self, raw: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = Stack(Dropping), Stack(Dropping)
        self.raw = raw
        self.seen: list[Tensor | None] = []

    def _backward(self, loss: Tensor, **options: Any) -> None:
        if self.raw:
            loss.backward(**options)
        else:
            self.manual_backward(loss, **options)

    def _step(self, optimizer: Any) -> None:
        self.seen += [None if p.grad is None else p.grad.detach().clone() for p in self.parameters()]
        optimizer.step()
        optimizer.zero_grad()

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        # one forward, two losses, a backward for each
        self.toggle_optimizer(first)
        hidden = self.first.run(batch)
        self._backward(hidden.square().mean(), retain_graph=True)
        self._backward(mse_loss(self.second.run(hidden), batch))
        self._step(first)
        self.untoggle_optimizer(first)
        # the other half learns from what the first has just learnt
        self.toggle_optimizer(second)
        self._backward(mse_loss(self.second.run(self.first.run(batch)), batch))
        self._step(second)
        self.untoggle_optimizer(second)

    @override
    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.first.parameters(), 0.1, momentum=0.9), torch.optim.AdamW(self.second.parameters(), 1e-2)]


def _train(strategy: str | Strategy, accelerator: str | Accelerator, precision: Any, raw: bool) -> list[Tensor | None]:
    model = _Manual(raw)
    torch.manual_seed(2)
    data = [torch.randn(2, 5, WIDTH) for _ in range(3)]
    trainer = quiet_trainer(
        max_epochs=1,
        devices=1,
        strategy=strategy,
        accelerator=accelerator,
        precision=precision,
    )
    trainer.fit(model, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return [*model.seen, *[p.detach().clone() for p in model.parameters()]]


@pytest.mark.parametrize("raw", [False, True], ids=["manual_backward", "backward"])
@pytest.mark.parametrize("accelerator", ["cpu", "emu"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_two_backwards_of_one_forward_and_two_optimizers(precision: str, accelerator: str, raw: bool) -> None:
    plain = _train("auto", "cpu", precision, raw)
    assert {gradient is None for gradient in plain} == {True, False}
    megatrain = MegaTrainStrategy(fused_optimizer=False)
    if accelerator == "emu":
        with emulated_device("random:0"):
            streamed = _train(megatrain, EmulatedAccelerator(), precision, raw)
    else:
        streamed = _train(megatrain, "cpu", precision, raw)
    assert [a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(plain, streamed, strict=True)] == [True] * len(plain)
