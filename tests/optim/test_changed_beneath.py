"""What someone changes between two steps: a parameter's dtype, layout or size, its gradient's form, the optimizer's own state."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatrain.optim import HostAdamW, host_adamw

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


def _never(*_: object) -> None:
    raise AssertionError("nothing has changed")


@pytest.mark.parametrize(("masters", "moments"), FORMS)
def test_what_has_not_changed_is_not_checked_again(monkeypatch: pytest.MonkeyPatch, masters: str, moments: str) -> None:
    values = [torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last), torch.randn(6, 5).t(), torch.randn(()), torch.randn(0, 2)]
    params = [nn.Parameter(value.bfloat16() if masters == "split" else value) for value in values]
    optimizer = HostAdamW(params, masters=masters, moments=moments)
    if masters == "fp32":
        for parameter in params:
            optimizer.set_working_copy(parameter, torch.empty_like(parameter, dtype=torch.bfloat16))
    optimizer.update(params, [torch.ones_like(value) for value in values])
    for name in ("check_parameter", "checked_gradient", "first_row"):
        monkeypatch.setattr(host_adamw, name, _never)
    for dtype in (torch.float32, torch.bfloat16):
        optimizer.param_groups[0]["lr"] /= 2
        optimizer.update(params, [torch.empty_like(p, dtype=dtype).fill_(0.5) for p in params])


def tampered(tamper: Callable[[dict[str, Any]], object], masters: str = "fp32", moments: str = "fp32") -> tuple[Tensor, Tensor]:
    """The exact value after a step of which someone changed the state in between, and after one where nobody did."""
    torch.manual_seed(0)
    value, gradients = torch.randn(6, 6), torch.randn(2, 6, 6)
    parameter, optimizer = make(value, masters, moments)
    twin, other = make(value, masters, moments)
    optimizer.update([parameter], [gradients[0]])
    other.update([twin], [gradients[0]])
    tamper(optimizer.state[parameter])
    optimizer.update([parameter], [gradients[1]])
    other.update([twin], [gradients[1]])
    assert optimizer.state[parameter]["step"].item() == other.state[twin]["step"].item()
    return optimizer.master(parameter), other.master(twin)


@pytest.mark.parametrize(("masters", "moments"), FORMS)
def test_state_tensors_that_move_are_found_where_they_are(masters: str, moments: str) -> None:
    kept = []

    def move(held: dict[str, Tensor]) -> None:
        for tensor in held.values():
            old = tensor.detach()
            tensor.data = tensor.data.clone()
            kept.append((old, old.clone()))

    def exchange(held: dict[str, Tensor]) -> None:
        kept.extend((tensor, tensor.clone()) for tensor in held.values())
        held.update({name: tensor.clone() for name, tensor in held.items()})

    for change in (move, exchange):
        assert torch.equal(*tampered(change, masters, moments))
    assert all(torch.equal(old, value) for old, value in kept), "memory of former tensors is written no more"


def test_state_tensors_that_are_laid_anew_are_followed() -> None:
    def turn(held: dict[str, Tensor]) -> None:
        held["exp_avg"].data = held["exp_avg"].data.t().contiguous().t()

    def turn_in_place(held: dict[str, Tensor]) -> None:
        held["exp_avg"].data = held["exp_avg"].data.t()
        held["exp_avg"].copy_(held["exp_avg"].t().clone())

    assert torch.equal(*tampered(turn))
    assert torch.equal(*tampered(turn_in_place))


@pytest.mark.parametrize("step", [torch.tensor(1), torch.tensor([1.0]), torch.tensor(1.0, dtype=torch.float64), 1])
def test_a_step_of_another_kind_is_counted_on(step: object) -> None:
    assert torch.equal(*tampered(lambda held: held.update(step=copy.deepcopy(step))))


def test_a_step_that_someone_writes_counts_from_there() -> None:
    def write(held: dict[str, Tensor]) -> None:
        held["step"].data.fill_(7)

    parameter, optimizer = make(torch.ones(3))
    optimizer.update([parameter], [torch.ones(3)])
    write(optimizer.state[parameter])
    twin, other = make(parameter.detach())
    other.load_state_dict(optimizer.state_dict())
    optimizer.update([parameter], [torch.ones(3)])
    other.update([twin], [torch.ones(3)])
    assert optimizer.state[parameter]["step"].item() == 8
    assert torch.equal(parameter, twin)


@pytest.mark.parametrize(
    ("form", "name", "value"),
    [
        ({"moments": "int8"}, "exp_avg_scales", torch.zeros(1, dtype=torch.float64)),
        ({"moments": "int8"}, "exp_avg_sq_scales", torch.zeros(2)),
        ({"masters": "split"}, "master_low", torch.zeros(6, 6)),
        ({}, "exp_avg", torch.zeros(6, 6, dtype=torch.int32)),
        ({"moments": "bf16"}, "exp_avg", torch.zeros(6, 6, dtype=torch.float16)),
        ({}, "exp_avg", torch.zeros(6, 6, device="meta")),
    ],
)
def test_foreign_state_tensors_are_refused_before_memory_is_touched(form: dict[str, str], name: str, value: Tensor) -> None:
    parameter, optimizer = make(torch.ones(6, 6), **form)
    optimizer.update([parameter], [torch.ones(6, 6)])
    before, steps = parameter.detach().clone(), optimizer.state[parameter]["step"].item()
    optimizer.state[parameter][name] = value
    with pytest.raises(TypeError, match="in no form of HostAdamW's"):
        optimizer.update([parameter], [torch.ones(6, 6)])
    assert torch.equal(parameter, before)
    assert optimizer.state[parameter]["step"].item() == steps


def test_parameters_that_change_after_a_step_are_refused_at_the_next() -> None:
    gradient = torch.ones(6, 6)

    def refused(error: type[Exception], words: str, change: Callable[[nn.Parameter, HostAdamW], object]) -> None:
        parameter, optimizer = make(torch.ones(6, 6))
        neighbour = nn.Parameter(torch.ones(6, 6))
        optimizer.add_param_group({"params": [neighbour]})
        optimizer.update([parameter, neighbour], [gradient, gradient])
        change(parameter, optimizer)
        before = parameter.detach().clone()
        with pytest.raises(error, match=words):
            optimizer.update([neighbour, parameter], [gradient, gradient])
        assert parameter.is_meta or torch.equal(parameter, before)
        assert optimizer.state[neighbour]["step"].item() == 1

    def set_data(value: Callable[[nn.Parameter], Tensor]) -> Callable[[nn.Parameter, HostAdamW], object]:
        return lambda parameter, _: setattr(parameter, "data", value(parameter))

    def to_inference(parameter: nn.Parameter, _: HostAdamW) -> None:
        with torch.inference_mode():
            value = torch.ones(6, 6)
        parameter.data = value

    refused(TypeError, "float64", set_data(lambda p: p.data.double()))
    refused(TypeError, "float16", set_data(lambda p: p.data.half()))
    refused(TypeError, "masters=", set_data(lambda p: p.data.bfloat16()))
    refused(TypeError, "meta", lambda p, _: torch.utils.swap_tensors(p, nn.Parameter(torch.ones(6, 6, device="meta"))))
    refused(TypeError, "gaps", set_data(lambda p: torch.ones(6, 12)[:, :6]))
    refused(ValueError, r"shape \(36,\)", set_data(lambda p: p.data.view(36)))
    refused(ValueError, "share memory", lambda p, o: setattr(p, "data", o.param_groups[1]["params"][0].data))
    refused(TypeError, "inference mode", to_inference)


def test_gradients_that_change_their_kind_after_a_step_are_read_right_or_refused() -> None:
    kinds = [
        lambda g: g.t().contiguous().t(),
        lambda g: torch._neg_view(-g),
        lambda g: g.bfloat16(),
        lambda g: g.double(),
        lambda g: g[:, :1].expand(6, 6),
        lambda g: nn.Parameter(g),
    ]
    for kind in kinds:
        torch.manual_seed(0)
        gradient = torch.randn(6, 6)[:, :1].repeat(1, 6).bfloat16().float()
        parameter, optimizer = make(torch.ones(6, 6))
        twin, other = make(torch.ones(6, 6))
        for given in (gradient, kind(gradient), gradient):
            optimizer.update([parameter], [given.detach()])
            other.update([twin], [gradient])
        assert torch.equal(parameter, twin)
    parameter, optimizer = make(torch.ones(6, 6))
    optimizer.update([parameter], [torch.ones(6, 6)])
    with pytest.raises(ValueError, match="shape"):
        optimizer.update([parameter], [torch.ones(36)])
    with pytest.raises(TypeError, match="sparse"):
        optimizer.update([parameter], [torch.ones(6, 6).to_sparse()])
    with pytest.raises(TypeError, match=r"meta.*\.cpu\(\)"):
        optimizer.update([parameter], [torch.ones(6, 6, device="meta")])
    with pytest.raises(ValueError, match="no gradient"):
        optimizer.update([parameter])


def test_nothing_keeps_gradients_states_or_removed_parameters_alive() -> None:
    parameter, optimizer = make(torch.ones(6, 6))
    parameter.grad = torch.ones(6, 6)
    optimizer.step()
    gradient, moment = weakref.ref(parameter.grad), weakref.ref(optimizer.state[parameter]["exp_avg"])
    parameter.grad = None
    optimizer.state.clear()
    gc.collect()
    assert gradient() is None
    assert moment() is None
    optimizer.update([parameter], [torch.ones(6, 6)])
    assert optimizer.state[parameter]["step"].item() == 1


def test_options_that_change_after_a_step_hold_at_the_next() -> None:
    parameter, optimizer = make(torch.ones(6), "split")
    optimizer.update([parameter], [torch.ones(6)])
    optimizer.masters = "fp32"
    with pytest.raises(TypeError, match="masters="):
        optimizer.update([parameter], [torch.ones(6)])
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = HostAdamW([{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.25}], weight_decay=0.0)
    optimizer.update([first, second], [torch.ones(1), torch.ones(1)])
    optimizer.param_groups.reverse()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    optimizer.update([first, second], [torch.ones(1), torch.ones(1)])
    assert first.item() == pytest.approx(0.0, abs=1e-6)
    assert second.item() == pytest.approx(0.5, abs=1e-6)
