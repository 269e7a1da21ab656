"""Modules built late, in `configure_model` or under `trainer.init_module()`, are built on the host in FP32."""

from typing import Any

import pytest
import torch

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same, state, streamed
from tests.strategy.subject import Net, Subject, batches


class Late(Subject):
    """Idempotent, as Lightning asks: it is called in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(5)
            self.net = Net()
            assert {(p.device.type, p.dtype) for p in self.net.parameters()} == {("cpu", torch.float32)}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_model_built_in_configure_model(place: Place, precision: Any) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = Late(), Recorder()
        trainer = make(max_epochs=1, precision=precision, callbacks=[record])
        trainer.fit(model, batches(), batches(1))
        metrics = trainer.validate(model, batches(1), verbose=False)
        return record.everything(model), metrics

    assert_same(run, place)


def test_configure_model_under_bf16_true_builds_fp32_masters(place: Place) -> None:
    model = Late()
    with streamed(place) as make:
        make(max_epochs=1, precision="bf16-true").fit(model, batches(1))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_model_built_under_init_module(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        record = Recorder()
        trainer = make(max_epochs=1, callbacks=[record])
        with trainer.init_module():
            model = Subject()
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        trainer.fit(model, batches())
        return record.everything(model)

    assert_same(run, place)


def test_init_module_may_skip_initialisation_for_weights_that_are_loaded(place: Place) -> None:
    source = Subject()

    def run(make: MakeTrainer) -> Any:
        trainer = make(max_epochs=1)
        with trainer.init_module(empty_init=True):
            model = Subject()
        model.load_state_dict(source.state_dict())
        trainer.fit(model, batches())
        return state(model)

    assert_same(run, place)


def test_init_module_under_bf16_true_builds_fp32_masters(place: Place) -> None:
    with streamed(place) as make, make(precision="bf16-true").init_module():
        model = Subject()
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}
