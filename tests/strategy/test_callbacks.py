"""Lightning's own callbacks work as they do without the strategy."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelSummary
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import ModelSummary as Summary
from torch import Tensor

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same, state
from tests.strategy.subject import Subject, batches


class WithExample(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.arange(4)[None]


class KeepsSummary(ModelSummary):
    kept: Any = None

    def _summary(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Any:
        summary = super()._summary(trainer, pl_module)
        assert isinstance(summary, Summary)
        KeepsSummary.kept = (summary.layer_names, summary.param_nums, summary.in_sizes, summary.out_sizes, summary.total_flops)
        return summary


def test_model_summary_with_an_example_input(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = WithExample(), Recorder()
        make(max_epochs=1, callbacks=[KeepsSummary(max_depth=3), record]).fit(model, batches())
        return record.everything(model), str(KeepsSummary.kept)

    assert_same(run, place)


def test_early_stopping_stops_at_the_same_epoch(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = Subject(lr=0.5), Recorder()
        trainer = make(max_epochs=6, callbacks=[EarlyStopping("val_loss", patience=1), record])
        trainer.fit(model, batches(1), batches(1))
        return record.everything(model), trainer.current_epoch

    epochs = assert_same(run, place)[1]
    assert epochs < 6


def test_learning_rates_and_metrics_reach_the_logger(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        torch.manual_seed(0)
        logger = CSVLogger("logs", version=make.__qualname__)
        make(max_epochs=2, logger=logger, log_every_n_steps=1, callbacks=[LearningRateMonitor()]).fit(Subject(), batches(), batches(1))
        return logger.experiment.metrics

    assert_same(run, place)


def test_the_learning_rate_finder_leaves_the_module_as_it_was(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model = Subject()
        before = state(model)
        trainer = make(max_epochs=1, enable_checkpointing=True)
        finder = Tuner(trainer).lr_find(model, batches(8), num_training=8, early_stop_threshold=None)
        assert all(torch.equal(before[name], value) for name, value in state(model).items())
        torch.manual_seed(3)
        trainer.fit(model, batches())
        return finder.results, finder.suggestion(skip_begin=1, skip_end=1), state(model)

    assert_same(run, place)


class Sized(Subject):
    """Fails as a device does that has no memory left, from a batch size of 8 on."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return batches(4, self.batch_size)

    def val_dataloader(self) -> Any:
        return batches(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) >= 8:
            raise RuntimeError("CUDA out of memory.")
        return loss


def test_the_batch_size_finder_survives_running_out_of_memory(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model = Sized()
        trainer = make(max_epochs=1, enable_checkpointing=True)
        size = Tuner(trainer).scale_batch_size(model, mode="power", init_val=2, steps_per_trial=1, max_trials=4)
        assert size == 4
        torch.manual_seed(3)
        trainer.fit(model)
        return state(model)

    assert_same(run, place)


class Probing(Callback):
    """Runs the model in the middle of training, outside of any step, with gradients and without."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.seen.append(pl_module(batch[0]).cpu())
        kept = [None if p.grad is None else p.grad.clone() for p in pl_module.parameters()]
        pl_module.loss(batch).backward()
        self.seen.append([p.grad.clone() for p in pl_module.parameters()])
        for parameter, gradient in zip(pl_module.parameters(), kept, strict=True):
            parameter.grad = gradient


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_callback_that_runs_the_model_between_steps(place: Place, precision: Any) -> None:
    """There is no autocast there, whatever the precision."""

    def run(make: MakeTrainer) -> Any:
        model, record, probe = Subject(), Recorder(), Probing()
        make(max_epochs=2, precision=precision, accumulate_grad_batches=2, callbacks=[record, probe]).fit(model, batches())
        return record.everything(model), probe.seen

    assert_same(run, place)


def test_a_callback_that_writes_weights_between_steps(place: Place) -> None:
    class Decaying(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            for parameter in pl_module.parameters():
                parameter.data.mul_(0.9)

    def run(make: MakeTrainer) -> Any:
        model, record = Subject(), Recorder()
        make(max_epochs=2, callbacks=[record, Decaying()]).fit(model, batches(), batches(1))
        return record.everything(model)

    assert_same(run, place)
