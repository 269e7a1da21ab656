"""What the strategy says, and how often."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategy.compare import Place, streamed
from tests.strategy.subject import Subject, batches


class Manual(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pytest.mark.parametrize("kind", [Subject, Manual])
def test_one_table_after_the_first_step(place: Place, kind: type[Subject], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    model = kind()
    with streamed(place) as make:
        make(max_epochs=2).fit(model, batches())
    (table,) = [record.getMessage() for record in caplog.records if "Streaming 3 layers" in record.getMessage()]
    assert len(table.splitlines()) <= 24
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in table
    rows = {" ".join(line.split()[:-3]): line.split()[-1] for line in table.splitlines() if line.startswith("  ")}
    # FP32: 4 bytes of weight and 4 of gradient a parameter, and twice 4 (and a step count a tensor) of AdamW's moments
    assert (rows["parameters"], rows["gradients"]) == ("4.0", "4.0")
    assert 8.0 <= float(rows["optimizer state"]) < 8.2
    assert ("emu:0" if place == "emu" else "cpu") in table


def test_the_fused_switch_is_said_once_and_again_after_a_checkpoint(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning.pytorch")

    def said() -> int:
        return sum("fused_optimizer=False" in record.getMessage() for record in caplog.records)

    with streamed(place, fused_optimizer=True) as make:
        trainer = make(max_epochs=1)
        trainer.fit(Subject(), batches(1))
        assert said() == 1
        trainer.save_checkpoint("one.ckpt")
        make(max_epochs=2).fit(Subject(), batches(1), ckpt_path="one.ckpt", weights_only=False)
    assert said() == 3


@pytest.mark.parametrize("kind", ["left alone by argument", "not fusible", "chosen by the user"])
def test_nothing_is_said_where_nothing_was_switched(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    class Optimized(Subject):
        def configure_optimizers(self) -> Any:
            if kind == "not fusible":
                return torch.optim.RMSprop(self.parameters())
            return torch.optim.AdamW(self.parameters(), foreach=False if kind == "chosen by the user" else None)

    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    with streamed("cpu", fused_optimizer=kind != "left alone by argument") as make:
        make(max_epochs=1).fit(Optimized(), batches(1))
    assert not any("fused_optimizer=False" in record.getMessage() for record in caplog.records)
