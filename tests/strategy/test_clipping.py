"""Gradients are clipped as plain Lightning clips them."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same, both, gradients, plain, state
from tests.strategy.subject import Subject, batches


class ClippedByNorm(Subject):
    norm_type = 2.0

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        norm = clip_grad_norm_(self.parameters(), gradient_clip_val, self.norm_type)
        self.log("norm", norm)


class ClippedByL1(ClippedByNorm):
    norm_type = 1.0


class ClippedByLargest(ClippedByNorm):
    norm_type = torch.inf


class Clipped(Callback):
    """Keeps the gradients that the optimizer took; the Recorder's are those before clipping."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor | None]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.gradients.append(gradients(pl_module))


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [(Subject, "norm"), (Subject, "value"), (ClippedByNorm, None), (ClippedByL1, None), (ClippedByLargest, None)],
)
@pytest.mark.parametrize("window", [1, 2])
def test_clipping(place: Place, kind: type[Subject], algorithm: Any, window: int) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record, clipped = kind(), Recorder(), Clipped()
        trainer = make(
            max_epochs=1,
            gradient_clip_val=0.01,
            gradient_clip_algorithm=algorithm,
            accumulate_grad_batches=window,
            callbacks=[record, clipped],
        )
        trainer.fit(model, batches(2))
        return record.everything(model), clipped.gradients, dict(trainer.callback_metrics)

    record, clipped, _ = assert_same(run, place)
    assert all(
        before["net.head.bias"].abs().max() > after["net.head.bias"].abs().max()
        for before, after in zip(record["gradients"], clipped[window - 1 :: window], strict=True)
    )


def test_clipping_with_a_fused_optimizer_under_mixed_precision(place: Place) -> None:
    """Lightning refuses this pair for the sake of a gradient scaler that BF16 does not have."""

    def run(make: MakeTrainer) -> Any:
        class Optimized(Subject):
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), 1.0, fused=None if make is plain else True)

        model = Optimized()
        make(max_epochs=1, gradient_clip_val=0.1, precision="bf16-mixed").fit(model, batches(1))
        return state(model)

    expected, found = both(run, place)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # the fused kernel may differ in the last bit
