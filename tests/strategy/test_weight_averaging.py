"""Averages of weights live on the host, and the weights that validation sees are the averaged ones."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same, plain, state, streamed
from tests.strategy.subject import Subject, batches


class Stop(Callback):
    """Keeps where the average lies."""

    def __init__(self) -> None:
        self.devices: set[str] = set()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        averaging = next(callback for callback in trainer.callbacks if isinstance(callback, EMAWeightAveraging))
        self.devices = {p.device.type for p in averaging._average_model.parameters()}


@pytest.mark.parametrize("device", [None, "cpu"])
def test_an_exponential_average_is_validated_and_kept(place: Place, device: str | None) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record, stop = Subject(), Recorder(), Stop()
        average = EMAWeightAveraging(device=device, decay=0.7)
        trainer = make(max_epochs=2, callbacks=[average, record, stop])
        trainer.fit(model, batches(), batches(2))
        assert stop.devices == {"cpu"}
        return record.everything(model), dict(trainer.callback_metrics)

    assert_same(run, place)


def test_an_average_without_a_device_moves_to_the_host_with_a_warning() -> None:
    with streamed("emu") as make, pytest.warns(UserWarning, match="EMAWeightAveraging keeps its average in host memory"):
        make(max_epochs=1, callbacks=[EMAWeightAveraging()]).fit(Subject(), batches(1))


def test_an_average_on_the_device_is_refused() -> None:
    with streamed("emu") as make, pytest.raises(MisconfigurationException, match=r"EMAWeightAveraging\(device='emu'\).*device='cpu'"):
        make(max_epochs=1, callbacks=[EMAWeightAveraging(device=torch.device("emu"))]).fit(Subject(), batches(1))


def test_stochastic_weight_averaging(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = Subject(), Recorder()
        average = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)
        make(max_epochs=4, callbacks=[average, record]).fit(model, batches())
        return record.everything(model)

    assert_same(run, place)


def test_an_average_is_saved_and_resumed(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        trainer = make(max_epochs=1, callbacks=[EMAWeightAveraging(device="cpu", decay=0.7)])
        trainer.fit(Subject(), batches())
        trainer.save_checkpoint("average.ckpt")
        model = Subject()
        torch.manual_seed(3)
        make(max_epochs=2, callbacks=[EMAWeightAveraging(device="cpu", decay=0.7)]).fit(
            model, batches(), ckpt_path="average.ckpt", weights_only=False
        )
        return state(model)

    assert_same(run, place)


def test_plain_lightning_puts_an_average_where_the_module_is() -> None:
    """What the strategy's move of the average answers to: on a device, that would be a whole model more there."""
    stop = Stop()
    plain(max_epochs=1, callbacks=[EMAWeightAveraging(), stop]).fit(Subject(), batches(1))
    assert stop.devices == {"cpu"}
