"""Updates in backward: gradients of layers are never stored, and the numbers are those of plain training."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_megatrain import MegaTrainStrategy
from tests.strategy.compare import Place, differences, plain, state, streamed
from tests.strategy.host_adamw import HostTrained, trained
from tests.strategy.subject import Subject, batches


class Stored(Callback):
    """Keeps the names of parameters that have a gradient when a step has ended."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.names |= {name for name, p in pl_module.named_parameters() if p.grad is not None}


class Frozen(HostTrained):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0].requires_grad_(False)


class Hooked(HostTrained):
    """A parameter that someone listens to gets its gradient stored."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[1].up.weight.register_hook(lambda gradient: 2 * gradient)


class Twice(HostTrained):
    """Runs its last block twice: the gradients of both runs are summed before the update."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens_BT, targets_BT = batch
        hidden = self.net.embedding(tokens_BT)
        for block in (*self.net.blocks, self.net.blocks[-1]):
            hidden = block(hidden)
        return torch.nn.functional.cross_entropy(self.net.head(self.net.norm(hidden)).flatten(0, 1), targets_BT.flatten())


@pytest.mark.parametrize("kind", [HostTrained, Frozen, Hooked, Twice])
def test_numbers_are_those_of_plain_training(place: Place, kind: type[HostTrained]) -> None:
    expected = trained(plain, kind)
    with streamed(place, transient_gradients=True) as make:
        assert differences(expected, trained(make, kind)) == []


def test_gradients_of_layers_are_never_stored(place: Place) -> None:
    stored, model = Stored(), HostTrained()
    with streamed(place, transient_gradients=True) as make:
        make(max_steps=2, callbacks=[stored]).fit(model, batches(2))
    assert stored.names == {name for name, _ in model.named_parameters() if ".blocks." not in name}


class LooksAtGradients(Callback):
    def on_before_optimizer_step(self, *_: Any) -> None:
        """Looks at gradients."""


class Manual(HostTrained):
    automatic_optimization = False


class Steps(HostTrained):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Skips every step."""


class Forgets(HostTrained):
    """Leaves a layer that requires grad out of its optimizer."""

    def configure_optimizers(self) -> Any:
        return type(super().configure_optimizers()[0][0])(self.net.head.parameters())


@pytest.mark.parametrize(
    ("kind", "options", "strategy_options", "words"),
    [
        (HostTrained, {"accumulate_grad_batches": 2}, {}, "and accumulate_grad_batches=2 would add several. Set Trainer"),
        (
            HostTrained,
            {"callbacks": [GradientAccumulationScheduler({1: 2})]},
            {},
            "and GradientAccumulationScheduler({1: 2, 0: 1}) would add several. Take that callback out, or set MegaTrainStrategy",
        ),
        (HostTrained, {"gradient_clip_val": 0.5}, {}, "gradient_clip_val=0.5"),
        (HostTrained, {"callbacks": [LooksAtGradients()]}, {}, "LooksAtGradients.on_before_optimizer_step"),
        (Steps, {}, {}, "Steps.optimizer_step"),
        (Manual, {}, {}, "automatic optimization"),
        (Subject, {}, {}, "HostAdamW"),
        (Forgets, {}, {}, "'net.embedding.weight' and 20 more"),
        (HostTrained, {}, {"overlap_optimizer": True}, "set one of them"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(
    kind: type[Subject], options: dict[str, Any], strategy_options: dict[str, Any], words: str
) -> None:
    with (
        streamed("cpu", transient_gradients=True, **strategy_options) as make,
        pytest.raises(MisconfigurationException, match=re.escape(words)),
    ):
        make(**{"max_epochs": 1, **options}).fit(kind(), batches(2))


def test_a_schedule_that_never_accumulates_is_in_nobodys_way() -> None:
    with streamed("cpu", transient_gradients=True) as make:
        module, trainer = HostTrained(), make(max_epochs=1, callbacks=[GradientAccumulationScheduler({0: 1})])
        trainer.fit(module, batches(2))
    assert trainer.global_step == 2


class Penalised(HostTrained):
    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + 1e-2 * (self.net.blocks[1].up.bias ** 2).sum()


def test_a_parameter_that_the_loss_uses_itself_is_refused(place: Place) -> None:
    with streamed(place, transient_gradients=True) as make, pytest.raises(RuntimeError, match="A second gradient came"):
        make(max_epochs=1).fit(Penalised(), batches(1))


class FailsOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, fail: bool) -> Tensor:
        ctx.fail = fail
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fail:
            raise ZeroDivisionError
        return gradient, None


class Fails(HostTrained):
    """Its second backward fails between the last two blocks and the first."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens_BT, targets_BT = batch
        hidden = self.net.blocks[0](self.net.embedding(tokens_BT))
        hidden = FailsOnce.apply(hidden, self.training and len(self.losses) == 1)
        for block in self.net.blocks[1:]:
            hidden = block(hidden)
        return torch.nn.functional.cross_entropy(self.net.head(self.net.norm(hidden)).flatten(0, 1), targets_BT.flatten())


