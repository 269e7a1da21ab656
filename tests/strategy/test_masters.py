"""FP32 weights in two halves train, save and resume as FP32 weights do."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_megatrain.optim import HostAdamW
from lightning_megatrain.strategy import host_masters
from tests.strategy.compare import Place, differences, state, streamed
from tests.strategy.host_adamw import HostTrained, trained
from tests.strategy.subject import Subject, batches

BF16 = ["bf16-mixed", "bf16-true"]
# The upper half rounds ties up and a cast rounds them to even. One weight in 65,536 is a tie: none in these runs, whose seeds are fixed.


class Seen(Callback):
    """Keeps the dtypes of parameters while training lasts."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.dtypes |= {p.dtype for p in pl_module.parameters()}


@pytest.mark.parametrize("precision", BF16)
@pytest.mark.parametrize("options", [{}, {"overlap_optimizer": True}, {"transient_gradients": True}], ids=str)
def test_halves_train_as_whole_weights_do(place: Place, precision: str, options: dict[str, Any]) -> None:
    with streamed(place) as make:
        whole = trained(make, precision=precision)
    with streamed(place, masters="split", **options) as make:
        halves = trained(make, precision=precision)
    assert differences(whole, halves) == []


@pytest.mark.parametrize("precision", BF16)
def test_casts_on_the_way_train_as_working_copies_do(place: Place, precision: str) -> None:
    with streamed(place) as make:
        kept = trained(make, precision=precision)
    with streamed(place, working_copy="cast") as make:
        assert differences(kept, trained(make, precision=precision)) == []


def test_parameters_are_bf16_while_training_lasts_and_the_same_objects_afterwards(place: Place) -> None:
    model, seen = HostTrained(), Seen()
    before = list(model.parameters())
    with streamed(place, masters="split") as make:
        make(max_epochs=1, precision="bf16-true", callbacks=[seen]).fit(model, batches())
    assert seen.dtypes == {torch.bfloat16}
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert any(bool((p != p.bfloat16().float()).any()) for p in model.parameters())  # more than 16 bits came back


@pytest.mark.parametrize(("first", "second"), [("split", "fp32"), ("fp32", "split"), ("split", "split")])
def test_a_run_moves_between_the_forms(tmp_path: Path, place: Place, first: Any, second: Any) -> None:
    def run(masters: Any, **options: Any) -> tuple[HostTrained, L.Trainer]:
        torch.manual_seed(0)
        model = HostTrained()
        model.net.requires_grad_(True)
        for block in model.net.blocks:
            block.dropout.p = 0.0  # Lightning does not restore the random state
        checkpoints = ModelCheckpoint(tmp_path / str(masters), every_n_train_steps=3, save_top_k=-1)
        with streamed(place, masters=masters) as make:
            trainer = make(max_steps=6, precision="bf16-true", callbacks=[checkpoints], enable_checkpointing=True)
            trainer.fit(model, batches(3), **options)
        return model, trainer

    whole, _ = run("fp32")
    run(first)
    path = tmp_path / first / "epoch=0-step=3.ckpt"
    saved = torch.load(path, weights_only=False)
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
    assert "master" not in saved["optimizer_states"][0]["state"][0]  # the module's weights are exact
    resumed, _ = run(second, ckpt_path=path)
    assert differences(state(whole), state(resumed)) == []


