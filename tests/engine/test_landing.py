"""What becomes of gradients on the host."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

from lightning_megatrain.engine.landing import Landing


def parameters(*dtypes: torch.dtype) -> list[Parameter]:
    return [Parameter(torch.zeros(4, 3, dtype=dtype)) for dtype in dtypes]


def random(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_gradient_of_any_dtype_stays_as_it_came_and_a_second_makes_it_fp32() -> None:
    (weight,) = parameters(torch.bfloat16)
    weight.grad_dtype = None
    landing = Landing()
    first, second = random(0, torch.bfloat16), random(1, torch.bfloat16)
    landing.land([(weight, first)], owned=False)
    assert weight.grad is not None
    assert weight.grad.dtype is torch.bfloat16
    assert torch.equal(weight.grad, first)
    landing.land([(weight, second)], owned=False)
    assert weight.grad.dtype is torch.float32
    assert torch.equal(weight.grad, first.float() + second.float())


def test_gradients_of_one_backward_are_summed_with_each_other_first() -> None:
    (weight,) = parameters(torch.float32)
    landing = Landing()
    weight.grad = torch.full((4, 3), 1e8)
    landing.sum_over_backward([weight])
    for _ in range(2):
        landing.land([(weight, torch.full((4, 3), 3.0))], owned=True)
    assert torch.equal(weight.grad, torch.full((4, 3), 1e8))
    landing.complete()
    assert torch.equal(weight.grad, torch.full((4, 3), 1e8) + 6)  # 3 alone would be lost, twice


@pytest.mark.parametrize("summed_first", [False, True])
@pytest.mark.parametrize("order", ["sparse first", "dense first"])
def test_sparse_and_dense_gradients_of_one_parameter_add_up(order: str, summed_first: bool) -> None:
    """As an embedding's and a penalty's on its weight do."""
    (weight,) = parameters(torch.float32)
    landing = Landing()
    dense, rows = random(0), random(1)[:2]
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), rows, (4, 3), check_invariants=True)
    if summed_first:
        landing.sum_over_backward([weight])
    for gradient in (sparse, dense) if order == "sparse first" else (dense, sparse):
        landing.land([(weight, gradient)], owned=False)
    landing.complete()
    expected = dense.clone()
    expected[[0, 2]] += rows
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_scale_and_norm_are_those_of_passes_afterwards(scale: float) -> None:
    weights, landing = parameters(torch.float32, torch.float32, torch.float32), Landing()
    early, late, both = weights
    landing.land([(early, random(0)), (both, random(1))], owned=True)
    landing.complete()
    landing.expect_last(weights, scale)
    landing.land([(late, random(2)), (both, random(3))], owned=True)
    landing.complete()
    expected = [random(0), random(2), random(1) + random(3)]
    for weight, gradient in zip((early, late, both), expected, strict=True):
        assert weight.grad is not None
        assert torch.equal(weight.grad, gradient.mul(scale))
    norm = landing.total_norm(weights)
    assert norm is not None
    assert torch.equal(norm, get_total_norm([w.grad for w in weights if w.grad is not None]))


def test_a_norm_is_unknown_once_a_gradient_was_written_or_came_otherwise() -> None:
    weights, landing = parameters(torch.float32, torch.float32), Landing()
    landing.expect_last(weights)
    landing.land([(weights[0], random(0))], owned=True)
    landing.complete()
    assert landing.total_norm(weights) is not None
    weights[1].grad = random(1)
    assert landing.total_norm(weights) is None
    assert landing.total_norm(weights[:1]) is not None
    assert weights[0].grad is not None
    weights[0].grad.mul_(2)
    assert landing.total_norm(weights[:1]) is None


def test_the_backwards_of_the_next_step_are_not_the_last() -> None:
    (weight,), landing = parameters(torch.float32), Landing()
    landing.expect_last([weight], scale=0.5)
    landing.land([(weight, random(0))], owned=True)
    landing.complete()
    weight.grad = None
    landing.land([(weight, random(1))], owned=True)
    landing.complete()
    assert weight.grad is not None
    assert torch.equal(weight.grad, random(1))


def test_what_is_used_at_once_is_not_stored() -> None:
    kept, used = parameters(torch.float32, torch.float32)
    landing, taken = Landing(), []

    def use(gradients: object) -> object:
        taken.extend(pair for pair in gradients if pair[0] is used)  # type: ignore[attr-defined]
        return [pair for pair in gradients if pair[0] is not used]  # type: ignore[attr-defined]

    landing.use_at_once = use  # type: ignore[assignment]
    landing.land([(kept, random(0)), (used, random(1))], owned=False)
    assert used.grad is None
    assert kept.grad is not None
    assert torch.equal(kept.grad, random(0))
    assert len(taken) == 1
    assert torch.equal(taken[0][1], random(1))
