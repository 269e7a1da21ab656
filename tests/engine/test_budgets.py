"""What the engine holds, moves and computes, to the byte."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_megatrain.engine import Engine
from tests.emulated import emulated_device
from tests.engine.models import Tower, loss_of, tokens


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int, device: str) -> None:
    loss_of(model, tokens(seed, device)).backward()
    optimizer.step()
    optimizer.zero_grad()


def run(layers: int, steps: int = 3, **options: object) -> tuple[Engine, Tower, int]:
    """Trains a few steps, counting the last; returns the engine, the model, and the device's own count of its peak."""
    with emulated_device() as device:
        model = Tower(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Engine(model, "emu", **options) as engine:  # type: ignore[arg-type]
            for number in range(steps):
                if number == steps - 1:
                    engine.accounting.reset()
                    device.reset_counters()
                step(model, optimizer, number, "emu")
            return engine, model, device.peak_bytes


def test_two_slots_of_the_size_of_a_layer() -> None:
    engine, model, _ = run(layers=5)
    assert engine.accounting.peak_bytes["slots"] == 2 * engine.layers[0].nbytes
    assert engine.layers[0].nbytes == sum(p.nbytes for p in model.blocks[0].parameters())  # each a multiple of 64 bytes here


def test_device_memory_grows_with_depth_by_the_saved_inputs_alone() -> None:
    shallow, _, shallow_peak = run(layers=4)
    deep, _, deep_peak = run(layers=32)
    saved = 2 * 5 * 16 * 4  # one input of B x T x width in FP32
    growth = {kind: deep.accounting.peak_bytes[kind] - shallow.accounting.peak_bytes[kind] for kind in deep.accounting.peak_bytes}
    assert growth == {"slots": 0, "kept layers": 0, "resident": 0, "buffers": 0, "gradients": 0, "saved inputs": 28 * saved}
    assert deep_peak - shallow_peak == 28 * saved


def test_with_saved_inputs_on_the_host_device_memory_does_not_grow_with_depth() -> None:
    shallow, _, shallow_peak = run(layers=4, saved_inputs="host")
    deep, _, deep_peak = run(layers=32, saved_inputs="host")
    saved = 2 * 5 * 16 * 4
    assert deep.accounting.peak_bytes == shallow.accounting.peak_bytes
    assert deep.accounting.peak_bytes["saved inputs"] == 2 * saved  # of the layer that runs, and of the one before, on its way
    assert deep_peak == shallow_peak


@pytest.mark.parametrize(("option", "stay"), [("device", 8), ("host", 1), ("1B", 1), ("1280B", 2), ("3200B", 5), ("1MiB", 8)])
def test_what_fits_the_budget_stays_and_the_rest_crosses_the_bus_once_each_way(option: str, stay: int) -> None:
    layers, saved = 8, 2 * 5 * 16 * 4
    plain, _, _ = run(layers)
    engine, _, _ = run(layers, saved_inputs=option)
    moved = (layers - stay) * saved
    assert engine.accounting.bytes_to_host - plain.accounting.bytes_to_host == moved
    assert engine.accounting.bytes_to_device - plain.accounting.bytes_to_device == moved
    assert engine.saved_inputs.host_bytes == moved
    assert engine.accounting.peak_bytes["saved inputs"] == min(stay + 1, layers) * saved
    assert engine.accounting.inputs_waited_for == 0


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_layer_is_loaded_twice_a_step_unless_it_is_still_in_a_slot(slots: int) -> None:
    layers = 6
    engine, _, _ = run(layers=layers, slots=slots)
    assert engine.accounting.loads.total() == 2 * layers - slots
    assert engine.accounting.bytes_to_device == (2 * layers - slots) * sum(p.nbytes for p in engine.layers[0].parameters) + sum(
        engine.parameters[name].nbytes for name in ("embedding.weight", "head.weight", "head.bias")
    )


def test_after_the_first_step_no_load_is_waited_for() -> None:
    engine, _, _ = run(layers=6)
    assert (engine.accounting.prefetch_misses, engine.accounting.prefetch_hits) == (0, 12)


def test_each_trainable_byte_comes_back_once() -> None:
    engine, model, _ = run(layers=6)
    assert engine.accounting.bytes_to_host == sum(p.nbytes for p in model.parameters())


def test_frozen_layers_send_no_gradients_and_a_frozen_prefix_is_not_run_again() -> None:
    with emulated_device():
        model = Tower(layers=6)
        model.embedding.requires_grad_(False)
        for block in model.blocks[:4]:
            block.requires_grad_(False)
        with Engine(model, "emu") as engine:
            loss_of(model, tokens(device="emu")).backward()
            assert engine.accounting.bytes_to_host == sum(p.nbytes for p in model.parameters() if p.requires_grad)
            assert engine.accounting.prefetch_hits + engine.accounting.prefetch_misses == 6 + 2  # forward of all, backward of the last two
        assert [name for name, p in model.named_parameters() if p.grad is not None] == [
            name for name, p in model.named_parameters() if p.requires_grad
        ]


def test_casts_send_half_the_bytes() -> None:
    with emulated_device():
        model = Tower(layers=6, width=32)  # so that each BF16 bias fills 64 bytes, the alignment of a slot
        with Engine(model, "emu") as engine:
            for seed in range(2):
                engine.accounting.reset()
                with torch.autocast("emu", torch.bfloat16, cache_enabled=False):
                    loss = loss_of(model, tokens(seed, "emu"))
                loss.backward()
            cast = sum(p.nbytes for name, p in model.blocks[0].named_parameters() if "norm" not in name)
            kept = sum(p.nbytes for name, p in model.blocks[0].named_parameters() if "norm" in name)
            resident = sum(engine.parameters[name].nbytes for name in ("embedding.weight", "head.weight", "head.bias"))
            assert engine.accounting.bytes_to_device == 10 * (cast // 2 + kept) + resident
            assert engine.accounting.bytes_to_host == 6 * (cast // 2 + kept) + resident
            assert engine.accounting.device_bytes["slots"] == 2 * (cast // 2 + kept)
            assert sum(layer.working_copy_bytes for layer in engine.layers) == 6 * cast // 2


def test_flops_are_plain_plus_one_forward_of_the_streamed_layers() -> None:
    def flops(model: Tower) -> int:
        with FlopCounterMode(display=False) as counter:
            loss_of(model, tokens()).backward()
        return counter.get_total_flops()

    model = Tower(layers=5)
    plain = flops(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = model.embedding(tokens())
        for block in model.blocks:
            hidden = block(hidden)
    with Engine(model):
        assert flops(model) == plain + counter.get_total_flops()


class _NoteAlive(torch.autograd.Function):
    """In backward, notes whether the memory of the layer's output is still held."""

    @staticmethod
    def forward(ctx: Any, layer: "NotingLayer", hidden: Tensor) -> Tensor:
        ctx.layer = layer
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.layer.held.append(ctx.layer.memory() is not None)
        return None, gradient


class NotingLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.held: list[bool] = []

    def forward(self, hidden: Tensor) -> Tensor:
        output = _NoteAlive.apply(self, super().forward(hidden)) + 1  # an addition saves nothing
        self.memory = weakref.ref(output.block)
        return output


def test_what_a_layer_returned_again_is_given_back_before_its_backward() -> None:
    with emulated_device():
        model = nn.Sequential(*[NotingLayer() for _ in range(3)])
        with Engine(model, "emu"):
            model(torch.randn(2, 6).to("emu")).sum().backward()
        assert [layer.held for layer in model] == 3 * [[False]]


def live_in_the_last_backward(vocabulary: int) -> int:
    """Bytes on the device when backward has come to the first layer."""
    found: list[int] = []
    with emulated_device() as device:
        model = Tower(layers=4, vocabulary=vocabulary)
        model.blocks[0].norm.register_forward_hook(lambda *_: found.append(device.live_bytes))
        with Engine(model, "emu"):
            loss_of(model, tokens(device="emu")).backward()
    _, in_backward = found
    return in_backward


def test_the_head_s_gradient_leaves_while_layers_run_backward() -> None:
    grown = live_in_the_last_backward(4096) - live_in_the_last_backward(2048)
    assert grown == (2 * 16 + 1) * 2048 * 4  # the embedding, the head and its bias, in FP32, and no gradient of them


@pytest.mark.parametrize(("trusted", "answers"), [(True, 0), (False, 2)])
def test_the_host_asks_the_device_for_nothing_where_versions_tell_of_writes(trusted: bool, answers: int) -> None:
    """Else it asks when a step begins and when its backward ends, once for all resident parameters."""
    with emulated_device() as device:
        model = Tower(layers=3)
        with Engine(model, "emu", trust_versions=trusted) as engine:
            loss_of(model, tokens(device="emu")).backward()
            engine.accounting.reset()
            device.reset_counters()
            loss_of(model, tokens(device="emu")).backward()
            asked = device.to_host_bytes - engine.accounting.bytes_to_host
    assert asked == answers * 3  # the embedding, the head and its bias: a byte each


def test_saved_inputs_are_given_back_by_backward_and_by_a_dropped_graph() -> None:
    model = Tower(layers=3)
    with Engine(model) as engine:
        loss = loss_of(model, tokens())
        assert engine.accounting.device_bytes["saved inputs"] == 3 * 2 * 5 * 16 * 4
        loss.backward()
        assert engine.accounting.device_bytes["saved inputs"] == 0
        loss = loss_of(model, tokens())
        del loss
        assert engine.accounting.device_bytes["saved inputs"] == 0