def test_weights_loaded_while_training_are_exact(place: Place) -> None:
    class Reloads(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            saved = trainer.strategy.lightning_module_state_dict()
            trainer.strategy.load_model_state_dict({"state_dict": {name: value + 1e-6 for name, value in saved.items()}})
            again = trainer.strategy.lightning_module_state_dict()
            assert differences({name: value + 1e-6 for name, value in saved.items()}, dict(again)) == []

    with streamed(place, masters="split") as make:
        make(max_epochs=1, precision="bf16-true", callbacks=[Reloads()]).fit(HostTrained(), batches())


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    class Tied(HostTrained):
        def __init__(self) -> None:
            super().__init__()
            self.net.head.weight = self.net.embedding.weight

    with streamed("cpu", masters="split") as make:
        trainer = make(max_epochs=1, precision="bf16-true")
        trainer.fit_loop.epoch_loop.max_steps = 2
        model = Tied()
        saved: dict[str, torch.Tensor] = {}

        class Saves(Callback):
            def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
                saved.update(trainer.strategy.lightning_module_state_dict())

        trainer.callbacks.append(Saves())
        trainer.fit(model, batches())
    assert saved["net.head.weight"].data_ptr() == saved["net.embedding.weight"].data_ptr()


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Subject, {"precision": "bf16-true"}, ["HostAdamW", "AdamW", "masters='fp32'"]),
        (HostTrained, {"precision": "32-true"}, ["saves nothing", "bf16-mixed"]),
        (HostTrained, {"precision": "bf16-true", "callbacks": [EMAWeightAveraging()]}, ["EMAWeightAveraging", "BF16"]),
        (HostTrained, {"precision": "bf16-true", "callbacks": [StochasticWeightAveraging(1e-3)]}, ["StochasticWeightAveraging"]),
        (HostTrained, {"precision": "bf16-mixed", "callbacks": [ModelPruning("l1_unstructured", amount=0.2)]}, ["ModelPruning", "halves"]),
    ],
)
def test_split_is_refused_where_it_cannot_be_right(kind: type[Subject], options: dict[str, Any], words: list[str]) -> None:
    with streamed("cpu", masters="split") as make, pytest.raises(MisconfigurationException) as error:
        make(max_epochs=1, **options).fit(kind(), batches())
    assert all(word in str(error.value) for word in words), error.value


def test_values_that_mean_nothing_are_refused() -> None:
    for options in ({"masters": "bf16"}, {"working_copy": "both"}):
        with pytest.raises(ValueError, match="it must be"), streamed("cpu", **options) as make:
            make()


@pytest.mark.parametrize(("free", "dtype"), [(1 << 40, torch.float32), (1 << 10, torch.bfloat16)])
def test_auto_takes_halves_when_whole_weights_do_not_fit(monkeypatch: pytest.MonkeyPatch, free: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(host_masters, "available_bytes", lambda: free)
    seen = Seen()
    with streamed("cpu", masters="auto") as make:
        make(max_epochs=1, precision="bf16-true", callbacks=[seen]).fit(HostTrained(), batches())
    assert seen.dtypes == {dtype}


def test_auto_leaves_other_optimizers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_masters, "available_bytes", lambda: 0)
    seen = Seen()
    with streamed("cpu", masters="auto") as make:
        make(max_epochs=1, precision="bf16-true", callbacks=[seen]).fit(Subject(), batches())
    assert seen.dtypes == {torch.float32}


def test_two_optimizers_each_keep_their_halves(place: Place) -> None:
    class Two(HostTrained):
        automatic_optimization = False

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:  # type: ignore[override]
            loss = self.loss(batch)
            self.losses.append(float(loss.detach()))
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()

        def configure_optimizers(self) -> Any:
            inner = list(self.net.blocks.parameters())
            outer = [p for p in self.parameters() if all(p is not q for q in inner)]
            return HostAdamW(inner, 1e-2), HostAdamW(outer, 1e-3)

    with streamed(place) as make:
        whole = trained(make, Two, precision="bf16-mixed")
    with streamed(place, masters="split") as make:
        assert differences(whole, trained(make, Two, precision="bf16-mixed")) == []


def test_a_failure_leaves_whole_weights(place: Place) -> None:
    class Fails(HostTrained):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ZeroDivisionError

    model = Fails()
    with streamed(place, masters="split") as make, pytest.raises(ZeroDivisionError):
        make(max_epochs=1, precision="bf16-true").fit(model, batches())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_halves_keep_updates_that_bf16_alone_would_lose() -> None:
    """100 steps at a learning rate of 1e-5 on weights near one, of which BF16 takes steps of 1/128 only."""

    class Near(HostTrained):
        def __init__(self) -> None:
            super().__init__()
            for parameter in self.parameters():
                nn.init.ones_(parameter)

        def configure_optimizers(self) -> Any:
            return HostAdamW(self.parameters(), 1e-5)

    with streamed("cpu", masters="split") as make:
        model = Near()
        make(max_steps=100, precision="bf16-true").fit(model, batches(100))
    moved = torch.cat([(p - 1).abs().flatten() for p in model.net.head.parameters()]).max()
    assert 1e-4 < float(moved) < 1 / 256
