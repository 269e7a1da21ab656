"""Saved inputs moved to the host: the same numbers, and no more bytes than needed."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatrain.engine import Engine
from tests.emulated import emulated_device
from tests.engine.models import INPUT, WIDTH, Block, Tower, loss_of, tokens

POLICIES = ("lazy", "eager:gradients", "random:0")


class Attends(nn.Module):
    """A block that is given more than its hidden state: a memory, a mask, a table."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.mix = Block(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if memory is not None:
            hidden = hidden + self.mix(memory)
        if mask is not None:
            hidden = hidden.masked_fill(mask, 0)
        return self.block(hidden)


class Kinds(nn.Module):
    """Layers that share inputs, or are given views of them, in the ways that models do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.ModuleList([Attends() for _ in range(3)])
        self.second = nn.ModuleList([Attends() for _ in range(3)])

    def forward(self, hidden: Tensor) -> Tensor:
        return getattr(self, self.kind.replace(" ", "_"))(hidden)

    def encoder_and_decoder(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)[..., None].expand_as(hidden)
        memory = hidden
        for layer in self.first:
            memory = layer(memory, mask=mask)
        for layer in self.second:
            hidden = layer(hidden, memory)
        return hidden

    def skips(self, hidden: Tensor) -> Tensor:
        kept = []
        for layer in self.first:
            kept.append(hidden)
            hidden = layer(hidden)
        for layer in self.second:
            hidden = layer(hidden, kept.pop())
        return hidden

    def views(self, hidden: Tensor) -> Tensor:
        parts = torch.cat([hidden] * 6).chunk(6)  # dense views of one memory
        for layer, part in zip([*self.first, *self.second], parts, strict=True):
            hidden = layer(hidden, part)
        return hidden

    def views_with_gaps(self, hidden: Tensor) -> Tensor:
        parts = torch.stack([hidden] * 6, 2)
        for index, layer in enumerate([*self.first, *self.second]):
            hidden = layer(hidden, parts[:, :, index])
        return hidden

    def transposed(self, hidden: Tensor) -> Tensor:
        for layer in [*self.first, *self.second]:
            hidden = layer(hidden.transpose(0, 1).contiguous().transpose(0, 1))
        return hidden

    def a_layer_used_twice(self, hidden: Tensor) -> Tensor:
        for layer in [*self.first, *self.first, *self.second]:
            hidden = layer(hidden)
        return hidden

    def with_itself_detached(self, hidden: Tensor) -> Tensor:
        for layer in [*self.first, *self.second]:
            hidden = layer(hidden, hidden.detach())
        return hidden

    def cut_between(self, hidden: Tensor) -> Tensor:
        loss = hidden.sum()
        for layer in [*self.first, *self.second]:
            hidden = layer(hidden.detach())
            loss = loss + hidden.square().sum()
        return loss


KINDS = (
    "encoder and decoder",
    "skips",
    "views",
    "views with gaps",
    "transposed",
    "a layer used twice",
    "with itself detached",
    "cut between",
)


def gradients(kind: str, **options: Any) -> tuple[list[Tensor], Engine]:
    """Of two micro-batches, the second longer than the first."""
    torch.manual_seed(0)
    model = Kinds(kind)
    with Engine(model, "emu", **options) as engine:
        for length in (5, 6):
            inputs = torch.randn(2, length, WIDTH).to("emu").requires_grad_()
            model(inputs).square().sum().backward()
    assert inputs.grad is not None
    return [inputs.grad.cpu(), *(p.grad for p in model.parameters() if p.grad is not None)], engine


@functools.cache
def gradients_of_inputs_kept_on_the_device(kind: str) -> list[Tensor]:
    with emulated_device():
        return gradients(kind)[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_inputs_kept_on_the_device(kind: str, policy: str) -> None:
    expected = gradients_of_inputs_kept_on_the_device(kind)
    for option in ("host", f"{2 * INPUT}B"):
        with emulated_device(policy):
            found, engine = gradients(kind, saved_inputs=option)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert engine.accounting.device_bytes["saved inputs"] == 0


def moved(kind: str) -> int:
    """Bytes of inputs that one forward of a kind sends to the host."""
    with emulated_device():
        model = Kinds(kind)
        with Engine(model, "emu", saved_inputs="host") as engine:
            output = model(torch.randn(2, 5, WIDTH).to("emu"))
            assert output.requires_grad
            return engine.accounting.bytes_to_host


def test_what_several_layers_are_given_moves_at_most_once() -> None:
    # the encoder's output and the mask belong to the newest call as long as they are used; hidden states of six calls, but the last
    # (decoder's third) stays, and the first call's input is the decoder's first too
    assert moved("encoder and decoder") == 4 * INPUT
    # six hidden states but the newest; what is kept for later is the input of an earlier call
    assert moved("skips") == 5 * INPUT
    # a hidden state and a part, but the newest call's
    assert moved("views") == 2 * 5 * INPUT
    assert moved("with itself detached") == 5 * INPUT
    # the parts cannot be copied without their gaps, and stay
    assert moved("views with gaps") == 5 * INPUT


def test_a_frozen_prefix_brings_nothing_back() -> None:
    with emulated_device():
        model = Tower(layers=6)
        model.embedding.requires_grad_(False)
        model.blocks[:4].requires_grad_(False)
        with Engine(model, "emu", saved_inputs="host") as engine:
            loss_of(model, tokens(device="emu")).backward()
            weights = 8 * engine.layers[0].nbytes - 2 * engine.layers[0].nbytes  # six forward, two backward, of which two are in slots
            resident = sum(engine.parameters[name].nbytes for name in ("embedding.weight", "head.weight", "head.bias"))
            assert engine.accounting.bytes_to_device == weights + resident + INPUT  # of the last but one layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    found = []
    for option in ("device", "host"):
        torch.manual_seed(0)
        with emulated_device():
            layers = nn.ModuleList([nn.Linear(4, 4, dtype=dtype) for _ in range(3)])
            hidden = torch.randn(2, 4, dtype=dtype).to("emu")
            with Engine(layers, "emu", saved_inputs=option):
                for layer in layers:
                    hidden = layer(hidden).conj() if dtype.is_complex else layer(hidden)
                hidden.abs().sum().backward()
            found.append([p.grad for p in layers.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_on_the_cpu_it_is_without_meaning_and_said() -> None:
    model = Tower(layers=2)
    with pytest.warns(UserWarning, match="saved_inputs='host' is without meaning on the CPU"), Engine(model, saved_inputs="host") as engine:
        loss_of(model, tokens()).backward()
    assert engine.saved_inputs.host_bytes == 0
