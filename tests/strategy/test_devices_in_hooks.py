"""User code in any hook finds the device, its metrics, its buffers and its logged values where plain Lightning has them."""

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same, both
from tests.strategy.subject import Subject, V, batches

HOOKS = [
    "setup", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_train_epoch_end",
    "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end",
    "on_validation_end", "on_train_end",
]  # fmt: skip


def test_self_device_is_the_place_of_compute_in_every_hook(place: Place) -> None:
    seen: dict[str, str] = {}

    class Noting(Subject):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            assert {t.device.type for t in batch} == {self.device.type}
            noise = torch.zeros(1, device=self.device)
            return self.loss(batch) + noise.sum()

    def noting(name: str) -> Any:
        own = getattr(Subject, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen[name] = self.device.type
            return own(self, *args, **kwargs)

        return hook

    for name in HOOKS:
        setattr(Noting, name, noting(name))

    def run(make: MakeTrainer) -> Any:
        seen.clear()
        model, record = Noting(), Recorder()
        make(max_epochs=1, callbacks=[record]).fit(model, batches(), batches(1))
        assert sorted(seen) == sorted(HOOKS)
        assert model.device.type == "cpu"
        return dict(seen), record.everything(model)

    expected, found = both(run, place)
    assert set(expected[0].values()) == {"cpu"}
    assert set(found[0].values()) == {place}


class Logging(Subject):
    """Logs from every hook that may log, numbers and tensors of the host and of the device, by step and by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.mean = MulticlassAccuracy(V), MeanMetric()
        self.by_name = nn.ModuleDict({"val": MulticlassAccuracy(V)})

    def on_train_start(self) -> None:
        self.log("start", 1.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch_start", torch.tensor(float(batch_idx)), on_epoch=True, on_step=True, reduce_fx="max")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        logits_BTV = self(batch[0])
        loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch[1].flatten())
        self.accuracy(logits_BTV.flatten(0, 1), batch[1].flatten())
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log_dict({"a": logits_BTV.detach().mean(), "b": batch_idx})
        return {"loss": loss, "logits": logits_BTV.detach()}

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("before_backward", loss)

    def on_after_backward(self) -> None:
        self.log("norm", self.net.head.weight.grad.norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("largest", max(p.grad.abs().max() for p in self.parameters()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["logits"].device.type == self.device.type
        self.log("end", outputs["logits"].sum())

    def on_train_epoch_end(self) -> None:
        self.log("weights", sum(p.detach().abs().sum() for p in self.parameters()))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        metric = self.by_name["val"]
        metric.update(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("val_accuracy", metric)
        self.log("val_loss", self.loss(batch), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_end", self.by_name["val"].compute())


def test_logging_from_everywhere(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = Logging(), Recorder()
        trainer = make(max_epochs=2, log_every_n_steps=1, callbacks=[record])
        trainer.fit(model, batches(), batches(2))
        assert {t.device.type for t in (model.accuracy.tp, model.mean.mean_value)} == {"cpu"}
        return record.everything(model), {name: float(value) for name, value in trainer.callback_metrics.items()}

    assert_same(run, place)


class Normalised(Subject):
    """Statistics in a streamed layer and outside, and buffers that steps read and write."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.net.blocks:
            block.norm = BatchNorm(8)
        self.out = BatchNorm(V)
        self.register_buffer("scale", torch.full((V,), 0.5))
        self.register_buffer("counted", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        self.counted += 1
        return self.out(super().forward(tokens_BT)) * self.scale

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scale.mul_(1.1)


class BatchNorm(nn.BatchNorm1d):
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return super().forward(hidden_BTD.flatten(0, 1)).view_as(hidden_BTD)


def test_buffers_are_written_once_a_step_though_layers_run_twice(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = Normalised(), Recorder()
        make(max_epochs=2, accumulate_grad_batches=2, callbacks=[record]).fit(model, batches(), batches(1))
        assert {b.device.type for b in model.buffers()} == {"cpu"}
        return record.everything(model), model.counted

    assert_same(run, place)


class Loose(Subject):
    """A parameter of the LightningModule's own, used outside of any module's forward; and one in a ParameterList."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(V)) for _ in range(2)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits_BTV = self.net(batch[0]) / self.temperature + self.shifts[batch_idx % 2]
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch[1].flatten())


def test_parameters_used_outside_of_any_forward(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = Loose(), Recorder()
        make(max_epochs=2, callbacks=[record]).fit(model, batches())
        return record.everything(model)

    assert_same(run, place)
