"""Saved inputs on the host, whatever becomes of them and of the graph."""

import functools
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatrain.engine import Engine
from tests.emulated import emulated_device
from tests.engine.models import INPUT, WIDTH, Block, Tower, loss_of, tokens

POLICIES = ("lazy", "eager:gradients", "random:0")


class Writes(Tower):
    """Writes the input of its first layer in place, after `after` more layers have run."""

    def __init__(self, after: int, write: bool) -> None:
        super().__init__(layers=4)
        self.after, self.write = after, write

    def forward(self, tokens: Tensor) -> Tensor:
        first = hidden = self.embedding(tokens) * 1
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if index == self.after and self.write:
                first.mul_(3)
        return self.head(hidden)


@functools.cache
def written(after: int, write: bool, saved_inputs: str, policy: str = "lazy") -> list[Tensor]:
    torch.manual_seed(0)
    with emulated_device(policy):
        model = Writes(after, write)
        with Engine(model, "emu", saved_inputs=saved_inputs):
            loss_of(model, tokens(device="emu")).backward()
        return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_write_after_the_copy_does_not_reach_it(policy: str) -> None:
    expected = written(1, False, "device")
    assert all(torch.equal(a, b) for a, b in zip(expected, written(1, True, "host", policy), strict=True))


def test_a_write_before_the_copy_is_refused_by_name() -> None:
    with emulated_device():
        model = Writes(0, True)
        with Engine(model, "emu", saved_inputs="host"):
            loss = loss_of(model, tokens(device="emu"))
            with pytest.raises(RuntimeError, match=r"Input tensor 0 of streamed layer 'blocks\.0' was modified by an inplace operation"):
                loss.backward()


class Interferes(Tower):
    """Writes the input of its first layer in place from within the second, while it is being copied."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = hidden = self.embedding(tokens) * 1

        def interfere(*_: Any) -> None:
            with torch.no_grad():
                first.mul_(3)

        handle = self.blocks[1].up.register_forward_hook(interfere)
        for block in self.blocks:
            hidden = block(hidden)
        handle.remove()
        return self.head(hidden)


def test_a_write_during_the_copy_is_refused_by_name() -> None:
    with emulated_device("eager:gradients"):
        model = Interferes(layers=4)
        with Engine(model, "emu", saved_inputs="host"):
            loss = loss_of(model, tokens(device="emu"))
            with pytest.raises(RuntimeError, match=r"Input tensor 0 of streamed layer 'blocks\.0' was modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("saved_inputs", ["host", f"{2 * INPUT}B"])
def test_a_second_backward_through_one_graph(saved_inputs: str, policy: str) -> None:
    found = []
    for option in ("device", saved_inputs):
        torch.manual_seed(0)
        with emulated_device(policy):
            model = Tower(layers=5)
            with Engine(model, "emu", saved_inputs=option) as engine:
                loss = loss_of(model, tokens(device="emu"))
                loss.backward(retain_graph=True)
                loss.backward()
                assert engine.accounting.device_bytes["saved inputs"] == 0
                assert engine.accounting.inputs_waited_for == 0
                with pytest.raises(RuntimeError, match="second time"):
                    loss.backward()
            found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("first", [0, 1])
def test_two_graphs_and_two_backwards_in_either_order(first: int, policy: str) -> None:
    found = []
    for option in ("device", "host"):
        torch.manual_seed(0)
        with emulated_device(policy):
            model = Tower(layers=4)
            with Engine(model, "emu", saved_inputs=option):
                losses = [loss_of(model, tokens(seed, "emu")) for seed in range(2)]
                losses[first].backward()
                losses[1 - first].backward()
            found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Fails(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden)
        if self.fails:
            raise ValueError("no")
        return output


@pytest.mark.parametrize("policy", POLICIES)
def test_a_failed_forward_leaves_nothing_behind(policy: str) -> None:
    found = []
    for option in ("device", "host"):
        torch.manual_seed(0)
        with emulated_device(policy):
            model = Tower(layers=4)
            model.blocks[3] = Fails(WIDTH)
            with Engine(model, "emu", layers=["blocks.*"], saved_inputs=option) as engine:
                model.blocks[3].fails = True
                with pytest.raises(ValueError, match="no"):
                    loss_of(model, tokens(device="emu"))
                model.blocks[3].fails = False
                gc.collect()
                assert engine.accounting.device_bytes["saved inputs"] == 0
                loss_of(model, tokens(device="emu")).backward()
            found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_backward_for_a_later_tensor_alone() -> None:
    """What was brought back for a layer that then does not run leaves the device again."""
    with emulated_device("random:0"):
        model = Tower(layers=4)
        with Engine(model, "emu", saved_inputs="host") as engine:
            loss_of(model, tokens(device="emu")).backward(inputs=list(model.blocks[3].parameters()))
            assert engine.accounting.device_bytes["saved inputs"] == 0
            loss_of(model, tokens(device="emu")).backward()
            assert engine.accounting.device_bytes["saved inputs"] == 0
