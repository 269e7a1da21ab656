"""What the strategy cannot honour is refused by name, with the way out, before any step."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_megatrain import MegaTrainStrategy
from tests.emulated import EmulatedAccelerator
from tests.strategy.compare import Place, streamed
from tests.strategy.subject import Block, Subject, batches
from tests.trainers import quiet_trainer


def fit(model: Subject | None = None, **options: Any) -> None:
    options = {"accelerator": "cpu", "strategy": "megatrain", "max_epochs": 1} | options
    quiet_trainer(**options).fit(Subject() if model is None else model, batches(1))


class NothingToStream(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Embedding(11, 11)


class Compiled(Subject):
    """`torch.compile` of a LightningModule leaves this mark."""

    def __init__(self) -> None:
        super().__init__()
        self._compiler_ctx = {"compiler": "dynamo"}


class Checkpointing(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.llama = LlamaForCausalLM(
            LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
        )
        self.llama.gradient_checkpointing_enable()


class EightDevices(EmulatedAccelerator):
    """A machine with eight devices under `devices="auto"`."""

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("emu", index) for index in range(8)]


def test_a_compiled_module_is_refused_as_torch_compile_makes_it() -> None:
    compiled: Any = torch.compile(Subject())
    with pytest.raises(MisconfigurationException, match=r"(?s)strategy='megatrain'.*torch\.compile"):
        fit(compiled)


MISCONFIGURATION = MisconfigurationException
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "16-true": (lambda: fit(precision="16-true"), MISCONFIGURATION, ["precision='16-true'", "bf16-mixed"]),
    "64-true": (lambda: fit(precision="64-true"), MISCONFIGURATION, ["precision='64-true'", "bf16-mixed"]),
    "16-mixed": (lambda: _fit_16_mixed(), MISCONFIGURATION, ["precision='16-mixed'", "bf16-mixed"]),
    "sync_batchnorm": (lambda: fit(sync_batchnorm=True), MISCONFIGURATION, ["sync_batchnorm=False"]),
    "compiled module": (lambda: fit(Compiled()), MISCONFIGURATION, ["torch.compile()", "inside its layers"]),
    "two CPU processes": (lambda: fit(devices=2), MISCONFIGURATION, ["devices=1", "was given 2", "fsdp"]),
    "eight devices found": (
        lambda: fit(accelerator=EightDevices(), devices="auto"),
        MISCONFIGURATION,
        ["devices=1", "was given 8", "fsdp"],
    ),
    "two machines": (lambda: fit(num_nodes=2), MISCONFIGURATION, ["num_nodes is 2", "num_nodes=1", "fsdp"]),
    "nothing to stream": (lambda: fit(NothingToStream()), ValueError, ["NothingToStream", "layers=["]),
    "layers that do not exist": (
        lambda: fit(strategy=MegaTrainStrategy(layers=["Nowhere"])),
        ValueError,
        ["layers='Nowhere'", "Block"],
    ),
    "resident that do not exist": (
        lambda: fit(strategy=MegaTrainStrategy(resident=["nowhere.*"])),
        ValueError,
        ["resident='nowhere.*'", "Block"],
    ),
    "one slot": (lambda: fit(strategy=MegaTrainStrategy(slots=1)), ValueError, ["slots=1", "at least 2"]),
    "no staging buffer": (lambda: fit(strategy=MegaTrainStrategy(staging_buffers=0)), ValueError, ["staging_buffers=0", "at least 1"]),
    "checkpointing enabled": (lambda: fit(Checkpointing()), ValueError, ["llama", "gradient_checkpointing_disable()"]),
}


def _fit_16_mixed() -> None:
    """On the CPU Lightning turns 16-mixed into bf16-mixed before a strategy hears of it; on a device it does not."""
    fit(accelerator=EmulatedAccelerator(), precision="16-mixed")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_the_first_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, kind, words = REFUSED[name]
    monkeypatch.setattr(Subject, "training_step", lambda *_: pytest.fail("a step ran"))
    with pytest.raises(kind) as raised:
        call()
    message = str(raised.value)
    assert all(word in message for word in words), message


def test_mps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(MPSAccelerator, "get_parallel_devices", staticmethod(lambda devices: [torch.device("mps", 0)]))
    monkeypatch.setattr(MPSAccelerator, "parse_devices", staticmethod(lambda devices: [0]))
    with pytest.raises(MisconfigurationException, match=r"does not support MPS.*strategy='auto'"):
        fit(accelerator="mps", devices=1)


class OptimizerElsewhere(Subject):
    """Its optimizer was made from copies on the device."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([nn.Parameter(p.detach().to(self.device)) for p in self.parameters()])


