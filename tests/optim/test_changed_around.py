"""What happens around HostAdamW between two steps: compilers, torch's defaults, memory given back, copies, states others write into."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatrain.optim import HostAdamW, kernel

FORMS = [("fp32", "fp32"), ("fp32", "int8"), ("split", "fp32"), ("split", "bf16")]


def make(value: Tensor, masters: str = "fp32", moments: str = "fp32") -> tuple[nn.Parameter, HostAdamW]:
    parameter = nn.Parameter(value.bfloat16() if masters == "split" else value.clone())
    return parameter, HostAdamW([parameter], lr=1e-2, masters=masters, moments=moments)


def test_a_compiled_step_is_the_same() -> None:
    """A compiler that traced the addresses of one step took them for constants, of one parameter for all."""
    ends = []
    for wrap in (lambda step: step, lambda step: torch.compile(step, backend="eager")):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(5)) for _ in range(3)]
        optimizer = HostAdamW(params)
        step = wrap(optimizer.step)
        for _ in range(3):
            for parameter in params:
                parameter.grad = torch.randn(5)
            step()
        ends.append(params)
        assert [optimizer.state[p]["step"].item() for p in params] == [3, 3, 3]
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


def test_parameters_that_move_between_groups_take_their_new_group_s_numbers() -> None:
    first, second, third = (nn.Parameter(torch.ones(1)) for _ in range(3))
    optimizer = HostAdamW([{"params": [first, second], "lr": 0.5}, {"params": [third], "lr": 0.25}], weight_decay=0.0)

    def moved() -> list[float]:
        before = [p.item() for p in (first, second, third)]
        for parameter in (first, second, third):
            parameter.grad = torch.ones(1)
        optimizer.step()
        return [round(b - p.item(), 4) for b, p in zip(before, (first, second, third), strict=True)]

    assert moved() == [0.5, 0.5, 0.25]
    groups = optimizer.param_groups
    groups[1]["params"].append(groups[0]["params"].pop(0))
    assert moved() == [0.25, 0.5, 0.25]
    groups[0]["params"][0], groups[1]["params"][0] = third, second
    assert moved() == [0.25, 0.25, 0.5]
    groups.pop(0)
    assert moved() == [0.25, 0.25, 0.0]


@pytest.mark.parametrize(("masters", "moments"), FORMS)
def test_memory_that_was_given_back_is_refused_before_memory_is_touched(masters: str, moments: str) -> None:
    def refused(words: str, lacking: Callable[[nn.Parameter, Tensor, dict[str, Any]], Tensor]) -> None:
        neighbour = nn.Parameter(torch.ones(6))
        parameter, optimizer = make(torch.ones(600), masters, moments)
        optimizer.add_param_group({"params": [neighbour]})
        params, gradients = [neighbour, parameter], [torch.ones(6), torch.ones(600)]
        optimizer.update(params, gradients)
        storage = lacking(parameter, gradients[1], optimizer.state[parameter]).untyped_storage()
        size, before = storage.nbytes(), neighbour.detach().clone()
        storage.resize_(0)
        with pytest.raises(TypeError, match=rf"{words} has no memory.*resize_\(0\)"):
            optimizer.update(params, gradients)
        assert torch.equal(neighbour, before)
        assert optimizer.state[neighbour]["step"].item() == 1
        storage.resize_(size)
        storage.fill_(0)
        optimizer.update(params, gradients)

    refused("a parameter", lambda p, g, held: p)
    refused("a gradient", lambda p, g, held: g)
    _, example = make(torch.ones(600), masters, moments)
    example.allocate()
    for name in example.state[example.param_groups[0]["params"][0]]:
        refused(name, lambda p, g, held, name=name: held[name])  # type: ignore[misc]


def test_a_working_copy_whose_memory_was_given_back_is_refused() -> None:
    parameter, optimizer = make(torch.ones(6))
    copy = torch.empty(6, dtype=torch.bfloat16)
    optimizer.set_working_copy(parameter, copy)
    optimizer.update([parameter], [torch.ones(6)])
    copy.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="working copy has no memory"):
        optimizer.update([parameter], [torch.ones(6)])


def test_tensors_that_only_stand_for_others_are_refused_wherever_they_come() -> None:
    class Stands(Tensor):
        @staticmethod
        def __new__(cls, stood: Tensor) -> "Stands":  # noqa: PYI034 - of this test only
            return Tensor._make_wrapper_subclass(cls, stood.shape, dtype=stood.dtype)

        @classmethod
        def __torch_dispatch__(cls, *_: object) -> None:
            raise AssertionError

    parameter, optimizer = make(torch.ones(6))
    optimizer.update([parameter], [torch.ones(6)])
    for gradient in (Stands(torch.ones(6)), torch._to_functional_tensor(torch.ones(6))):
        with pytest.raises(TypeError, match="gradient has no memory"):
            optimizer.update([parameter], [gradient])
    for name in ("step", "exp_avg", "exp_avg_sq"):
        parameter, optimizer = make(torch.ones(6))
        optimizer.update([parameter], [torch.ones(6)])
        optimizer.state[parameter][name] = Stands(optimizer.state[parameter][name])
        with pytest.raises(TypeError, match=f"{name} has no memory"):
            optimizer.update([parameter], [torch.ones(6)])
    fake = nn.Parameter(torch._to_functional_tensor(torch.ones(6)))
    with pytest.raises(TypeError, match="parameter has no memory"):
        HostAdamW([fake]).update([fake], [torch.ones(6)])


def test_a_weight_that_becomes_one_made_of_others_is_refused() -> None:
    class Packed(Tensor):
        def __tensor_flatten__(self) -> None:
            raise AssertionError

    parameter, optimizer = make(torch.ones(6))
    optimizer.update([parameter], [torch.ones(6)])
    torch.utils.swap_tensors(parameter, torch.ones(6).as_subclass(Packed).requires_grad_())
    with pytest.raises(TypeError, match=r"a Packed .* has none that it may write"):
        optimizer.update([parameter], [torch.ones(6)])


def test_weights_that_are_negated_in_a_view_or_sparse_are_refused_and_lazy_zeros_are_gradients() -> None:
    for value in (torch._neg_view(torch.ones(2)), torch.ones(2).to_sparse()):
        with pytest.raises(TypeError, match="none that it may write"):
            HostAdamW([nn.Parameter(value)])
    parameter, optimizer = make(torch.ones(2))
    optimizer.update([parameter], [torch.ones(2)])
    before = parameter.detach().clone()
    parameter.data = torch._neg_view(torch.ones(2))
    with pytest.raises(TypeError, match="negated in a view"):
        optimizer.update([parameter], [torch.ones(2)])
    parameter.data = before
    twin, other = make(torch.ones(2))
    other.update([twin], [torch.ones(2)])
    optimizer.update([parameter], [torch._efficientzerotensor((2,))])  # forward-mode derivatives make them
    other.update([twin], [torch.zeros(2)])
    assert torch.equal(parameter, twin)


def test_what_others_keep_beside_the_state_stays_and_what_they_took_is_told() -> None:
    parameter, optimizer = make(torch.randn(6, 6))
    optimizer.update([parameter], [torch.ones(6, 6)])
    mine = torch.ones(2)
    optimizer.state[parameter] |= {"updates": 3, "mine": mine}
    parameter.data = parameter.data.t().contiguous().t()
    optimizer.update([parameter], [torch.ones(6, 6)])
    assert optimizer.state[parameter]["updates"] == 3
    assert optimizer.state[parameter]["mine"] is mine
    for name in ("step", "exp_avg", "exp_avg_sq"):
        taken = optimizer.state[parameter].pop(name)
        with pytest.raises(TypeError, match=rf"lacks \['{name}'\].*delete optimizer.state\[parameter\]"):
            optimizer.update([parameter], [torch.ones(6, 6)])
        optimizer.state[parameter][name] = taken
    optimizer.update([parameter], [torch.ones(6, 6)])
    assert optimizer.state[parameter]["step"].item() == 3


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_torch_s_defaults_do_not_matter(monkeypatch: pytest.MonkeyPatch, moments: str) -> None:
    torch.manual_seed(0)
    value, gradients = torch.randn(300), torch.randn(3, 300)
    twin, other = make(value, moments=moments)
    for gradient in gradients:
        other.update([twin], [gradient])
    for library in (kernel.load(), None):
        monkeypatch.setattr(kernel, "load", lambda library=library: library)
        parameter, optimizer = make(value, moments=moments)
        with torch.device("meta"):
            torch.set_default_dtype(torch.float64)
            try:
                for gradient in gradients:
                    optimizer.update([parameter], [gradient])
                optimizer.load_state_dict(optimizer.state_dict())
            finally:
                torch.set_default_dtype(torch.float32)
        assert torch.equal(parameter, twin)
        assert {name: (v.dtype, v.device) for name, v in optimizer.state[parameter].items()} == {
            name: (v.dtype, v.device) for name, v in other.state[twin].items()
        }


def test_state_that_is_made_in_inference_mode_is_written_outside() -> None:
    parameter, optimizer = make(torch.randn(6), "split")
    with torch.inference_mode():
        optimizer.update([parameter], [torch.ones(6)])
    with torch.no_grad():
        parameter.mul_(0.5)
    assert not optimizer.low_half(parameter).any()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.update([parameter], [torch.ones(6)])
    assert optimizer.state[parameter]["step"].item() == 2


@pytest.mark.parametrize("replicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_of_weights_and_optimizer_goes_on_as_they_do(replicate: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    parameter, optimizer = make(torch.randn(300), "split", "bf16")
    optimizer.update([parameter], [torch.randn(300)])
    with torch.no_grad():
        parameter.mul_(0.37)  # its low half means nothing from here on
    twin, other = replicate((parameter, optimizer))
    gradient = torch.randn(300)
    optimizer.update([parameter], [gradient])
    other.update([twin], [gradient])
    assert torch.equal(optimizer.master(parameter), other.master(twin))
    for weight in (parameter, twin):
        (weight * 256).sum().backward()
        weight.float().sum().backward()
        assert weight.grad is not None
        assert weight.grad[0].item() == 257.0  # 256 in BF16


def test_a_step_that_fails_counts_for_no_parameter() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = HostAdamW([{"params": [p]} for p in params])
    gradients = [torch.ones(2), torch.ones(2)]
    optimizer.update(params, gradients)
    optimizer.param_groups[1]["lr"] = "fast"
    with pytest.raises(ValueError, match="fast"):
        optimizer.update(params, gradients)
    assert [optimizer.state[p]["step"].item() for p in params] == [1, 1]
