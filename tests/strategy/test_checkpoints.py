"""Checkpoints are Lightning's own: they load under any strategy, and a resumed run ends as one that never stopped."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same, differences, plain, state, streamed
from tests.strategy.subject import Subject, batches


class Scheduled(Subject):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8), "interval": "step"}]


class WithoutDropout(Scheduled):
    """Lightning keeps no random state, so that nothing may be drawn where two runs shall be equal."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.net.blocks:
            block.dropout.p = 0.0


class SaveAt(Callback):
    """Writes a checkpoint after one batch, counted from 0 over all epochs."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint("middle.ckpt")


class Positioned:
    """A sized loader that Lightning asks for its position and that goes on from there."""

    def __init__(self) -> None:
        self.batches, self.delivered = list(batches(4)), 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        self.delivered %= len(self)
        while self.delivered < len(self):
            self.delivered += 1
            yield self.batches[self.delivered - 1]

    def state_dict(self) -> dict[str, int]:
        return {"delivered": self.delivered}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.delivered = state_dict["delivered"]


# within an epoch, after its last batch, and after the first of the next
@pytest.mark.parametrize(("fused", "saved_at"), [(False, 1), (False, 3), (False, 4), (True, 1)])
def test_a_resumed_run_equals_one_that_never_stopped(place: Place, fused: bool, saved_at: int) -> None:
    model, resumed, options = WithoutDropout(), WithoutDropout(), {"max_epochs": 3, "gradient_clip_val": 0.1}
    with streamed(place, fused_optimizer=fused) as make:
        make(callbacks=[SaveAt(saved_at)], **options).fit(model, Positioned())
        trainer = make(**options)
        trainer.fit(resumed, Positioned(), ckpt_path="middle.ckpt", weights_only=False)
    assert trainer.global_step == 12
    assert not differences(state(model), state(resumed))


@pytest.mark.parametrize("written_by", ["plain", "streamed"])
def test_each_resumes_from_the_others_checkpoint(place: Place, written_by: str) -> None:
    """Three epochs by plain Lightning equal one and a half by one and the rest by the other."""
    models = [WithoutDropout() for _ in range(3)]
    for model in models[1:2]:
        model.load_state_dict(models[0].state_dict())
    plain(max_epochs=3).fit(models[0], Positioned())
    with streamed(place) as make:
        first, second = (plain, make) if written_by == "plain" else (make, plain)
        first(max_epochs=3, callbacks=[SaveAt(5)]).fit(models[1], Positioned())
        second(max_epochs=3).fit(models[2], Positioned(), ckpt_path="middle.ckpt", weights_only=False)
    assert not differences([state(models[0])] * 2, [state(model) for model in models[1:]])


def fit_and_save(make: MakeTrainer, path: str, **options: Any) -> L.Trainer:
    torch.manual_seed(0)
    trainer = make(max_epochs=2, **options)
    trainer.fit(Scheduled(), batches())
    trainer.save_checkpoint(path)
    return trainer


def without_names(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """All but what names the precision plugin and the version."""
    return {key: value for key, value in checkpoint.items() if not key.endswith("Precision")}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_checkpoint_equals_plains_in_every_key_and_number(place: Place, precision: Any) -> None:
    fit_and_save(plain, "plain.ckpt", precision=precision)
    with streamed(place) as make:
        fit_and_save(make, "streamed.ckpt", precision=precision)
    expected, found = (without_names(torch.load(f"{name}.ckpt", weights_only=False)) for name in ("plain", "streamed"))
    assert differences(expected, found) == []
    assert expected["optimizer_states"][0]["param_groups"] == found["optimizer_states"][0]["param_groups"]


def test_with_the_fused_kernel_a_checkpoint_has_plains_flags_and_keys(place: Place) -> None:
    fit_and_save(plain, "plain.ckpt")
    with streamed(place, fused_optimizer=True) as make:
        trainer = fit_and_save(make, "streamed.ckpt")
        assert trainer.optimizers[0].param_groups[0]["fused"] is True
    expected, found = (torch.load(f"{name}.ckpt", weights_only=False)["optimizer_states"][0] for name in ("plain", "streamed"))
    assert expected["param_groups"] == found["param_groups"]
    assert {k: set(v) for k, v in expected["state"].items()} == {k: set(v) for k, v in found["state"].items()}
    for one, other in zip(expected["state"].values(), found["state"].values(), strict=True):
        assert all(one[key].dtype == other[key].dtype and other[key].device.type == "cpu" for key in one)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_mixed_precision_checkpoint_resumes_under_the_strategy(place: Place, precision: Any) -> None:
    """Each precision plugin saves under its own name; none may be missed."""
    fit_and_save(plain, "plain.ckpt", precision=precision)
    with streamed(place) as make:
        model = Scheduled()
        make(max_epochs=3, precision=precision).fit(model, batches(), ckpt_path="plain.ckpt", weights_only=False)
    assert not differences(model.trainer.global_step, 9)


def test_load_from_checkpoint_gives_the_trained_module(place: Place) -> None:
    with streamed(place) as make:
        trainer = fit_and_save(make, "streamed.ckpt")
    trained = trainer.lightning_module
    loaded = Scheduled.load_from_checkpoint("streamed.ckpt")
    assert not differences(state(trained), state(loaded))
    assert all(p.device.type == "cpu" for p in loaded.parameters())


def test_weights_only_checkpoints_hold_no_optimizer(place: Place) -> None:
    with streamed(place) as make:
        trainer = fit_and_save(make, "unused.ckpt")
        trainer.save_checkpoint("weights.ckpt", weights_only=True)
    checkpoint = torch.load("weights.ckpt", weights_only=True)
    assert "optimizer_states" not in checkpoint
    assert not differences(state(trainer.lightning_module), dict(checkpoint["state_dict"]))


def test_evaluation_from_a_checkpoint(place: Place) -> None:
    with streamed(place) as make:
        fit_and_save(make, "streamed.ckpt")

    def run(make: MakeTrainer) -> Any:
        return make().validate(Subject(), batches(2), ckpt_path="streamed.ckpt", weights_only=False, verbose=False)

    assert_same(run, place)


def test_the_best_checkpoint_is_kept_and_loaded(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = Subject(), Recorder()
        keep = ModelCheckpoint(make.__module__ + make.__qualname__, monitor="val_loss", save_last=True, save_top_k=1)
        trainer = make(max_epochs=3, callbacks=[keep, record], enable_checkpointing=True)
        trainer.fit(model, batches(), batches(2))
        metrics = trainer.test(model, batches(1), ckpt_path="best", weights_only=False, verbose=False)
        return keep.best_model_score, Path(keep.best_model_path).name, metrics, record.everything(model)

    assert_same(run, place)


def test_loading_copies_into_the_modules_own_parameters(place: Place) -> None:
    with streamed(place) as make:
        fit_and_save(make, "streamed.ckpt")
        model = Scheduled()
        before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
        make(max_epochs=3).fit(model, batches(), ckpt_path="streamed.ckpt", weights_only=False)
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before


def test_a_saved_part_of_the_model_is_as_large_as_that_part(place: Place) -> None:
    """Parameters have storages of their own: torch.save writes the whole storage of a view."""

    class Saving(Subject):
        def on_train_end(self) -> None:
            torch.save({"bias": self.net.blocks[1].up.bias.detach()}, "bias.pt")

    with streamed(place) as make:
        model = Saving()
        make(max_epochs=1).fit(model, batches(1))
    saved = torch.load("bias.pt", weights_only=True)["bias"]
    assert saved.untyped_storage().nbytes() == model.net.blocks[1].up.bias.nbytes
