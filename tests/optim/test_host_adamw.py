"""HostAdamW is torch's AdamW and Adam, over host memory."""

import copy
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_megatrain.optim import HostAdamW, checks
from tests.optim.reference import adamw_step

hyperparameters = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-6, 1.0),
        "betas": st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 0.9999)),
        "eps": st.floats(1e-10, 1e-3),
        "weight_decay": st.sampled_from([0.0, 1e-2, 0.5]),
        "maximize": st.booleans(),
        "amsgrad": st.booleans(),
        "decoupled_weight_decay": st.booleans(),
    }
)


def torch_optimizer(params: list[nn.Parameter], decoupled_weight_decay: bool, **options: object) -> torch.optim.Optimizer:
    return (torch.optim.AdamW if decoupled_weight_decay else torch.optim.Adam)(params, **options)


@settings(max_examples=60)
@given(options=hyperparameters, n=st.integers(1, 600), grad_scale=st.sampled_from([1.0, 0.3]), seed=st.integers(0, 1 << 30))
def test_each_step_is_the_papers_within_single_precision(options: dict, n: int, grad_scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    weight = nn.Parameter(torch.randn(n))
    optimizer = HostAdamW([weight], **options | {"amsgrad": False})
    optimizer.allocate()
    for _ in range(4):
        weight.grad = torch.randn(n) * 10 ** torch.randint(-3, 2, (n,)).float()
        state = copy.deepcopy(optimizer.state[weight])
        expected = adamw_step(weight, weight.grad, state, optimizer.param_groups[0], grad_scale)
        optimizer.step(grad_scale=grad_scale)
        assert bool(((weight.double() - expected.weight).abs() <= expected.allowed).all())


@pytest.mark.parametrize("form", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@settings(max_examples=40)
@given(options=hyperparameters, n=st.integers(1, 600), seed=st.integers(0, 1 << 30))
def test_each_step_is_torchs_within_the_last_bits(form: dict, options: dict, n: int, seed: int) -> None:
    """Both may round each operation differently, so either may lie `allowed` from the true value."""
    torch.manual_seed(seed)
    ours, theirs = nn.Parameter(torch.randn(n)), nn.Parameter(torch.empty(n))
    optimizer, other = HostAdamW([ours], **options), torch_optimizer([theirs], **options, **form)
    for step in range(4):
        # From the same state each time, so that no difference adds up.
        theirs.data.copy_(ours)
        if step:
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch keeps the tensors it is given
            other.param_groups[0].update(foreach=form.get("foreach"), fused=form.get("fused"))
        ours.grad = torch.randn(n) * 10 ** torch.randint(-3, 2, (n,)).float()
        theirs.grad = ours.grad.clone()
        optimizer.allocate()
        before = copy.deepcopy(optimizer.state[ours])
        allowed = adamw_step(ours, ours.grad, before, optimizer.param_groups[0]).allowed
        terms = ours.grad.abs() + 0.5 * ours.detach().abs()  # the gradient, with the largest L2 term
        optimizer.step()
        other.step()
        assert bool(((ours - theirs).abs().double() <= 2 * allowed).all())
        # An average is a sum of its terms, the old average and the gradient, each rounded at most four times.
        for name, scale in (("exp_avg", before["exp_avg"].abs() + terms), ("exp_avg_sq", before["exp_avg_sq"] + terms.square())):
            difference = optimizer.state[ours][name] - other.state[theirs][name]
            assert bool((difference.abs() <= 2.0**-22 * scale).all())


# The convolution has no bias: before a batch norm its gradient would be noise around zero, which Adam blows up to full steps.
def small_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, closure: bool = False) -> None:
    generator = torch.Generator().manual_seed(7)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        x, y = torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator)

        def compute(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        if closure:
            assert optimizer.step(compute) > 0
        else:
            compute()
            optimizer.step()
        schedule.step()


@pytest.mark.parametrize("closure", [False, True])
def test_a_training_run_with_groups_and_a_schedule_ends_where_torchs_ends(closure: bool) -> None:
    ends = []
    for make in (HostAdamW, torch.optim.AdamW):
        model = small_model()
        groups = [{"params": model[0].parameters(), "weight_decay": 0.0, "lr": 1e-4}, {"params": model[1].parameters()}]
        optimizer = make([*groups, {"params": model[4].parameters(), "betas": (0.8, 0.95), "maximize": False}])
        train(model, optimizer, 12, closure=closure)
        ends.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*ends, strict=True):
        # Twelve steps feed the last bits back through the gradients; a weight moves about 0.05.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_parameters_without_gradient_are_left_alone_and_empty_ones_do_no_harm() -> None:
    idle, empty, used = nn.Parameter(torch.ones(3)), nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.ones(2))
    optimizer = HostAdamW([idle, empty, used])
    empty.grad, used.grad = torch.empty(0, 4), torch.ones(2)
    optimizer.step()
    assert torch.equal(idle, torch.ones(3))
    assert idle not in optimizer.state
    assert (used < 1).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_gradients_that_are_not_finite_do_what_they_do_in_torch(value: float) -> None:
    grad = torch.tensor([1.0, value, 2.0])
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, other = HostAdamW([ours]), torch.optim.AdamW([theirs])
    for _ in range(2):
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step()
        other.step()
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-6, atol=0)  # a few last bits
        grad = torch.ones(3)


