"""Several calls of the module in one backward: their gradients are summed with each other before `.grad` gets them, as autograd does."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from lightning_megatrain.engine import Engine
from tests.emulated import emulated_device
from tests.engine.models import Tower, loss_of, tokens


def gradients(device: str | None, calls: Sequence[int], tied: bool = False, region: str = "none", cache: bool = True) -> dict[str, Tensor]:
    """What `.grad` holds after as many backwards as there are numbers, each through that many calls.

    Args:
        device: Where to stream to; None trains plain.
        calls: How many calls each backward joins.
        tied: Whether head and embedding are one parameter.
        region: Whether BF16 autocast is around each call, or all calls of a backward, or none.
        cache: Whether autocast keeps its casts within a region.
    """

    def autocast(around: str) -> AbstractContextManager[object]:
        return torch.autocast(device or "cpu", torch.bfloat16, cache_enabled=cache) if around == region else nullcontext()

    torch.manual_seed(0)
    model = Tower(layers=3)
    if tied:
        model.head.weight = model.embedding.weight  # type: ignore[assignment]
    engine = None if device is None else Engine(model, device)
    seed = 0
    for number in calls:
        losses = []
        with autocast("all calls"):
            for _ in range(number):
                with autocast("each call"):
                    losses.append(loss_of(model, tokens(seed, device or "cpu")))
                seed += 1
        torch.stack(losses).sum().backward()
    if engine is not None:
        assert not any(resident.outstanding for resident in engine._residents._residents)
        engine.close()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def differences(policy: str = "lazy", **options: object) -> dict[str, float]:
    """How far streamed gradients are from plain ones, in parts of the largest of each parameter; only those that are not equal."""
    expected = gradients(None, **options)  # type: ignore[arg-type]
    with emulated_device(policy):
        found = gradients("emu", **options)  # type: ignore[arg-type]
    assert expected.keys() == found.keys()
    pairs = {name: (expected[name], found[name]) for name in expected if not torch.equal(expected[name], found[name])}
    return {name: float((a - b).abs().max() / a.abs().max()) for name, (a, b) in pairs.items()}


@pytest.mark.parametrize("policy", ["lazy", "eager:gradients", "random:0", "random:1"])
@pytest.mark.parametrize("calls", [(2,), (3,), (2, 2), (1, 3, 2)])
def test_gradients_are_those_of_plain_training(calls: Sequence[int], policy: str) -> None:
    assert differences(policy, calls=calls) == {}


@pytest.mark.parametrize(("region", "cache"), [("each call", True), ("all calls", False)])
def test_under_autocast_too(region: str, cache: bool) -> None:
    assert differences(calls=(2, 3), region=region, cache=cache) == {}


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_the_second_backward_of_a_kept_graph_too(device: str) -> None:
    def gradients_of(model: Tower, device: str) -> dict[str, Tensor | None]:
        loss = loss_of(model, tokens(device=device)) + loss_of(model, tokens(1, device))
        loss.backward(retain_graph=True)
        (0.37 * loss).backward()
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}

    torch.manual_seed(0)
    expected = gradients_of(Tower(layers=3), "cpu")
    torch.manual_seed(0)
    model = Tower(layers=3)
    with emulated_device(), Engine(model, device) as engine:
        found = gradients_of(model, device)
        assert not any(layer.outstanding for layer in engine.layers)
        assert not any(resident.outstanding for resident in engine._residents._residents)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_resident_parameter_that_a_call_uses_twice_is_summed_call_by_call() -> None:
    """Plain training adds up four uses one by one, here two and two: the same numbers in another order, of which FP32 loses last bits."""
    assert differences(calls=(1, 1), tied=True) == {}
    found = differences(calls=(2, 2), tied=True)
    assert found.keys() == {"embedding.weight"}
    assert found["embedding.weight"] < 4 * torch.finfo(torch.float32).eps


def test_in_one_region_of_autocast_gradients_of_calls_are_summed_in_fp32() -> None:
    """Plain training's cache makes one cast for all calls, whose gradients are summed in BF16: one sum of two is rounded by half an ulp."""
    found = differences(calls=(2,), region="all calls")
    assert "head.weight" in found
    assert "embedding.weight" not in found, "it is not cast"
    assert max(found.values()) <= torch.finfo(torch.bfloat16).eps / 2


def test_a_call_without_a_backward_is_not_waited_for() -> None:
    with emulated_device():
        model = Tower(layers=2)
        with Engine(model, "emu") as engine:
            first = engine._residents._residents[0]
            with torch.no_grad():
                loss_of(model, tokens(device="emu"))
            assert len(first.outstanding) == 0
            loss = loss_of(model, tokens(device="emu"))
            assert len(first.outstanding) == 1
            loss_of(model, tokens(1, device="emu")).backward()
            assert len(first.outstanding) == 1, "the first call's, whose backward may still come"
            del loss
            assert len(first.outstanding) == 0