class StateElsewhere(Subject):
    """Its optimizer's moments lie on the device."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        for parameter in self.parameters():
            optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter, device=self.device)
        return optimizer


class DeviceEMA(Subject):
    def configure_callbacks(self) -> Any:
        return [EMAWeightAveraging(device="emu")]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OptimizerElsewhere, r"AdamW holds parameters or state on emu.*host memory"),
        (StateElsewhere, r"AdamW holds parameters or state on emu.*ckpt_path"),
        (DeviceEMA, r"EMAWeightAveraging\(device='emu'\).*device='cpu'"),
    ],
)
def test_what_would_lie_on_the_device_is_refused(kind: type[Subject], words: str) -> None:
    with streamed("emu") as make, pytest.raises(MisconfigurationException, match=words):
        make(max_epochs=1).fit(kind(), batches(1))


class DoubleBackward(Subject):
    """A penalty on the slope, as WGAN-GP has: without a refusal the penalty would be there and its gradient would not."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.net.embedding(batch[0])
        (slope,) = torch.autograd.grad(self.net.blocks[0](hidden).sum(), hidden, create_graph=True)
        return slope.square().sum()


class GradOfStreamed(Subject):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        torch.autograd.grad(loss, list(self.net.blocks[0].parameters()))
        return loss


class GradOfResident(Subject):
    host_weight: Tensor

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        torch.autograd.grad(loss, [self.host_weight])
        return loss

    def on_fit_start(self) -> None:
        object.__setattr__(self, "host_weight", self.net.embedding.weight)  # not registered a second time


class CheckpointAround(Subject):
    """Recomputes what is recomputed already."""

    reentrant = False

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden = self.net.embedding(tokens_BT)
        for block in self.net.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.net.head(hidden)


class ReentrantCheckpointAround(CheckpointAround):
    reentrant = True


class InPlaceBlock(Block):
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD.mul_(2) + self.up(hidden_BTD)[..., :8]


class InputWritten(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList([InPlaceBlock(), InPlaceBlock()])


class WrittenBeforeBackward(Subject):
    """Plain Lightning refuses this as well where the weight was saved for backward."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        with torch.no_grad():
            self.net.blocks[1].up.weight.mul_(2)
        return loss


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (DoubleBackward, r"create_graph=True.*net\.blocks\.0.*resident="),
        (GradOfStreamed, r"torch\.autograd\.grad\(\).*net\.blocks\.0.*\.backward\(\)"),
        (CheckpointAround, r"(?i)checkpoint"),
        (ReentrantCheckpointAround, r"(?i)checkpoint"),
        (InputWritten, r"net\.blocks\.0.*in place.*resident=\['net\.blocks\.0'\]"),
        (WrittenBeforeBackward, r"net\.blocks\.1.*written between its forward and its backward"),
    ],
)
def test_refused_in_the_step_where_it_happens(place: Place, kind: type[Subject], words: str) -> None:
    with streamed(place) as make, pytest.raises((RuntimeError, ValueError), match=re.compile(words, re.DOTALL)):
        make(max_epochs=1).fit(kind(), batches(1))


def test_gradients_of_resident_parameters_asked_for_by_name_are_refused_on_a_device() -> None:
    with streamed("emu") as make, pytest.raises(RuntimeError, match=r"torch\.autograd\.grad\(\).*net\.embedding\.weight"):
        make(max_epochs=1).fit(GradOfResident(), batches(1))


def test_bf16_parameters_warn_once(recwarn: pytest.WarningsRecorder) -> None:
    with streamed("cpu") as make:
        make(max_epochs=2).fit(Subject().to(torch.bfloat16), batches(1))
    warned = [str(w.message) for w in recwarn if "BF16" in str(w.message)]
    assert len(warned) == 1
    assert all(word in warned[0] for word in ("AdamW", "masters", "float32", "HostAdamW(masters='split')"))
