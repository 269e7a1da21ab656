"""Saved inputs moved to the host: the same numbers, whatever becomes of the inputs and of the graph."""

import functools
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatrain.engine import Engine, pinning
from lightning_megatrain.engine.report import report
from lightning_megatrain.engine.sizes import parse_size
from tests.emulated import PageLocks, emulated_device
from tests.engine.models import Block, Tower, loss_of, tokens

POLICIES = ("lazy", "eager:gradients", "random:0")
WIDTH, INPUT = 16, 2 * 5 * 16 * 4  # bytes of one hidden state


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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_inputs_kept_on_the_device(kind: str, policy: str) -> None:
    with emulated_device():
        expected, _ = gradients(kind)
    for option in ("host", 2 * INPUT):
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
@pytest.mark.parametrize("saved_inputs", ["host", 2 * INPUT])
def test_a_second_backward_through_one_graph(saved_inputs: int | str, policy: str) -> None:
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


def test_host_buffers_are_used_again_after_backward_and_after_a_dropped_graph() -> None:
    with emulated_device():
        model = Tower(layers=6)
        with Engine(model, "emu", saved_inputs="host") as engine:
            for seed in range(3):
                loss_of(model, tokens(seed, "emu")).backward()
                assert engine.saved_inputs.host_bytes == 5 * INPUT
            for seed in range(3):
                loss_of(model, tokens(seed, "emu"))  # dropped at once
                assert engine.saved_inputs.host_bytes == 5 * INPUT
            assert engine.accounting.device_bytes["saved inputs"] == 0


def test_buffers_that_have_become_too_small_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    locks = PageLocks()
    monkeypatch.setitem(pinning.PAGE_LOCKERS, "emu", lambda: locks)
    with emulated_device():
        model = Tower(layers=4)
        with Engine(model, "emu", saved_inputs="host") as engine:
            before = len(locks.locked)
            for rows in (2, 4, 3, 200, 100):
                inputs = torch.randint(12, (rows, 5)).to("emu")
                loss_of(model, inputs).backward()
                assert engine.saved_inputs.host_bytes == 3 * max(rows, {3: 4, 100: 200}.get(rows, 0)) * 5 * WIDTH * 4
                assert len(locks.locked) == before + 3 + 2  # and two staging buffers for gradients
        assert not locks.locked


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


def test_backward_for_a_later_tensor_alone() -> None:
    """What was brought back for a layer that then does not run leaves the device again."""
    with emulated_device("random:0"):
        model = Tower(layers=4)
        with Engine(model, "emu", saved_inputs="host") as engine:
            loss_of(model, tokens(device="emu")).backward(inputs=list(model.blocks[3].parameters()))
            assert engine.accounting.device_bytes["saved inputs"] == 0
            loss_of(model, tokens(device="emu")).backward()
            assert engine.accounting.device_bytes["saved inputs"] == 0


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


def test_the_report_counts_the_host_buffers() -> None:
    with emulated_device():
        model = Tower(layers=9)
        with Engine(model, "emu", saved_inputs="host") as engine:
            loss_of(model, tokens(device="emu")).backward()
            (row,) = [line.split() for line in report(engine).splitlines() if line.startswith("  saved inputs")][:1]
    assert row[2:4] == ["5.0", "KiB"]


def test_the_report_says_what_could_not_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for limit in (None, 0):
        monkeypatch.setitem(pinning.PAGE_LOCKERS, "emu", functools.partial(PageLocks, limit))
        with emulated_device():
            model = Tower(layers=9)
            with Engine(model, "emu", saved_inputs="host") as engine:
                loss_of(model, tokens(device="emu")).backward()
                found.append("5.0 KiB of saved inputs lie in memory that the system refused to page-lock" in report(engine))
    assert found == [False, True]


GOOD: dict[int | str, int] = {1: 1, 20 << 30: 20 << 30, "20GiB": 20 << 30, "20 GB": 20 * 10**9, "1.5 mib": 3 << 19, "64": 64, " 8b ": 8}


@pytest.mark.parametrize("text", GOOD)
def test_sizes(text: int | str) -> None:
    assert parse_size(text, "device_memory") == GOOD[text]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("20 bananas", ValueError, r"saved_inputs='20 bananas' is no size.*'20GiB'"),
        ("", ValueError, "is no size"),
        (0, ValueError, r"saved_inputs=0: a size must be above zero"),
        (-1, ValueError, r"saved_inputs=-1: a size must be above zero"),
        ("-2GiB", ValueError, "above zero"),
        (1.5, TypeError, r"saved_inputs=1\.5: a size is a number of bytes.*not float"),
        (True, TypeError, "not bool"),
        (None, TypeError, "not NoneType"),
    ],
)
def test_what_is_no_size_is_refused(value: Any, error: type[Exception], message: str) -> None:
    model = Tower(layers=2)
    with pytest.raises(error, match=message):
        Engine(model, saved_inputs=value)
