"""State dictionaries: to torch's AdamW and back, between forms, and resumed exactly."""

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatrain.optim import HostAdamW

FORMS = list(itertools.product(["fp32", "split"], ["fp32", "bf16", "int8"]))


def gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10 ** torch.randint(-3, 1, shape, generator=generator).float() for shape in SHAPES]


SHAPES = [(20, 30), (7,), (0, 3)]


def make(masters: str = "fp32", moments: str = "fp32", **options: Any) -> tuple[list[nn.Parameter], HostAdamW]:
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    exact = [p.detach().clone() for p in params]
    if masters == "split":
        for parameter in params:
            parameter.data = parameter.data.bfloat16()
    optimizer = HostAdamW(params, lr=1e-3, masters=masters, moments=moments, **options)
    for parameter, value in zip(params, exact, strict=True):
        optimizer.set_master(parameter, value)
    return params, optimizer


def steps(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for seed in range(first, last):
        for parameter, grad in zip(params, gradients(seed), strict=True):
            parameter.grad = grad
        optimizer.step()


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("masters", "moments"), FORMS)
def test_a_resumed_run_is_the_run_bit_for_bit(masters: str, moments: str) -> None:
    params, optimizer = make(masters, moments)
    steps(params, optimizer, 0, 3)
    weights, state = through_a_file(([p.detach() for p in params], optimizer.state_dict()))
    steps(params, optimizer, 3, 6)

    again, resumed = make(masters, moments)
    for parameter, weight in zip(again, weights, strict=True):
        parameter.data.copy_(weight)
    resumed.load_state_dict(state)
    steps(again, resumed, 3, 6)
    for ours, theirs in zip(again, params, strict=True):
        assert torch.equal(resumed.master(ours), optimizer.master(theirs))


@pytest.mark.parametrize(("before", "after"), [("fp32", "split"), ("split", "fp32")])
def test_a_run_moves_between_fp32_and_split_masters_without_losing_a_bit(before: str, after: str) -> None:
    params, optimizer = make(before)
    steps(params, optimizer, 0, 3)
    state, exact = through_a_file((optimizer.state_dict(), [optimizer.master(p) for p in params]))

    again, moved = make(after)
    for parameter, value in zip(again, exact, strict=True):
        moved.set_master(parameter, value)
    moved.load_state_dict(state)
    steps(params, optimizer, 3, 6)
    steps(again, moved, 3, 6)
    for ours, theirs in zip(again, params, strict=True):
        assert torch.equal(moved.master(ours), optimizer.master(theirs))


@pytest.mark.parametrize("after", ["fp32", "split"])
def test_saved_masters_make_weights_exact_that_were_saved_in_bf16(after: str) -> None:
    params, optimizer = make("split")
    steps(params, optimizer, 0, 3)
    again, resumed = make(after)
    for parameter, weight in zip(again, params, strict=True):
        parameter.data.copy_(weight)
    resumed.load_state_dict(optimizer.state_dict())
    for ours, theirs in zip(again, params, strict=True):
        assert torch.equal(resumed.master(ours), optimizer.master(theirs))


def test_masters_of_other_weights_are_left_aside_with_a_warning() -> None:
    params, optimizer = make("split")
    steps(params, optimizer, 0, 1)
    again, resumed = make("split")
    with torch.no_grad():
        again[0].fill_(3.0)
    with pytest.warns(UserWarning, match="Load the model's weights before"):
        resumed.load_state_dict(optimizer.state_dict())
    assert torch.equal(resumed.master(again[0]), torch.full(SHAPES[0], 3.0))


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"decoupled_weight_decay": False, "weight_decay": 0.1}, {"maximize": True}])
def test_torch_goes_on_from_our_state_and_we_from_torchs(options: dict[str, Any]) -> None:
    params, optimizer = make(**options)
    steps(params, optimizer, 0, 2)
    mirror = [nn.Parameter(p.detach().clone()) for p in params]
    decoupled = options.get("decoupled_weight_decay", True)
    other = (torch.optim.AdamW if decoupled else torch.optim.Adam)(mirror)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    steps(params, optimizer, 2, 4)
    steps(mirror, other, 2, 4)
    back, ours = make()
    for parameter, weight in zip(back, mirror, strict=True):
        parameter.data.copy_(weight)
    ours.load_state_dict(through_a_file(other.state_dict()))
    steps(params, optimizer, 4, 6)
    steps(back, ours, 4, 6)
    for one, two in zip(back, params, strict=True):
        # Four steps differ by the last bits of weights near 1, each at most 2 units.
        torch.testing.assert_close(one, two, rtol=0, atol=8 * 2.0**-23)


@pytest.mark.parametrize(("masters", "moments"), FORMS)
def test_the_full_state_of_every_form_loads_into_torch(masters: str, moments: str) -> None:
    params, optimizer = make(masters, moments)
    steps(params, optimizer, 0, 2)
    mirror = [nn.Parameter(optimizer.master(p).clone()) for p in params]
    other = torch.optim.AdamW(mirror)
    other.load_state_dict(copy.deepcopy(optimizer.full_state_dict()))  # torch keeps what it is given
    steps(mirror, other, 2, 3)
    steps(params, optimizer, 2, 3)
    for ours, theirs in zip(params, mirror, strict=True):
        # One step from equal values: the moments are rounded only after the weight has used them.
        torch.testing.assert_close(optimizer.master(ours), theirs.detach(), rtol=0, atol=4 * 2.0**-23)


def test_8_bit_moments_cannot_be_taken_for_numbers_by_torch() -> None:
    params, optimizer = make(moments="int8")
    steps(params, optimizer, 0, 1)
    mirror = [nn.Parameter(p.detach().clone()) for p in params]
    other = torch.optim.AdamW(mirror)
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        steps(mirror, other, 1, 2)


