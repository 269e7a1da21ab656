"""Optimizers, their parameter groups and their schedules are the user's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same, state, streamed
from tests.strategy.subject import Subject, batches


class Lion(Optimizer):
    """Of a third party: moves by the sign of a mixture of momentum and gradient (arXiv 2302.06675, algorithm 2)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    parameter.sub_(group["lr"] * (0.9 * momentum + 0.1 * parameter.grad).sign())
                    momentum.mul_(0.99).add_(parameter.grad, alpha=0.01)
        return loss


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD with momentum": lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda p: Adam(p, 1e-2, weight_decay=0.01),
    "AdamW, amsgrad": lambda p: AdamW(p, 1e-2, amsgrad=True, maximize=True),
    "AdamW, fused by the user": lambda p: AdamW(p, 1e-2, fused=True),
    "AdamW, foreach by the user": lambda p: AdamW(p, 1e-2, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "Muon": lambda p: torch.optim.Muon([matrix for matrix in p if matrix.dim() == 2], 1e-2),
    "Lion": lambda p: Lion(p, 1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, 1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_torch_optimizer(name: str) -> None:
    class Optimized(Subject):
        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[name](self.parameters())

    def run(make: MakeTrainer) -> Any:
        model, record = Optimized(), Recorder()
        trainer = make(max_epochs=2, callbacks=[record])
        trainer.fit(model, batches())
        return record.everything(model), trainer.optimizers[0].state_dict()

    assert_same(run, "cpu")


def test_lbfgs_calls_its_closure_many_times() -> None:
    class Optimized(Subject):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    def run(make: MakeTrainer) -> Any:
        model, record = Optimized(), Recorder()
        make(max_epochs=1, callbacks=[record]).fit(model, batches())
        return record.everything(model)

    assert_same(run, "cpu")


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_the_fused_kernel_is_switched_on_and_differs_in_the_last_bits_only(place: Place, kind: type[Optimizer]) -> None:
    class Optimized(Subject):
        def configure_optimizers(self) -> Any:
            return kind(self.parameters(), lr=1e-2)

    def run(make: MakeTrainer) -> Any:
        torch.manual_seed(0)
        model = Optimized()
        trainer = make(max_epochs=2)
        trainer.fit(model, batches())
        return model, trainer.optimizers[0].param_groups[0]["fused"]

    with streamed(place, fused_optimizer=True) as make:
        found, fused = run(make)
    with streamed(place) as make:
        expected, unfused = run(make)
    assert (fused, unfused) == (True, None)
    # Adam divides by the root of the squared gradient: a last bit of a gradient near zero becomes that of a whole step of 1e-2
    torch.testing.assert_close(state(found), state(expected), rtol=1e-5, atol=1e-5)


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "by epoch": lambda o: StepLR(o, 1, 0.5),
    "by step": lambda o: {"scheduler": CosineAnnealingLR(o, 6), "interval": "step"},
    "every second step": lambda o: {"scheduler": LambdaLR(o, lambda n: 0.9**n), "interval": "step", "frequency": 2},
    "one cycle": lambda o: {"scheduler": OneCycleLR(o, 0.1, total_steps=6), "interval": "step"},
    "on a plateau": lambda o: {"scheduler": ReduceLROnPlateau(o, patience=0, threshold=10.0), "monitor": "val_loss"},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_schedules(name: str) -> None:
    class Scheduled(Subject):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), 0.1, momentum=0.9)
            return {"optimizer": optimizer, "lr_scheduler": SCHEDULES[name](optimizer)}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def run(make: MakeTrainer) -> Any:
        model, record = Scheduled(), Recorder()
        model.rates = []
        make(max_epochs=2, callbacks=[record]).fit(model, batches(), batches(1))
        assert len(set(model.rates)) > 1
        return record.everything(model), model.rates

    assert_same(run, "cpu")


def test_parameter_groups(place: Place) -> None:
    class Grouped(Subject):
        def configure_optimizers(self) -> Any:
            decayed = [p for p in self.parameters() if p.ndim > 1]
            others = [p for p in self.parameters() if p.ndim <= 1]
            return AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}], 1e-2)

    def run(make: MakeTrainer) -> Any:
        model, record = Grouped(), Recorder()
        trainer = make(max_epochs=2, callbacks=[record])
        trainer.fit(model, batches())
        return record.everything(model), [g["lr"] for g in trainer.optimizers[0].param_groups]

    assert_same(run, place)


def test_an_optimizer_made_before_the_trainer(place: Place) -> None:
    """As LightningCLI makes it: from `model.parameters()`, before any Trainer exists."""

    class Given(Subject):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = AdamW(self.parameters(), 1e-2)

        def configure_optimizers(self) -> Any:
            return self.optimizer

    def run(make: MakeTrainer) -> Any:
        model, record = Given(), Recorder()
        make(max_epochs=2, callbacks=[record]).fit(model, batches())
        return record.everything(model)

    assert_same(run, place)


def test_no_optimizer_at_all(place: Place) -> None:
    class WithoutOptimizer(Subject):
        def configure_optimizers(self) -> None:
            return None

    def run(make: MakeTrainer) -> Any:
        model = WithoutOptimizer()
        make(max_epochs=1).fit(model, batches())
        return state(model)

    assert_same(run, place)


def test_the_optimizer_step_hook_may_be_the_users(place: Place) -> None:
    class Warmed(Subject):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (self.trainer.global_step + 1)
            optimizer.step(closure=optimizer_closure)

    def run(make: MakeTrainer) -> Any:
        model, record = Warmed(), Recorder()
        make(max_epochs=2, callbacks=[record]).fit(model, batches())
        return record.everything(model)

    assert_same(run, place)
