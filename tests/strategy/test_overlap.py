"""Updates before the next forward: later than the plain loop's, with its numbers."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.language_model import CausalLM
from lightning_megatrain.optim import HostAdamW
from tests.strategy.compare import MakeTrainer, Place, differences, plain, streamed
from tests.strategy.host_adamw import HostTrained, trained
from tests.strategy.subject import Subject, batches
from tests.trainers import quiet_trainer

LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


class Skipping(HostTrained):
    """Leaves a block out of every second forward."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        blocks = self.net.blocks
        if len(self.losses) % 2:
            self.net.blocks = blocks[:1]
        try:
            return super().loss(batch)
        finally:
            self.net.blocks = blocks


class Wandering(HostTrained):
    """Runs its blocks in another order at each step, leaves some out, and uses one twice."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens_BT, targets_BT = batch
        hidden = self.net.embedding(tokens_BT)
        for index in ((0, 1, 2), (0, 2), (2, 1, 0), (1, 2), (0, 1, 2, 0))[len(self.losses) % 5]:
            hidden = self.net.blocks[index](hidden)
        return torch.nn.functional.cross_entropy(self.net.head(self.net.norm(hidden)).flatten(0, 1), targets_BT.flatten())


@pytest.mark.parametrize("kind", [HostTrained, Skipping, Wandering])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"val_check_interval": 2},
        {"max_epochs": 1, "overfit_batches": 1},
    ],
    ids=str,
)
def test_numbers_are_those_of_plain_training(place: Place, kind: type[HostTrained], options: dict[str, Any]) -> None:
    expected = trained(plain, kind, **options)
    with streamed(place, overlap_optimizer=True) as make:
        assert differences(expected, trained(make, kind, **options)) == []


class Order:
    """The layers whose weights an optimizer updated, and when steps and forwards began."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        update, step = HostAdamW.update, MegaTrainStrategy.optimizer_step
        order, training_step = self, MegaTrainStrategy.training_step

        def recorded_update(optimizer: HostAdamW, params: Any, *args: Any, **kwargs: Any) -> None:
            layers = [order.engine.layer_of(p) for p in params]
            order.events += sorted({layer.name for layer in layers if layer is not None})
            update(optimizer, params, *args, **kwargs)

        def recorded_step(strategy: MegaTrainStrategy, *args: Any, **kwargs: Any) -> Any:
            order.engine = strategy.engine
            output = step(strategy, *args, **kwargs)
            order.events.append("stepped")
            return output

        def recorded_forward(strategy: MegaTrainStrategy, *args: Any, **kwargs: Any) -> Any:
            output = training_step(strategy, *args, **kwargs)
            order.events.append("forward done")
            return output

        patch.setattr(HostAdamW, "update", recorded_update)
        patch.setattr(MegaTrainStrategy, "optimizer_step", recorded_step)
        patch.setattr(MegaTrainStrategy, "training_step", recorded_forward)


