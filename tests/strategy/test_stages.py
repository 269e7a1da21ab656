"""Fit, validate, test and predict, alone and one after another, give plain Lightning's numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same, state
from tests.strategy.subject import Subject, batches


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fit_with_validation_equals_plain(place: Place, precision: Any) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = Subject(), Recorder()
        trainer = make(max_epochs=2, val_check_interval=2, precision=precision, callbacks=[record])
        trainer.fit(model, batches(), batches(2))
        return record.everything(model), dict(trainer.callback_metrics)

    assert_same(run, place)


def test_validate_test_and_predict_equal_plain(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model, trainer = Subject(), make()
        metrics = [trainer.validate(model, batches(2), verbose=False), trainer.test(model, batches(2), verbose=False)]
        return metrics, trainer.predict(model, batches(2)), state(model)

    assert_same(run, place)


def test_evaluation_builds_no_optimizer_and_keeps_no_gradient(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model, trainer = Subject(), make()
        trainer.validate(model, batches(1), verbose=False)
        assert trainer.optimizers == []
        return [p.grad for p in model.parameters()]

    assert_same(run, place)


def test_one_trainer_and_one_module_go_through_every_order_of_stages(place: Place) -> None:
    """Validation runs in inference mode; nothing it allocates may reach a later fit."""

    def run(make: MakeTrainer) -> Any:
        model, record = Subject(), Recorder()
        trainer = make(max_epochs=1, callbacks=[record])
        seen: list[Any] = [trainer.validate(model, batches(2), verbose=False)]
        trainer.fit(model, batches())
        seen += [trainer.validate(model, batches(2), verbose=False), trainer.predict(model, batches(1))]
        trainer.fit_loop.max_epochs = 3
        trainer.fit(model, batches(), batches(1))
        seen += [trainer.test(model, batches(2), verbose=False)]
        return record.everything(model), seen

    assert_same(run, place)


def test_the_same_module_fits_twice_with_two_trainers(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model, records = Subject(), [Recorder(), Recorder()]
        for record in records:
            make(max_epochs=1, callbacks=[record]).fit(model, batches())
        return [record.everything(model) for record in records]

    assert_same(run, place)


def test_the_module_answers_with_host_tensors_after_a_fit(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model = Subject()
        make(max_epochs=1).fit(model, batches())
        model.eval()
        logits: Tensor = model(torch.arange(4)[None])
        logits.sum().backward()
        assert logits.device.type == "cpu"
        assert model.device.type == "cpu"
        return logits, [p.grad for p in model.parameters()]

    assert_same(run, place)


def test_several_validation_loaders(place: Place) -> None:
    class TwoLoaders(Subject):
        def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.loss(batch))

    def run(make: MakeTrainer) -> Any:
        trainer, model = make(max_epochs=1), TwoLoaders()
        trainer.fit(model, batches(), [batches(1), batches(2)])
        return dict(trainer.callback_metrics), state(model)

    assert_same(run, place)
