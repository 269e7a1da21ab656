"""What someone changes between two steps: a parameter's dtype, layout or size, its gradient's form, the optimizer's own state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatrain.optim import HostAdamW

FORMS = [("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "int8"), ("split", "fp32"), ("split", "bf16"), ("split", "int8")]


def make(value: Tensor, masters: str = "fp32", moments: str = "fp32", **options: Any) -> tuple[nn.Parameter, HostAdamW]:
    parameter = nn.Parameter(value.bfloat16() if masters == "split" else value.clone())
    return parameter, HostAdamW([parameter], lr=1e-2, masters=masters, moments=moments, **options)


@pytest.mark.parametrize(("masters", "moments"), FORMS)
def test_the_state_follows_a_parameter_that_gets_another_layout(masters: str, moments: str) -> None:
    torch.manual_seed(0)
    value, gradients = torch.randn(4, 3, 5, 5), torch.randn(3, 4, 3, 5, 5)
    changed, optimizer = make(value, masters, moments)
    same, other = make(value, masters, moments)
    for step, gradient in enumerate(gradients):
        if step == 2:
            changed.data = changed.data.to(memory_format=torch.channels_last)
        optimizer.update([changed], [gradient])
        other.update([same], [gradient])
    # The weight uses the moments before they are rounded anew, and codes of other blocks lie up to an eighth of themselves apart.
    allowed = {"fp32": 0.0, "bf16": 0.0, "int8": 0.3 * 1e-2}[moments]
    torch.testing.assert_close(optimizer.master(changed), other.master(same), rtol=0, atol=allowed)
    assert optimizer.state[changed]["step"].item() == 3
    if masters == "split":
        assert optimizer.state[changed]["master_low"].stride() == changed.stride()


def test_a_parameter_that_was_resized_is_refused_before_memory_is_touched() -> None:
    parameter, optimizer = make(torch.ones(10))
    optimizer.update([parameter], [torch.ones(10)])
    parameter.data = torch.ones(100_000)
    with pytest.raises(ValueError, match=r"shape \(10,\) has become \(100000,\).*delete optimizer.state\[parameter\]"):
        optimizer.update([parameter], [torch.ones(100_000)])
    assert torch.equal(parameter, torch.ones(100_000))
    del optimizer.state[parameter]
    optimizer.update([parameter], [torch.ones(100_000)])
    assert (parameter < 1).all()


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_halves_that_become_whole_weights_go_on_from_their_value(moments: str) -> None:
    torch.manual_seed(0)
    parameter, optimizer = make(torch.randn(300), "split", moments)
    optimizer.update([parameter], [torch.randn(300)])
    parameter.data = parameter.data.float()
    twin, other = make(parameter.detach(), "fp32", moments)
    other.load_state_dict(optimizer.state_dict(masters=False))
    gradient = torch.randn(300)
    optimizer.update([parameter], [gradient])
    other.update([twin], [gradient])
    assert torch.equal(parameter, twin)
    assert "master_low" not in optimizer.state[parameter]


def test_a_working_copy_of_what_a_parameter_was_is_written_no_more() -> None:
    parameter, optimizer = make(torch.ones(300))
    optimizer.masters = "split"
    copy = torch.empty(300, dtype=torch.bfloat16)
    optimizer.set_working_copy(parameter, copy)
    parameter.data = torch.ones(300, dtype=torch.bfloat16)
    optimizer.update([parameter], [torch.ones(300)])
    assert torch.equal(copy, torch.ones(300, dtype=torch.bfloat16))
    assert not optimizer.wrote(parameter, copy)


def test_a_state_of_another_dtype_is_refused() -> None:
    parameter, optimizer = make(torch.ones(3))
    optimizer.update([parameter], [torch.ones(3)])
    optimizer.state[parameter]["exp_avg_sq"] = optimizer.state[parameter]["exp_avg_sq"].double()
    with pytest.raises(TypeError, match=r"float64.*load_state_dict"):
        optimizer.update([parameter], [torch.ones(3)])


def test_amsgrad_that_is_switched_on_begins_with_the_moments_there_are() -> None:
    parameter, optimizer = make(torch.ones(3))
    optimizer.update([parameter], [torch.ones(3)])
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.update([parameter], [torch.zeros(3)])
    held = optimizer.state[parameter]
    assert torch.equal(held["max_exp_avg_sq"], held["exp_avg_sq"])
    small, optimizer = make(torch.ones(3), moments="int8")
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad needs exact second moments"):
        optimizer.update([small], [torch.ones(3)])


def test_gradients_that_were_there_before_go_on_in_fp32() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    (weight * 256).sum().backward()
    HostAdamW([weight], masters="split")
    for _ in range(2):
        weight.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [258.0]  # 256 in BF16


def test_a_gradient_with_its_sign_on_paper_only_is_read_right() -> None:
    """The backward of complex numbers makes such views."""
    parameter, optimizer = make(torch.zeros(2), weight_decay=0.0)
    optimizer.update([parameter], [torch._neg_view(torch.tensor([1.0, -1.0]))])
    torch.testing.assert_close(parameter.detach(), torch.tensor([1e-2, -1e-2]), rtol=1e-6, atol=0)


def test_parameters_that_share_memory_are_refused() -> None:
    whole = torch.zeros(10)
    one, two, three = nn.Parameter(whole), nn.Parameter(whole[8:]), nn.Parameter(whole[:0])
    optimizer = HostAdamW([one, two, three])
    for parameter in (one, two, three):
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"\(10,\) and \(2,\) share memory.*head.weight = embedding.weight"):
        optimizer.step()
    with pytest.raises(ValueError, match="one parameter twice"):
        optimizer.update([two, two], [torch.ones(2), torch.ones(2)])
    assert torch.equal(whole, torch.zeros(10))
    neighbours = [nn.Parameter(whole[:4]), nn.Parameter(whole[4:])]
    HostAdamW(neighbours).update(neighbours, [torch.ones(4), torch.ones(6)])
    assert (whole < 0).all()


def test_parameters_without_memory_of_their_own_are_refused() -> None:
    class Packed(Tensor):
        def __tensor_flatten__(self) -> None:
            raise AssertionError

    for value in (torch.ones(2).as_subclass(Packed), nn.Parameter(torch.ones(2)).detach().as_subclass(Packed).requires_grad_()):
        with pytest.raises(TypeError, match=r"Packed.*torch.optim.AdamW\(fused=True\)"):
            HostAdamW([value])
    parameter, optimizer = make(torch.ones(2))
    with pytest.raises(TypeError, match=r"Packed.*to_local"):
        optimizer.update([parameter], [torch.ones(2).as_subclass(Packed)])
    with torch.inference_mode():
        frozen = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="inference mode"):
        HostAdamW([frozen])


def test_groups_that_come_in_mid_training_and_gradients_that_come_and_go() -> None:
    ends = []
    for make_optimizer in (HostAdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(5)) for _ in range(3)]
        optimizer = make_optimizer(params[:2], lr=torch.tensor(1e-2), betas=(torch.tensor(0.9), torch.tensor(0.99)))
        for step in range(8):
            if step == 3:
                optimizer.add_param_group({"params": [params[2]], "lr": 0.0, "weight_decay": 0.5})
            for number, parameter in enumerate(params):
                parameter.grad = torch.randn(5) if (step + number) % 2 else None
            optimizer.step()
        ends.append(params)
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)  # the last bits of eight steps
    assert torch.equal(ends[0][2], ends[1][2]), "a rate of zero moves nothing"


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_a_single_number_is_a_parameter(moments: str) -> None:
    weight, optimizer = make(torch.tensor(1.0), moments=moments, weight_decay=0.0)
    optimizer.update([weight], [torch.tensor(2.0)])
    assert weight.item() == pytest.approx(0.99, rel=1e-6)


def test_options_of_the_whole_optimizer_in_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match=r"moments='int8' in a parameter group has no effect"):
        HostAdamW([{"params": [nn.Parameter(torch.ones(1))], "moments": "int8"}])


def test_a_gradient_scaler_steps_and_skips() -> None:
    weight, optimizer = make(torch.ones(2), weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((weight * 2).sum()).backward()
    scaler.step(optimizer)
    assert weight.tolist() == pytest.approx([0.99, 0.99], rel=1e-5)
    scaler.update()
    weight.grad = torch.full((2,), float("inf"))
    scaler.step(optimizer)
    assert weight.tolist() == pytest.approx([0.99, 0.99], rel=1e-5)