def test_layers_are_updated_in_the_order_of_the_next_forward(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order(monkeypatch)
    with streamed(place, overlap_optimizer=True) as make:
        make(max_steps=2).fit(HostTrained(), batches(2))
    blocks = [f"net.blocks.{index}" for index in range(3)]
    # Lightning runs the forward within the optimizer's step; what the last step left is done when training ends
    assert order.events == ["forward done", "stepped", *blocks, "forward done", "stepped", *blocks]


def test_everything_is_done_before_validation_and_checkpoints(place: Place, tmp_path: Path) -> None:
    class Validated(HostTrained):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            strategy = self.trainer.strategy
            if not isinstance(strategy, MegaTrainStrategy):
                return
            assert strategy._updates is not None
            assert strategy._updates._deferred is not None
            assert not strategy._updates._deferred.any_due

    def run(make: MakeTrainer, name: str) -> Any:
        torch.manual_seed(0)
        checkpoint = ModelCheckpoint(tmp_path / name, every_n_train_steps=1, save_top_k=-1)
        model = Validated()
        trainer = make(max_steps=3, enable_checkpointing=True, callbacks=[checkpoint], val_check_interval=1)
        trainer.fit(model, batches(3), batches(1))
        loaded = [torch.load(tmp_path / name / f"epoch=0-step={step}.ckpt", weights_only=False) for step in (1, 2, 3)]
        return [(one["state_dict"], one["optimizer_states"]) for one in loaded]

    expected = run(plain, "plain")
    with streamed(place, overlap_optimizer=True) as make:
        assert differences(_dicts(expected), _dicts(run(make, "streamed"))) == []


def _dicts(saved: Any) -> Any:
    return [(dict(weights), [state["state"] for state in states]) for weights, states in saved]


class Looks(Callback):
    """Keeps what it sees of a layer's weight between steps."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.seen.append(pl_module.net.blocks[0].up.weight.detach().clone())  # type: ignore[union-attr]


def test_a_callback_that_may_look_sees_updated_weights_and_the_user_is_told(place: Place) -> None:
    def run(make: MakeTrainer) -> list[Tensor]:
        torch.manual_seed(0)
        looks = Looks()
        make(max_steps=3, callbacks=[looks]).fit(HostTrained(), batches(3))
        return looks.seen

    expected = run(plain)
    with streamed(place, overlap_optimizer=True) as make, pytest.warns(UserWarning, match="no effect: Looks.on_train_batch_end"):
        assert differences(expected, run(make)) == []


def test_a_hook_of_the_module_or_of_the_optimizer_is_in_the_way() -> None:
    class Ends(HostTrained):
        def on_train_batch_end(self, *_: Any) -> None:
            """Looks at something."""

    class Hooked(HostTrained):
        def configure_optimizers(self) -> Any:
            optimizer = HostAdamW(self.parameters())
            getattr(optimizer, f"register_step_{self.when}_hook")(lambda *_: None)
            return optimizer

    class HookedBefore(Hooked):
        when = "pre"

    class HookedAfter(Hooked):
        when = "post"

    class ReadsWeights(torch.optim.lr_scheduler.ConstantLR):
        """A schedule of somebody's own."""

    class Scheduled(HostTrained):
        def configure_optimizers(self) -> Any:
            optimizer = HostAdamW(self.parameters())
            return [optimizer], [ReadsWeights(optimizer)]

    in_the_way = "a hook on HostAdamW's step"
    for kind, name in (
        (Ends, "Ends.on_train_batch_end"),
        (HookedBefore, in_the_way),
        (HookedAfter, in_the_way),
        (Scheduled, "ReadsWeights"),
    ):
        with streamed("cpu", overlap_optimizer=True) as make, pytest.warns(UserWarning, match=f"no effect: {name}"):
            make(max_steps=1).fit(kind(), batches(1))


def test_a_hook_of_the_datamodule_is_in_the_way() -> None:
    class Looks(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return batches(1)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    with streamed("cpu", overlap_optimizer=True) as make, pytest.warns(UserWarning, match="no effect: Looks.on_after_batch_transfer"):
        make(max_steps=1).fit(HostTrained(), Looks())


def test_what_cannot_be_is_refused_by_name() -> None:
    class Manual(HostTrained):
        automatic_optimization = False

    for kind, words in ((Subject, "needs one .*HostAdamW"), (Manual, "automatic optimization")):
        with streamed("cpu", overlap_optimizer=True) as make, pytest.raises(MisconfigurationException, match=words):
            make(max_steps=1).fit(kind(), batches(1))


def language_model_is_updated_late(
    kind: type[CausalLM] = CausalLM, optimizer: str = "lightning_megatrain.optim.HostAdamW", **options: Any
) -> bool:
    """Whether the strategy, left to itself, updates a language model before the next forward."""
    found: list[bool] = []

    class Module(kind):  # type: ignore[misc, valid-type]
        pass

    Module.__module__ = kind.__module__
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8), "attention_mask": torch.ones(8, dtype=torch.long)}] * 2
    trainer = quiet_trainer(accelerator="cpu", strategy=MegaTrainStrategy(**options), max_steps=2)
    finish = MegaTrainStrategy.on_train_end

    def on_train_end(strategy: MegaTrainStrategy) -> None:
        assert strategy._updates is not None
        found.append(strategy._updates._deferred is not None)
        finish(strategy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MegaTrainStrategy, "on_train_end", on_train_end)
        trainer.fit(Module(LLAMA, optimizer=optimizer), torch.utils.data.DataLoader(data, 1))
    return found[0]


def test_it_is_the_default_for_language_models_whose_code_is_ours() -> None:
    class Own(CausalLM):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)

    assert language_model_is_updated_late()
    assert not language_model_is_updated_late(overlap_optimizer=False)
    assert not language_model_is_updated_late(optimizer="torch.optim.AdamW")
    assert not language_model_is_updated_late(Own)