def test_any_dense_layout_is_updated_in_place() -> None:
    layouts = [
        (torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last), torch.randn(4, 3, 5, 5)),
        (torch.randn(6, 5).t(), torch.randn(5, 6)),
        (torch.randn(6, 5), torch.randn(5, 6).t()),
        (torch.randn(4, 6), torch.randn(6).expand(4, 6)),
        (torch.randn(8, 5)[2:4], torch.randn(2, 5)),
    ]
    for weight, grad in layouts:
        ours, theirs = nn.Parameter(weight.clone(memory_format=torch.preserve_format)), nn.Parameter(weight.clone().contiguous())
        ours.data = weight.clone(memory_format=torch.preserve_format)
        ours.grad, theirs.grad = grad, grad.contiguous().clone()
        HostAdamW([ours]).step()
        HostAdamW([theirs]).step()
        assert torch.equal(ours, theirs)


def test_what_cannot_be_updated_is_refused_by_name() -> None:
    def refused(error: type[Exception], words: str, make) -> None:  # noqa: ANN001
        with pytest.raises(error, match=words):
            make()

    gaps = nn.Parameter(torch.zeros(1))
    gaps.data = torch.zeros(4, 6)[:, :3]
    refused(TypeError, r"gaps.*contiguous\(\)", lambda: HostAdamW([gaps]))
    refused(TypeError, 'masters="split".*12 bytes', lambda: HostAdamW([nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))]))
    refused(TypeError, r"float16.*\.float\(\)", lambda: HostAdamW([nn.Parameter(torch.zeros(1, dtype=torch.float16))]))
    refused(TypeError, r"meta.*\.cpu\(\)", lambda: HostAdamW([nn.Parameter(torch.zeros(1, device="meta"))]))
    one = nn.Parameter(torch.zeros(1))
    refused(ValueError, "amsgrad needs.*int8", lambda: HostAdamW([one], amsgrad=True, moments="int8"))
    refused(ValueError, "torch.optim.AdamW for capturable", lambda: HostAdamW([one], capturable=True))
    refused(ValueError, "lr must not be negative, is -1", lambda: HostAdamW([one], lr=-1.0))
    refused(ValueError, "betas", lambda: HostAdamW([one], betas=(1.0, 0.9)))
    refused(ValueError, "eps", lambda: HostAdamW([one], eps=-1.0))
    refused(ValueError, "masters is", lambda: HostAdamW([one], masters="bf16"))
    refused(ValueError, "moments is", lambda: HostAdamW([one], moments="fp8"))
    refused(ValueError, "threads", lambda: HostAdamW([one], threads=0))
    optimizer = HostAdamW([one])
    refused(ValueError, "none of this optimizer's groups", lambda: optimizer.update([gaps.data.contiguous()], [torch.zeros(4, 3)]))
    refused(ValueError, "shape", lambda: optimizer.update([one], [torch.zeros(2)]))
    refused(ValueError, "no gradient", lambda: optimizer.update([one]))
    assert one not in optimizer.state, "a refused update leaves no trace"


