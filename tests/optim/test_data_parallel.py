"""Split masters under DistributedDataParallel: refused at its first forward, with a way out that trains as one process does."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_megatrain.optim import HostAdamW, data_parallel
from tests.trainers import quiet_trainer

REFUSAL = r"gradients of 4 BF16 parameters in FP32, and Dist.*Train FP32 parameters \(model\.float\(\), .*`parameter\.grad_dtype = None`"


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone, under which DDP works as among several."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
    for handle in data_parallel._watch:
        handle.remove()
    data_parallel._watch.clear()


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).to(dtype)


def train(model: nn.Module, called: nn.Module, optimizer: HostAdamW) -> list[Tensor]:
    """The exact weights after three steps."""
    parameters = list(model.parameters())
    for step in range(3):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        called(inputs.to(parameters[0].dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [optimizer.master(p).clone() for p in parameters]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrapped_first", [False, True])
def test_fp32_gradients_of_bf16_parameters_are_refused_at_the_first_forward(wrapped_first: bool) -> None:
    model = net(torch.bfloat16)
    if wrapped_first:
        wrapped = DistributedDataParallel(model)
    HostAdamW(model.parameters(), masters="split")
    if not wrapped_first:
        wrapped = DistributedDataParallel(model)
    inputs = torch.ones(2, 4, dtype=torch.bfloat16)
    model(inputs).sum().backward()  # without DDP it works
    with pytest.raises(TypeError, match=REFUSAL):
        wrapped(inputs)


@pytest.mark.usefixtures("group")
def test_gradients_in_bf16_train_as_without_ddp() -> None:
    found = []
    for is_wrapped in (False, True):
        model = net(torch.bfloat16)
        optimizer = HostAdamW(model.parameters(), lr=1e-2, masters="split")
        for parameter in model.parameters():
            parameter.grad_dtype = None
        found.append(train(model, DistributedDataParallel(model) if is_wrapped else model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not data_parallel._watch, "no other call of a module is watched"


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("masters", "dtype"), [("split", torch.float32), ("fp32", torch.float32), ("none", torch.bfloat16)])
def test_gradients_of_the_parameters_own_dtype_need_no_watch(masters: Any, dtype: torch.dtype) -> None:
    model = net(dtype)
    optimizer = HostAdamW(model.parameters(), masters=masters)
    assert not data_parallel._watch
    assert len(train(model, DistributedDataParallel(model), optimizer)) == 4


class Module(L.LightningModule):
    """A net in BF16, with an optimizer that keeps its masters in halves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(torch.bfloat16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch.bfloat16()).float().square().mean()
        return loss

    def configure_optimizers(self) -> HostAdamW:
        return HostAdamW(self.parameters(), masters="split")


@pytest.mark.usefixtures("group")
def test_a_trainer_under_ddp_is_refused_before_its_first_step() -> None:
    trainer = quiet_trainer(strategy="ddp", accelerator="cpu", devices=1, max_steps=1)
    with pytest.raises(TypeError, match=REFUSAL):
        trainer.fit(Module(), DataLoader(torch.ones(4, 4), batch_size=2))
    assert trainer.global_step == 0
