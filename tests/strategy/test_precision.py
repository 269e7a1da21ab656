"""What each precision string means: the dtype of compute, of host parameters, and of what the user sees."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_megatrain import MegaTrainStrategy
from tests.strategy.compare import Place, Recorder, differences, plain, state, streamed
from tests.strategy.subject import Subject, batches
from tests.trainers import quiet_trainer


class Watching(Subject):
    """Notes the dtypes that a step meets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}
        self.net.blocks[1].up.register_forward_hook(lambda module, args, output: self.seen.update(compute=output.dtype))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.seen["default"] = torch.get_default_dtype()
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.seen["gradients"] = {p.grad.dtype for p in self.parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("precision", "compute"),
    [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("bf16-true", torch.bfloat16)],
)
def test_compute_and_host_dtypes(place: Place, precision: Any, compute: torch.dtype) -> None:
    model = Watching()
    with streamed(place) as make:
        trainer = make(max_epochs=1, precision=precision)
        trainer.fit(model, batches())
    assert model.seen["compute"] is compute
    assert model.seen["gradients"] == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {value.dtype for value in trainer.optimizers[0].state[model.net.head.bias].values()} == {torch.float32}
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        (None, "32-true"),
        (32, "32-true"),
        ("32", "32-true"),
        ("bf16-mixed", "bf16-mixed"),
        ("bf16", "bf16-mixed"),
        ("bf16-true", "bf16-true"),
    ],
)
def test_the_trainer_says_the_precision_it_was_given(precision: Any, name: str) -> None:
    assert quiet_trainer(accelerator="cpu", strategy="megatrain", precision=precision).precision == name


def test_bf16_true_is_near_fp32_and_updates_what_bf16_could_not(place: Place) -> None:
    """A learning rate of 1e-4 of a weight is lost in BF16 parameters; FP32 ones on the host keep it."""

    def fit(make: Any, precision: Any) -> Recorder:
        torch.manual_seed(0)
        record = Recorder()
        model = Subject(lr=1e-4)
        model.eval()
        trainer = make(max_epochs=1, precision=precision, callbacks=[record])
        before = state(model)
        trainer.fit(model, batches(2))
        # each weight's first step of AdamW is the learning rate, wherever it has a gradient
        moved = (model.net.blocks[1].down.weight - before["net.blocks.1.down.weight"]).abs()
        assert moved.gt(0).float().mean() > 0.9
        return record

    with streamed(place) as make:
        half = fit(make, "bf16-true")
    whole = fit(plain, "32-true")
    # BF16 keeps 8 bits: 2e-2 is a few of its roundings on a loss near 2.5
    torch.testing.assert_close(torch.tensor(half.losses), torch.tensor(whole.losses), rtol=2e-2, atol=2e-2)
    assert half.losses != whole.losses


def test_a_precision_plugin_given_by_the_user_is_converted() -> None:
    trainer = quiet_trainer(accelerator="cpu", strategy="megatrain", plugins=[MixedPrecision("bf16-mixed", "cpu")])
    assert trainer.precision == "bf16-mixed"
    assert type(trainer.strategy) is MegaTrainStrategy


def test_bf16_mixed_says_so_where_a_callback_asks_for_the_class() -> None:
    """ThroughputMonitor chooses the device's peak FLOPs by the plugin's class."""
    trainer = quiet_trainer(accelerator="cpu", strategy="megatrain", precision="bf16-mixed")
    assert isinstance(trainer.precision_plugin, MixedPrecision)


def test_16_mixed_on_the_cpu_is_lightnings_bf16_mixed(place: Place) -> None:
    """Lightning makes that change, with a warning, before the strategy hears of it."""
    with pytest.warns(UserWarning, match="bf16"):
        trainer = quiet_trainer(accelerator="cpu", strategy="megatrain", precision="16-mixed")
    assert trainer.precision == "bf16-mixed"


@pytest.mark.parametrize("stream_casts", [True, False])
def test_bf16_mixed_is_bit_for_bit_with_and_without_streamed_casts(place: Place, stream_casts: bool) -> None:
    def fit(make: Any) -> Any:
        torch.manual_seed(0)
        model, record = Subject(), Recorder()
        make(max_epochs=2, precision="bf16-mixed", callbacks=[record]).fit(model, batches())
        return record.everything(model)

    with streamed(place, stream_casts=stream_casts) as make:
        assert not differences(fit(plain), fit(make))
