"""A subject that trains with HostAdamW and records itself, so that no callback looks between steps."""

from typing import Any

import torch
from torch import Tensor

from lightning_megatrain.optim import HostAdamW
from tests.strategy.compare import MakeTrainer, state
from tests.strategy.subject import Subject, batches


class HostTrained(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = HostAdamW(self.parameters(), 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7), "interval": "step"}]


def trained(make: MakeTrainer, kind: type[HostTrained] = HostTrained, **options: Any) -> Any:
    """Losses and weights of two epochs with validation, from the same seed at each call."""
    torch.manual_seed(0)
    model = kind()
    make(**{"max_epochs": 2, **options}).fit(model, batches(4), batches(1))
    return model.losses, state(model)
