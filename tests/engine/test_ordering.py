"""Every wait and every owner of the engine is needed: take one away, and a number goes wrong."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatrain.engine import Engine, pinning, transfer
from tests.emulated import PageLocks, emulated_device

POLICIES = ("lazy", "random:0", "eager:weights", "eager:gradients", "random:1", "random:2", "random:3")

WAITS = {
    "weights loaded",
    "slot released",
    "weights read",
    "resident parameters read",
    "ring buffer read",
    "gradients computed",
    "gradients copied",
    "gradients arrived",
}
SAVED_INPUTS_WAITS = {
    "saved inputs computed",
    "saved inputs copied",
    "room for saved inputs",
    "saved inputs back",
    "saved inputs moved",
}
OWNERS = {"gradients"}


class Body(nn.Module):
    """Blocks of unlike sizes, the last of them frozen."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)) for width in widths])
        self.blocks[-1].requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


class Blocks(Body):
    """With an embedding that takes part in the head."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__(widths)
        self.embedding = nn.Embedding(12, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(self.embedding(tokens)) @ self.embedding.weight.T


def attribute(device: str, widths: tuple[int, ...], **options: Any) -> list[Tensor]:
    """Gradients for inputs alone, each longer than the last: nothing comes to the host, so the host runs far ahead of the device."""
    torch.manual_seed(0)
    model = Body(widths)
    engine = Engine(model, device, **options) if device != "cpu" else None
    inputs = [torch.randn(2, length, 8).to(device).requires_grad_() for length in (5, 7, 9)]
    for hidden in inputs:
        model(hidden).square().sum().backward(inputs=[hidden])
    if engine is not None:
        engine.close()
    return [hidden.grad.cpu() for hidden in inputs if hidden.grad is not None]


def train(device: str, widths: tuple[int, ...], **options: Any) -> list[Tensor]:
    """Three steps of two micro-batches, each followed by an evaluation and by code that writes weights in place, unseen by autograd."""
    torch.manual_seed(0)
    model = Blocks(widths)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    numbers = []
    engine = Engine(model, device, **options) if device != "cpu" else None
    for step in range(3):
        optimizer.zero_grad()
        for micro_batch in range(2):
            tokens = torch.randint(12, (2, 5), generator=torch.Generator().manual_seed(10 * step + micro_batch)).to(device)
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            numbers.append(loss.detach().cpu())
        numbers += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        with torch.no_grad():
            scores = model(tokens)
            for parameter in model.parameters():
                parameter.data.mul_(0.9)  # while the evaluation may still be running
            numbers.append(scores.cpu())
    if engine is not None:
        engine.close()
    return [*numbers, *(parameter.detach().clone() for parameter in model.parameters())]


class RefusesTheFirst(PageLocks):
    """Refuses the first range it is asked for, which is the parameters', and grants those after."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = False

    def lock(self, pointer: int, nbytes: int) -> bool:
        first, self._asked = not self._asked, True
        return not first and super().lock(pointer, nbytes)


RUNS: dict[str, tuple[type[PageLocks], tuple[int, ...], dict[str, Any]]] = {
    "locked": (PageLocks, (16, 24, 8, 20, 12), {}),
    "through the ring": (RefusesTheFirst, (16, 24, 8, 20, 12), {}),
    "as many layers as slots": (PageLocks, (16, 24), {}),
    "saved inputs on the host": (PageLocks, (16, 24, 8, 20, 12), {"saved_inputs": "host"}),
    "saved inputs on the host, as many layers as slots": (PageLocks, (16, 24), {"saved_inputs": "host"}),
}


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@cache
def plain(widths: tuple[int, ...]) -> list[Tensor]:
    return train("cpu", widths) + attribute("cpu", widths)


def right(run: str, policy: str, **removed: str) -> tuple[bool, set[str], set[str]]:
    """Whether a run under `policy`, with something removed, gives the CPU's numbers; and the waits and owners it stated."""
    locker, widths, options = RUNS[run]
    with pytest.MonkeyPatch.context() as patch, emulated_device(policy, **removed) as device:
        patch.setattr(transfer, "RING_BUFFER_BYTES", 256)
        patch.setitem(pinning.PAGE_LOCKERS, "emu", locker)
        numbers = train("emu", widths, **options) + attribute("emu", widths, **options)
        same = all(torch.equal(a, b) for a, b in zip(plain(widths), numbers, strict=True))
        return same, set(device.waits_seen), set(device.owners_seen)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_order_that_the_lanes_allow_gives_the_same_numbers(run: str, policy: str) -> None:
    same, waits, owners = right(run, policy)
    assert same
    expected = WAITS if run == "through the ring" else WAITS - {"ring buffer read"}
    assert (waits, owners) == (expected | SAVED_INPUTS_WAITS if "saved inputs" in run else expected, OWNERS)


@pytest.mark.parametrize("reason", sorted(WAITS | SAVED_INPUTS_WAITS))
def test_without_one_wait_a_number_is_wrong(reason: str) -> None:
    runs = [run for run in RUNS if "saved inputs" in run or reason not in SAVED_INPUTS_WAITS]
    assert any(not right(run, policy, without_wait=reason)[0] for policy in POLICIES for run in runs)


@pytest.mark.parametrize("reason", sorted(OWNERS))
def test_without_one_owner_a_number_is_wrong(reason: str) -> None:
    assert any(not right(run, policy, without_owner=reason)[0] for policy in POLICIES for run in RUNS)
