"""Fit, validate, test and predict, alone and one after another, give plain Lightning's numbers."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

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


class _Gated(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(16, 16, batch_first=True)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD + self.cells(hidden_BTD)[0]


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
@pytest.mark.parametrize("inference_mode", [True, False])
def test_recurrent_layers_predict_by_the_kernels_of_plain(kind: type[nn.RNNBase], inference_mode: bool) -> None:
    """Which ones run depends on whether weights require grad, in inference mode too; batches of three show it."""

    class Predicts(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(_Gated(kind) for _ in range(3)))

        def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.blocks(batch)

    def run(make: MakeTrainer) -> Any:
        torch.manual_seed(0)
        return make(inference_mode=inference_mode).predict(Predicts(), DataLoader(torch.randn(9, 5, 16), batch_size=3))

    assert_same(run, "cpu")
