"""After an exception, wherever it comes from, the module is as it came and the next fit is right."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same
from tests.strategy.subject import Subject, batches


class Failing(Subject):
    """Raises once, in the second batch, at the place a subclass says."""

    error: type[BaseException] = ArithmeticError

    def __init__(self) -> None:
        super().__init__()
        self.armed = True
        self.batch_idx = 0

    def fail(self) -> None:
        if self.armed and self.batch_idx == 1:
            self.armed = False
            raise self.error("the test's own")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.batch_idx = batch_idx
        return super().training_step(batch, batch_idx)


class InForward(Failing):
    """Between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[2].register_forward_pre_hook(lambda *_: self.fail())


class InsideLayer(Failing):
    """While a layer's weights are in a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[1].dropout.register_forward_pre_hook(lambda *_: self.fail())


class InBackward(Failing):
    """After the last layer's gradients have left, before the first one's."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.batch_idx = batch_idx
        hidden = self.net.embedding(batch[0])
        for block in self.net.blocks:
            hidden = block(hidden)
            hidden.register_hook(lambda gradient: self.fail())
        return nn.functional.cross_entropy(self.net.head(self.net.norm(hidden)).flatten(0, 1), batch[1].flatten())


class InRecompute(Failing):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.net.blocks[1].up.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            self.fail()


class InOptimizerHook(Failing):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fail()


class OutOfMemory(InForward):
    error = torch.OutOfMemoryError


class Interrupted(InsideLayer):
    """The user pressed Ctrl-C; Lightning ends the process with SystemExit after its teardown."""

    error = KeyboardInterrupt


@pytest.mark.parametrize("kind", [InForward, InsideLayer, InOptimizerHook, OutOfMemory, Interrupted])
def test_the_next_fit_is_right(place: Place, kind: type[Failing]) -> None:
    assert_same(lambda make: fail_then_fit(make, kind), place)


def test_the_next_fit_is_right_after_an_error_in_backward() -> None:
    """On the CPU only: an error in a tensor's hook ends the process in the emulated device's autograd thread, engine or no engine."""
    assert_same(lambda make: fail_then_fit(make, InBackward), "cpu")


def fail_then_fit(make: MakeTrainer, kind: type[Failing]) -> Any:
    model, record = kind(), Recorder()
    with pytest.raises((kind.error, SystemExit)):
        make(max_epochs=1).fit(model, batches())
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(p.is_leaf and p.device.type == "cpu" for p in model.parameters())
    model.zero_grad()
    torch.manual_seed(3)
    make(max_epochs=1, callbacks=[record]).fit(model, batches())
    return record.everything(model)


@pytest.fixture(autouse=True)
def _ctrl_c_works_afterwards() -> Iterator[None]:
    """Lightning ignores the signal for the rest of the process once it has seen it."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def test_an_exception_in_a_recompute_surfaces_and_the_next_fit_is_right(place: Place) -> None:
    """Plain training has no recompute to fail in, so it fits once."""

    def run(make: MakeTrainer) -> Any:
        model, record = InRecompute(), Recorder()
        initial = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            make(max_epochs=1).fit(model, batches())
        except ArithmeticError:
            assert not model.armed
        model.load_state_dict(initial)
        model.armed = False
        model.zero_grad()
        torch.manual_seed(3)
        make(max_epochs=1, callbacks=[record]).fit(model, batches())
        return record.everything(model)

    assert_same(run, place)


def test_a_step_that_the_caller_survives_leaves_nothing_behind() -> None:
    """Manual optimization may catch what a backward raised and go on within the same fit."""

    class Surviving(InBackward):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.seen: list[Any] = []

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            loss = super().training_step(batch, batch_idx)
            try:
                self.manual_backward(loss)
            except ArithmeticError:
                optimizer.zero_grad()
                return
            self.seen.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()

    def run(make: MakeTrainer) -> Any:
        model = Surviving()
        make(max_epochs=2).fit(model, batches())
        return model.seen, {name: p.detach() for name, p in model.named_parameters()}

    assert_same(run, "cpu")


def test_a_step_that_returns_none_is_skipped(place: Place) -> None:
    class Skipping(Subject):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    def run(make: MakeTrainer) -> Any:
        model, record = Skipping(), Recorder()
        make(max_epochs=2, callbacks=[record]).fit(model, batches())
        return record.everything(model)

    assert_same(run, place)