class KeepsGoing(Callback):
    """Tries what code might after a failure: another step, and to save."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        assert isinstance(exception, ZeroDivisionError)
        strategy = trainer.strategy
        assert isinstance(strategy, MegaTrainStrategy)
        for attempt in (strategy.lightning_module_state_dict, lambda: strategy.training_step(next(iter(batches(1))), 0)):
            with pytest.raises(RuntimeError, match="Resume from a checkpoint") as error:
                attempt()
            self.errors.append(str(error.value))


def test_a_failure_in_backward_tears_the_run() -> None:
    keeps_going = KeepsGoing()
    with streamed("cpu", transient_gradients=True) as make, pytest.raises(ZeroDivisionError):
        make(max_epochs=1, callbacks=[keeps_going]).fit(Fails(), batches(3))
    assert ["12 parameters" in error for error in keeps_going.errors] == [True, True]  # of two blocks


def test_torn_weights_are_refused_until_others_are_loaded(tmp_path: Path) -> None:
    model, whole = Fails(), tmp_path / "whole.ckpt"
    with streamed("cpu", transient_gradients=True) as make:
        trainer = make(max_epochs=1)
        trainer.fit(HostTrained(), batches(1))
        trainer.save_checkpoint(whole)
        trainer = make(max_epochs=1)
        with pytest.raises(ZeroDivisionError):
            trainer.fit(model, batches(3))
        model.losses = [0.0, 0.0]  # so that it fails no more
        for attempt in (
            lambda: trainer.save_checkpoint(tmp_path / "torn.ckpt"),
            lambda: trainer.validate(model, batches(1)),
            lambda: make(max_epochs=1).fit(model, batches(1)),
        ):
            with pytest.raises(RuntimeError, match="two different steps"):
                attempt()
        make(max_epochs=2).fit(model, batches(1), ckpt_path=whole)
        trainer.save_checkpoint(tmp_path / "mended.ckpt")


def test_a_fresh_fit_from_a_checkpoint_goes_on(tmp_path: Path) -> None:
    def run(fail: bool) -> Any:
        torch.manual_seed(0)
        model = Fails() if fail else HostTrained()
        for block in model.net.blocks:
            block.dropout.p = 0.0
        with streamed("cpu", transient_gradients=True) as make:
            trainer = make(max_epochs=1)
            trainer.fit(HostTrained(), batches(1))
            path = tmp_path / "start.ckpt"
            if not path.exists():
                trainer.save_checkpoint(path)
            if fail:
                with pytest.raises(ZeroDivisionError):
                    make(max_epochs=3).fit(model, batches(2), ckpt_path=path)
                model.losses = [0.0, 0.0]  # so that it fails no more
            make(max_epochs=3).fit(model, batches(2), ckpt_path=path)
        return state(model)

    assert differences(run(fail=False), run(fail=True)) == []
