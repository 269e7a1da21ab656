"""Gradients are clipped as plain Lightning clips them."""

from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same
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


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [(Subject, "norm"), (Subject, "value"), (ClippedByNorm, None), (ClippedByL1, None), (ClippedByLargest, None)],
)
@pytest.mark.parametrize("window", [1, 2])
def test_clipping(place: Place, kind: type[Subject], algorithm: str | None, window: int) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = kind(), Recorder()
        trainer = make(
            max_epochs=2,
            gradient_clip_val=0.01,
            gradient_clip_algorithm=algorithm,
            accumulate_grad_batches=window,
            callbacks=[record],
        )
        trainer.fit(model, batches())
        return record.everything(model), dict(trainer.callback_metrics)

    assert_same(run, place)


def test_clipping_with_a_fused_optimizer_under_mixed_precision(place: Place) -> None:
    """Lightning refuses this pair for the sake of a gradient scaler that BF16 does not have; unclipped it is what plain gives."""

    class Fused(Subject):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), self.lr, fused=True)

    class Unfused(Subject):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), self.lr)

    def run(make: MakeTrainer) -> Any:
        from tests.strategy.compare import plain

        model, record = (Unfused if make is plain else Fused)(), Recorder()
        make(max_epochs=1, gradient_clip_val=0.1, precision="bf16-mixed", callbacks=[record]).fit(model, batches(1))
        return record.everything(model)["gradients"]

    assert_same(run, place)
