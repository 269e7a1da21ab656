"""Layers that keep their weights on the device, and device copies that outlive a step: fewer loads, the same numbers, within the budget."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatrain.engine import Engine
from lightning_megatrain.engine.report import report
from tests.emulated import DEVICE, emulated_device
from tests.engine.models import Tower, loss_of, tokens

LAYERS = 8
LAYER = sum(p.nbytes for p in Tower().blocks[0].parameters())  # a multiple of 64 bytes here


@cache
def peak_of_a_step() -> int:
    """The device's own count of the most bytes held in a first step without kept layers."""
    with emulated_device():
        model = Tower(LAYERS)
        with Engine(model, "emu"):
            DEVICE.reset_counters()
            loss_of(model, tokens(device="emu")).backward()
            return DEVICE.peak_bytes


def train(
    engine: Engine | None, model: Tower, device: str, micro_batches: int = 1, steps: int = 3, fused: bool = False, evaluate: bool = False
) -> list[Tensor]:
    """Losses, gradients and weights; the engine's counts are of the last step alone."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, fused=fused)
    numbers = []
    for step in range(steps):
        if engine is not None and step == steps - 1:
            engine.accounting.reset()
        for micro_batch in range(micro_batches):
            loss = loss_of(model, tokens(10 * step + micro_batch, device))
            loss.backward()
            numbers.append(loss.detach().cpu())
        numbers += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                numbers.append(loss_of(model, tokens(step, device)).cpu())
    return [*numbers, *(p.detach().clone() for p in model.parameters())]


def tower(frozen: int) -> Tower:
    torch.manual_seed(0)
    model = Tower(LAYERS)
    model.blocks[:frozen].requires_grad_(False)
    return model


@cache
def trained_plain(frozen: int, **training: Any) -> list[Tensor]:
    return train(None, tower(frozen), "cpu", **training)


def both(policy: str = "lazy", frozen: int = 0, training: dict[str, Any] | None = None, **options: Any) -> tuple[Engine, bool]:
    """Trains streamed and on the CPU; returns the engine, closed, and whether every number is the same."""
    expected = trained_plain(frozen, **(training or {}))
    with emulated_device(policy):
        model = tower(frozen)
        with Engine(model, "emu", **options) as engine:
            found = train(engine, model, "emu", **(training or {}))
    return engine, all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("policy", ["lazy", "eager:weights", "random:0"])
@pytest.mark.parametrize("kept", [0, 1, 3, 8])
@pytest.mark.parametrize("trust", [False, True])
def test_the_numbers_are_the_same_however_many_are_kept(kept: int, policy: str, trust: bool) -> None:
    budget = peak_of_a_step() + kept * LAYER
    training = {"micro_batches": 2, "fused": True, "evaluate": True}
    engine, same = both(policy, training=training, device_memory=f"{budget}B", trust_versions=trust)
    assert same
    assert f"{kept} of {LAYERS} layers" in engine.kept_layers


@pytest.mark.parametrize("kept", [0, 1, 3, 6])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_kept_layers_are_loaded_once_a_step(kept: int, micro_batches: int) -> None:
    engine, same = both(training={"micro_batches": micro_batches}, device_memory=f"{peak_of_a_step() + kept * LAYER}B")
    streamed = LAYERS - kept
    assert same
    assert engine.accounting.loads.total() == micro_batches * (kept + 2 * streamed - 2)  # two are still in slots when backward begins
    assert engine.accounting.prefetch_misses == 0


@pytest.mark.parametrize("kept", [0, 1, 3, 6])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_where_versions_are_trusted_kept_layers_are_loaded_once_an_optimizer_step(kept: int, micro_batches: int) -> None:
    engine, same = both(
        training={"micro_batches": micro_batches, "fused": True}, device_memory=f"{peak_of_a_step() + kept * LAYER}B", trust_versions=True
    )
    streamed = LAYERS - kept
    assert same
    # two layers are still in slots when backward begins, and two when the next micro-batch does
    assert engine.accounting.loads.total() == kept + 2 * streamed - 2 + (micro_batches - 1) * (2 * streamed - 4)
    assert engine.accounting.prefetch_misses == 0


def test_frozen_layers_that_are_kept_are_never_loaded_again_where_versions_are_trusted() -> None:
    budget = peak_of_a_step() + LAYERS * LAYER
    engine, same = both(frozen=5, training={"micro_batches": 2}, device_memory=f"{budget}B", trust_versions=True)
    assert same
    assert engine.accounting.loads == {f"blocks.{index}": 1 for index in (5, 6, 7)}
    engine, same = both(frozen=5, training={"micro_batches": 2}, device_memory=f"{budget}B")
    assert same
    assert engine.accounting.loads == {f"blocks.{index}": 2 for index in range(LAYERS)}  # once each micro-batch


@pytest.mark.parametrize("over", [0, 1, LAYER - 1])
@pytest.mark.parametrize("kept", [1, 4])
def test_the_device_never_holds_more_than_the_budget(kept: int, over: int) -> None:
    peak = peak_of_a_step()
    budget = peak + kept * LAYER + over
    with emulated_device():
        model = Tower(LAYERS)
        with Engine(model, "emu", device_memory=f"{budget}B") as engine:
            train(engine, model, "emu", micro_batches=2)
            assert DEVICE.peak_bytes <= budget
            # to within a layer: the first step checks that layers repeat themselves, and needs a few bytes more than later ones
            assert DEVICE.peak_bytes > peak + (kept - 1) * LAYER
            assert engine.accounting.device_bytes["kept layers"] == kept * LAYER
            assert f"{kept} of {LAYERS} layers keep their weights" in report(engine)
        assert engine.accounting.device_bytes["kept layers"] == 0


def test_auto_takes_what_is_free_less_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = peak_of_a_step()
    monkeypatch.setattr(DEVICE, "total_bytes", 60_000)
    fit = (54_000 - peak) // LAYER
    assert 0 < fit < LAYERS
    said: list[str] = []
    with emulated_device():
        model = Tower(LAYERS)
        with Engine(model, "emu", device_memory="auto", tell=said.append) as engine:
            train(engine, model, "emu")
            assert engine.accounting.device_bytes["kept layers"] == fit * LAYER
            assert DEVICE.peak_bytes <= 54_000
    assert said == [engine.kept_layers]


def test_a_budget_below_the_first_step_s_peak_keeps_none_and_says_so() -> None:
    engine, same = both(device_memory="1KiB")
    assert same
    assert engine.kept_layers.startswith("device_memory='1KiB': 0 of 8 layers keep their weights on the device: the first step's peak was ")


def test_a_second_engine_measures_its_own_first_step() -> None:
    peak = peak_of_a_step()
    with emulated_device():
        model = Tower(LAYERS)
        for _ in range(2):
            with Engine(model, "emu", device_memory=f"{peak + 2 * LAYER}B") as engine:
                train(engine, model, "emu", steps=2)
                assert engine.accounting.device_bytes["kept layers"] == 2 * LAYER


def test_what_is_kept_is_loaded_again_after_writes_that_can_be_told() -> None:
    """In place, by new storage, by a fused optimizer, and where `weights_changed` says so."""
    with emulated_device():
        model = Tower(LAYERS)
        plain = Tower(LAYERS)
        plain.load_state_dict(model.state_dict())
        weights = [m.blocks[2].up.weight for m in (model, plain)]

        def in_place(weight: Tensor) -> None:
            with torch.no_grad():
                weight.mul_(2)

        def new_storage(weight: Tensor) -> None:
            weight.data = weight.detach() * 2

        def through_data(weight: Tensor) -> None:
            weight.data.mul_(2)
            engine.weights_changed()

        with Engine(model, "emu", device_memory=f"{peak_of_a_step() + LAYERS * LAYER}B", trust_versions=True) as engine:
            train(engine, model, "emu", steps=2, fused=True)
            train(None, plain, "cpu", steps=2, fused=True)
            for write in (in_place, new_storage, through_data):
                for weight in weights:
                    write(weight)
                assert torch.equal(loss_of(model, tokens(5, "emu")).cpu(), loss_of(plain, tokens(5)))


@pytest.mark.parametrize("trust", [False, True])
def test_casts_decided_after_the_layer_was_kept(trust: bool) -> None:
    """Evaluation travels in other dtypes than training: where a kept layer's own slot is too small, it goes through the others."""
    found = []
    for device in ("cpu", "emu"):
        torch.manual_seed(0)
        with emulated_device("random:1"):
            model = Tower(LAYERS)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine = Engine(model, device, device_memory=1 << 20, trust_versions=trust) if device == "emu" else None
            numbers = []
            for step in range(4):
                model.train()
                with torch.autocast(device, torch.bfloat16, cache_enabled=False):
                    loss = loss_of(model, tokens(step, device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                numbers.append(loss.detach().cpu())
                if step > 0:  # in the first step it would be decided by the dtypes of evaluation
                    model.eval()
                    with torch.no_grad():
                        numbers.append(loss_of(model, tokens(step, device)).cpu())
            found.append(numbers)
            if engine is not None:
                of_evaluation = LAYERS * engine.layers[0].nbytes
                assert 0 < engine.accounting.device_bytes["kept layers"] < of_evaluation
                engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("20 bananas", ValueError, r"device_memory='20 bananas' is no size.*'20GiB'"),
        (0, ValueError, "device_memory=0: a size must be above zero"),
        (-5, ValueError, "device_memory=-5: a size must be above zero"),
        (20, ValueError, r"device_memory=20 counts bytes, .* '20GB' says gigabytes"),
        (True, TypeError, "device_memory=True"),
        ("2GiB", ValueError, r"device_memory='2GiB' is more than emu has \(1\.0 GiB\)"),
    ],
)
def test_what_is_no_budget_is_refused(value: Any, error: type[Exception], message: str) -> None:
    with emulated_device():
        model = Tower(2)
        with pytest.raises(error, match=message):
            Engine(model, "emu", device_memory=value)


def test_on_the_cpu_a_budget_is_without_meaning_and_said() -> None:
    model = Tower(2)
    with pytest.warns(UserWarning, match="device_memory='auto' is without meaning on the CPU"), Engine(model, device_memory="auto"):
        loss_of(model, tokens()).backward()


def test_without_trust_a_write_through_data_between_steps_is_seen() -> None:
    with emulated_device():
        model, plain = Tower(LAYERS), Tower(LAYERS)
        plain.load_state_dict(model.state_dict())
        with Engine(model, "emu", device_memory=1 << 20) as engine:
            train(engine, model, "emu", steps=2)
            train(None, plain, "cpu", steps=2)
            for one in (model, plain):
                one.blocks[3].up.weight.data.mul_(2)
            assert torch.equal(loss_of(model, tokens(5, "emu")).cpu(), loss_of(plain, tokens(5)))