def test_sparse_gradients_are_refused_before_anything_is_updated() -> None:
    table, dense = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.ones(2))
    optimizer = HostAdamW([dense, *table.parameters()])
    (table(torch.tensor([1])).sum() + dense.sum()).backward()
    with pytest.raises(TypeError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(2))


def test_autograd_notices_that_a_weight_changed() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = HostAdamW([weight])
    loss = (weight * weight).sum()
    weight.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_step_hooks_run() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, seen = HostAdamW([weight]), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    assert seen == ["before", "after"]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copy_goes_on_by_itself(clone) -> None:  # noqa: ANN001
    weight = nn.Parameter(torch.randn(300).bfloat16())
    optimizer = HostAdamW([weight], masters="split", moments="int8", threads=2)
    optimizer.update([weight], [torch.randn(300)])
    other = clone(optimizer)
    (twin,) = other.param_groups[0]["params"]
    grad = torch.randn(300)
    optimizer.update([weight], [grad])
    other.update([twin], [grad])
    assert twin is not weight
    assert torch.equal(optimizer.master(weight), other.master(twin))


def test_layer_by_layer_updates_are_a_step() -> None:
    ends = []
    for by_layer in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(40)) for _ in range(3)]
        optimizer = HostAdamW([{"params": params[:1], "lr": 0.1}, {"params": params[1:]}])
        for _ in range(3):
            grads = [torch.randn(40) for _ in params]
            due = [dict(group) for group in optimizer.param_groups]
            if by_layer:
                optimizer.param_groups[0]["lr"] = 99.0  # what a schedule does after the step was due
                for parameter, grad in zip(reversed(params), reversed(grads), strict=True):
                    optimizer.update([parameter], [grad], grad_scale=0.5, groups=due)
                optimizer.param_groups[0]["lr"] = 0.1
            else:
                for parameter, grad in zip(params, grads, strict=True):
                    parameter.grad = grad
                optimizer.step(grad_scale=0.5)
        ends.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_working_copy_is_the_weight_cast_to_bf16_after_every_step() -> None:
    model = small_model()
    optimizer = HostAdamW(model.parameters())
    copies = {p: torch.empty_like(p, dtype=torch.bfloat16) for p in model.parameters()}
    for parameter, copied in copies.items():
        optimizer.set_working_copy(parameter, copied)
        assert torch.equal(copied, parameter.bfloat16())
    train(model, optimizer, 3)
    assert all(torch.equal(copied, p.bfloat16()) for p, copied in copies.items())
    with pytest.raises(ValueError, match=re.escape("torch.empty_like(parameter, dtype=torch.bfloat16)")):
        optimizer.set_working_copy(model[1].weight, torch.empty(9, dtype=torch.bfloat16))


def test_the_gradient_is_read_and_never_written() -> None:
    weight = nn.Parameter(torch.ones(5))
    weight.grad = torch.arange(5.0)
    HostAdamW([weight], maximize=True, weight_decay=0.1, decoupled_weight_decay=False).step(grad_scale=0.5)
    assert torch.equal(weight.grad, torch.arange(5.0))


@pytest.mark.filterwarnings("error:masters=")
def test_bf16_weights_without_masters_warn_once() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    checks._warn_rounded.cache_clear()
    optimizer = HostAdamW([nn.Parameter(torch.ones(3))], masters="none")
    with pytest.warns(UserWarning, match='masters="split" keeps them all') as caught:
        optimizer.add_param_group({"params": [weight]})
    optimizer.update([weight], [torch.ones(3)])
    HostAdamW([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], masters="none")
    assert len(caught) == 1
