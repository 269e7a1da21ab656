"""A penalty on the gradient of a layer's input (WGAN-GP): right where the layers are resident, refused where they are streamed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatrain.engine import Engine
from tests.emulated import emulated_device
from tests.engine.models import Tower, loss_of, tokens
from tests.strategy.compare import MakeTrainer, Place, both, gradients
from tests.strategy.subject import Subject, batches


class Penalised(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.ModuleDict({"generator": mlp(), "critic": mlp()})
        self.seen: list[Any] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        real = self.net["generator"](batch[0].float()).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net["critic"](real).sum(), real, create_graph=True)
        loss = (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.seen.append(loss.detach().cpu())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(gradients(self))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def test_with_the_critic_resident_the_penalty_trains(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model = Penalised()
        make(max_epochs=2).fit(model, batches())
        return model.seen

    expected, found = both(run, place, resident=["net.critic"])
    # 1e-6: the formulas of second derivatives differ between devices in the order of their sums
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert any(g is not None and g.any() for g in found[1].values())


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_resident_parameter_names_itself() -> None:
    with emulated_device():
        model = Tower(layers=2)
        with Engine(model, "emu"), pytest.raises(RuntimeError, match=r"went through 'head\.(weight|bias)'"):
            loss_of(model, tokens(device="emu")).backward(create_graph=True)
