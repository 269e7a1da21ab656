"""Manual optimization: any backward, several optimizers, steps between forwards, and weights written by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same, gradients
from tests.strategy.subject import Subject, batches


class Manual(Subject):
    """Steps by hand; keeps what the tests compare."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[Any] = []


class ByManualBackward(Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.seen += [loss.detach(), gradients(self)]
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()


class ByRawBackward(Manual):
    """Lightning's own wrappers see neither the backward nor the step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        loss = self.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        self.seen += [loss.detach(), gradients(self)]
        optimizer.step()


class TwoStepsInOne(Manual):
    """The second forward must see the weights that the first step made."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.seen += [loss.detach(), gradients(self)]
            optimizer.step()
        with torch.no_grad():
            self.seen.append(self.loss(batch))


class RawStepsInOne(Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        for _ in range(2):
            loss = self.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            self.seen += [loss.detach(), gradients(self)]
            optimizer.step()


class Accumulating(Manual):
    """Two backwards over separate graphs, one over a retained graph, and a step on every second batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        first, second = self.loss(batch), self.loss([batch[0], batch[0]])
        self.manual_backward(first, retain_graph=True)
        self.manual_backward(second)
        self.manual_backward(first)
        self.seen += [first.detach(), second.detach(), gradients(self)]
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


class ClampedByData(Manual):
    """As WGAN: `.data` is written without autograd seeing it, in resident and in streamed weights, between two forwards."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.seen += [loss.detach(), gradients(self)]
            optimizer.step()
            for parameter in self.parameters():
                parameter.data.clamp_(-0.1, 0.1)


class ClampedInCallback(Manual):
    """The module holds its host parameters again outside of steps."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.seen.append(loss.detach())
        optimizer.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.05, 0.05)


class ReplacedData(Manual):
    """`.data` is pointed at new memory."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.seen += [loss.detach(), gradients(self)]
        optimizer.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.5


@pytest.mark.parametrize(
    "kind",
    [ByManualBackward, ByRawBackward, TwoStepsInOne, RawStepsInOne, Accumulating, ClampedByData, ClampedInCallback, ReplacedData],
)
@pytest.mark.parametrize(("place", "precision"), [("cpu", "32-true"), ("cpu", "bf16-mixed"), ("emu", "32-true")])
def test_steps_by_hand_equal_plain(place: Place, kind: type[Manual], precision: Any) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = kind(), Recorder()
        make(max_epochs=2, precision=precision, callbacks=[record]).fit(model, batches())
        return model.seen, record.everything(model)

    assert_same(run, place)


def mlp(features: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, out))


class GAN(Manual):
    """Two optimizers, toggled; each loss reaches through the other's network."""

    clamp = False

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.generator, self.critic = mlp(4, 3), mlp(3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        make, judge = self.optimizers()
        noise, real = batch[0].float(), batch[1].float()[:, :3]
        ones = torch.ones(len(real), 1, device=self.device)

        self.toggle_optimizer(make)
        fake = self.generator(noise)
        loss = binary_cross_entropy_with_logits(self.critic(fake), ones)
        self.manual_backward(loss)
        self.seen += [loss.detach(), gradients(self)]
        make.step()
        make.zero_grad()
        self.untoggle_optimizer(make)

        self.toggle_optimizer(judge)
        loss = binary_cross_entropy_with_logits(self.critic(real), ones) + binary_cross_entropy_with_logits(
            self.critic(self.generator(noise).detach()), torch.zeros_like(ones)
        )
        self.manual_backward(loss)
        self.seen += [loss.detach(), gradients(self)]
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)
        if self.clamp:
            for parameter in self.critic.parameters():
                parameter.data.clamp_(-0.01, 0.01)

    def configure_optimizers(self) -> Any:
        make = torch.optim.Adam(self.generator.parameters(), 1e-2, betas=(0.5, 0.9))
        judge = torch.optim.RMSprop(self.critic.parameters(), 1e-2)
        return [make, judge], [torch.optim.lr_scheduler.StepLR(make, 1), torch.optim.lr_scheduler.StepLR(judge, 1)]

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()


class WGAN(GAN):
    clamp = True


class UntoggledGAN(GAN):
    """Without toggling the generator's loss leaves gradients in the critic too."""

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Leaves everything trainable."""

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Nothing was switched."""


@pytest.mark.parametrize("kind", [GAN, WGAN, UntoggledGAN])
def test_two_optimizers_equal_plain(place: Place, kind: type[GAN]) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = kind(), Recorder()
        make(max_epochs=2, callbacks=[record]).fit(model, batches())
        return model.seen, record.everything(model)

    assert_same(run, place)