@pytest.mark.parametrize(("saved", "loaded"), list(itertools.permutations(["fp32", "bf16", "int8"], 2)))
def test_moments_move_between_forms_within_their_precision(saved: str, loaded: str) -> None:
    params, optimizer = make(moments=saved)
    steps(params, optimizer, 0, 3)
    _, other = make(moments=loaded)
    other.load_state_dict(optimizer.state_dict())
    ours, theirs = other.full_state_dict()["state"][0], optimizer.full_state_dict()["state"][0]
    coarsest = "int8" if "int8" in (saved, loaded) else "bf16"
    for name in ("exp_avg", "exp_avg_sq"):
        # BF16 keeps 8 bits. One byte keeps 4 of value + unit, and the unit is at most 2.15 / 2^16 of a block's largest value; half a step.
        error, exact = (ours[name] - theirs[name]).abs(), theirs[name].abs()
        allowed = 2.0**-8 * exact if coarsest == "bf16" else (exact + exact.max() * 2.15 * 2.0**-16) / 16
        assert (error <= allowed).all()


def test_loading_copies_and_keeps_every_dtype() -> None:
    params, optimizer = make("split")
    steps(params, optimizer, 0, 2)
    saved = optimizer.state_dict()
    again, resumed = make("split")
    addresses = [resumed.state[p]["exp_avg"].data_ptr() for p in again]
    for parameter, weight in zip(again, params, strict=True):
        parameter.data.copy_(weight)
    resumed.load_state_dict(saved)
    for index, parameter in enumerate(again):
        state = resumed.state[parameter]
        assert {k: v.dtype for k, v in state.items()} == {
            "step": torch.float32,
            "exp_avg": torch.float32,
            "exp_avg_sq": torch.float32,
            "master_low": torch.int16,
        }
        assert state["exp_avg"].data_ptr() == addresses[index], "memory that may be pinned is filled, not replaced"
    kept = copy.deepcopy(saved)
    steps(again, resumed, 2, 3)
    assert torch.equal(saved["state"][0]["exp_avg"], kept["state"][0]["exp_avg"])


def test_a_state_that_does_not_fit_is_refused() -> None:
    params, optimizer = make()
    steps(params, optimizer, 0, 1)
    other = HostAdamW([nn.Parameter(torch.zeros(30, 20)), nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(0, 3))])
    with pytest.raises(ValueError, match=r"\(20, 30\).*\(30, 20\)"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="size of optimizer's group"):
        HostAdamW([nn.Parameter(torch.zeros(7))]).load_state_dict(optimizer.state_dict())


def test_hooks_on_loading_see_the_state_itself() -> None:
    params, optimizer = make()
    steps(params, optimizer, 0, 1)
    _, other = make()
    seen = []
    other.register_load_state_dict_pre_hook(lambda _, loaded: seen.append(loaded["state"][0]["exp_avg"]))
    other.register_load_state_dict_post_hook(lambda loaded: seen.append(loaded.state[loaded.param_groups[0]["params"][0]]["exp_avg"]))
    other.load_state_dict(optimizer.state_dict())
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_a_state_that_is_refused_changes_nothing() -> None:
    params, optimizer = make(amsgrad=True)
    steps(params, optimizer, 0, 1)
    for other, words in ((make(moments="int8")[1], "amsgrad needs exact"), (make(moments="bf16")[1], "amsgrad needs exact")):
        with pytest.raises(ValueError, match=words):
            other.load_state_dict(optimizer.state_dict())
        assert not other.state
        assert not other.param_groups[0]["amsgrad"]
    momentum = torch.optim.SGD(params, momentum=0.9)
    steps(params, momentum, 0, 1)
    saved = {"state": momentum.state_dict()["state"], "param_groups": optimizer.state_dict()["param_groups"]}
    with pytest.raises(ValueError, match=r"momentum_buffer.*exp_avg"):
        make()[1].load_state_dict(saved)


def test_amsgrad_comes_and_goes_with_what_is_loaded() -> None:
    params, optimizer = make(amsgrad=True)
    steps(params, optimizer, 0, 2)
    again, other = make()
    steps(again, other, 0, 1)
    plain = copy.deepcopy(other.state_dict())
    other.load_state_dict(optimizer.state_dict())
    for parameter, weight in zip(again, params, strict=True):
        parameter.data.copy_(weight)
    steps(params, optimizer, 2, 4)
    steps(again, other, 2, 4)
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))
    other.load_state_dict(plain)
    assert "max_exp_avg_sq" not in other.state[again[0]]
    steps(again, other, 4, 5)


def test_a_parameter_without_a_saved_state_keeps_its_exact_value() -> None:
    params, optimizer = make()
    for parameter, grad in zip(params[1:], gradients(0)[1:], strict=True):
        parameter.grad = grad
    optimizer.step()
    halves, split = make("split")
    for half, parameter in zip(halves, params, strict=True):
        split.set_master(half, parameter.detach().clone())
    split.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(split.master(half), parameter) for half, parameter in zip(halves, params, strict=True))
    steps(params, optimizer, 1, 3)
    steps(halves, split, 1, 3)
    assert all(torch.equal(split.master(half), parameter) for half, parameter in zip(halves, params, strict=True))


def test_how_a_saved_step_ran_does_not_matter() -> None:
    params, optimizer = make()
    steps(params, optimizer, 0, 1)
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {"capturable": True, "fused": True, "foreach": None}
    del saved["param_groups"][0]["decoupled_weight_decay"]  # of an older torch
    saved["state"][0]["step"] = 1  # of a much older one
    _, other = make()
    other.load_state_dict(saved)
    assert not other.param_groups[0]["capturable"]
    assert other.param_groups[0]["decoupled_weight_decay"]
