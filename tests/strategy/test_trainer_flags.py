"""Flags of the Trainer that change how it runs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same, state, streamed
from tests.strategy.subject import Subject, batches

FLAGS: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run of two": {"fast_dev_run": 2},
    "overfit_batches": {"overfit_batches": 1, "max_epochs": 3},
    "barebones": {"barebones": True, "max_epochs": 1},
    "limits": {"limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 2},
    "max_steps": {"max_steps": 4},
    "deterministic": {"deterministic": True, "max_epochs": 1},
    "detect_anomaly": {"detect_anomaly": True, "max_epochs": 1},
    "no sanity check": {"num_sanity_val_steps": 0, "max_epochs": 1},
    "no inference mode": {"inference_mode": False, "max_epochs": 1},
    "validation within the epoch": {"val_check_interval": 1, "max_epochs": 1},
    "loaders made again": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
    "profiled": {"profiler": "simple", "max_epochs": 1},
}


@pytest.fixture(autouse=True)
def _not_deterministic_afterwards() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str) -> None:
    def run(make: MakeTrainer) -> Any:
        seed_everything(4, verbose=False)
        model, record = Subject(), Recorder()
        trainer = make(callbacks=None if name == "barebones" else [record], **FLAGS[name])
        trainer.fit(model, batches(3, shuffle=True), batches(2))
        return record.everything(model), trainer.global_step

    assert_same(run, "cpu")


@pytest.mark.parametrize("name", ["deterministic", "detect_anomaly", "no inference mode", "validation within the epoch"])
def test_flags_that_reach_into_backward_or_the_device(name: str) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = Subject(), Recorder()
        make(callbacks=[record], **FLAGS[name]).fit(model, batches(2), batches(1))
        return record.everything(model)

    assert_same(run, "emu")


def test_detect_anomaly_finds_what_went_wrong(place: Place) -> None:
    class Wrong(Subject):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self(batch[0]).mul(0).sqrt().sum() * 0

    with streamed(place) as make, pytest.raises(RuntimeError, match="nan"):
        make(max_epochs=1, detect_anomaly=True).fit(Wrong(), batches(1))


def test_loaders_whose_workers_fork_while_the_module_is_installed(place: Place) -> None:

    def run(make: MakeTrainer) -> Any:
        model = Subject()
        loader = batches(3)
        workers = torch.utils.data.DataLoader(loader.dataset, 2, num_workers=1)
        make(max_epochs=1).fit(model, workers)
        return state(model)

    assert_same(run, place)
