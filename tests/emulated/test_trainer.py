"""A whole Lightning Trainer on the emulated accelerator gives the CPU's numbers."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from tests.emulated import EmulatedAccelerator, emulated_device


class _Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        assert batch[0].device == self.device
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("train", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)
        self.log("val", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def _fit(device: str, **options: Any) -> tuple[dict[str, float], list[Tensor]]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 16), torch.randint(0, 4, (32,)))
    model = _Classifier()
    if device == "emu":
        options |= {"accelerator": EmulatedAccelerator(), "strategy": SingleDeviceStrategy(torch.device("emu", 0))}
    else:
        options |= {"accelerator": "cpu"}
    trainer = L.Trainer(
        max_epochs=2, gradient_clip_val=1.0, accumulate_grad_batches=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, **options
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())  # Lightning moves the model back
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("policy", ["lazy", "random:0"])
def test_fit_and_validate_equal_the_cpus(precision: str, policy: str) -> None:
    def options(device: str) -> dict[str, Any]:
        return {"plugins": [MixedPrecision("bf16-mixed", device)]} if precision == "bf16-mixed" else {}

    metrics, weights = _fit("cpu", **options("cpu"))
    with emulated_device(policy):
        found_metrics, found_weights = _fit("emu", **options("emu"))
    assert found_metrics == metrics
    assert all(torch.equal(a, b) for a, b in zip(weights, found_weights, strict=True))


def test_a_checkpoint_written_from_the_device_loads_on_the_host() -> None:
    model = _Classifier().to("emu")
    torch.save({"weights": model.state_dict()}, "model.pt")
    loaded = torch.load("model.pt", weights_only=True)["weights"]
    assert all(torch.equal(value.cpu(), model.state_dict()[name].cpu()) for name, value in loaded.items())
