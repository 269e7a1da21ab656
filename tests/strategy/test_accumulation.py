"""Accumulation over micro-batches, with a last window that is not full, and changed from epoch to epoch."""

from typing import Any

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same
from tests.strategy.subject import Subject, batches


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("window", [2, 8])
def test_accumulation_with_a_partial_last_window(place: Place, window: int, precision: Any) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = Subject(), Recorder()
        trainer = make(max_epochs=2, accumulate_grad_batches=window, precision=precision, callbacks=[record])
        trainer.fit(model, batches(5))
        return record.everything(model), trainer.global_step

    assert_same(run, place)


def test_the_window_changes_between_epochs(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = Subject(), Recorder()
        trainer = make(max_epochs=3, callbacks=[record, GradientAccumulationScheduler({0: 1, 1: 4, 2: 2})])
        trainer.fit(model, batches(5))
        return record.everything(model), trainer.global_step

    assert_same(run, place)


def test_gradients_set_to_zero_rather_than_none(place: Place) -> None:
    class Zeroed(Subject):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

    def run(make: MakeTrainer) -> Any:
        model, record = Zeroed(), Recorder()
        make(max_epochs=2, accumulate_grad_batches=2, callbacks=[record]).fit(model, batches(5))
        return record.everything(model)

    assert_same(run, place)
