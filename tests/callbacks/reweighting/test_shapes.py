"""Weights from losses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatrain.callbacks import LossReweighting
from lightning_megatrain.callbacks.reweighting.loss import shape_of
from lightning_megatrain.callbacks.step_losses import StepLosses

LOSSES = torch.tensor([1.0, 2.0, 3.0, 4.0])


def softmax_of(strategy, losses=LOSSES, delta=1.0, temperature=1.0):
    return torch.softmax(shape_of(losses, losses, strategy, delta) / temperature, 0)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("linupper", [0.1193, 0.2323, 0.3242, 0.3242]),
        ("quadratic", [0.1457, 0.3543, 0.3543, 0.1457]),
        ("extremes", [0.3304, 0.1696, 0.1696, 0.3304]),
        ("uniform", [0.25, 0.25, 0.25, 0.25]),
        ("published uniform", [0.0714, 0.1391, 0.2709, 0.5276]),
    ],
)
def test_weights_of_losses_1_to_4(strategy, expected):
    """B18: the published `uniform` is a softmax of the losses; ours is uniform unless `variant="dataflex"`."""
    h = torch.tensor([-1, -1 / 3, 1 / 3, 1])
    by_hand = {"published uniform": h, "linupper": (h + 1).clamp(max=1)}.get(strategy)
    if by_hand is not None:
        torch.testing.assert_close(softmax_of(strategy), torch.softmax(by_hand, 0))
    if strategy != "published uniform":
        torch.testing.assert_close(softmax_of(strategy), torch.tensor(expected), rtol=0, atol=1e-4)  # four digits were written down


@given(
    st.lists(st.floats(0, 50), min_size=2, max_size=8),
    st.sampled_from(["linupper", "quadratic", "extremes", "uniform", "published uniform"]),
    st.floats(0.1, 3),
    st.floats(0.01, 10),
)
def test_weights_are_on_the_simplex_whatever_the_losses_scale_and_shift(losses, strategy, delta, temperature):
    losses = torch.tensor(losses, dtype=torch.float64)
    w = softmax_of(strategy, losses, delta, temperature)
    assert torch.isfinite(w).all()
    assert abs(w.sum() - 1) < 1e-9
    if losses.max() - losses.min() > 1e-3:
        # h divides by the range, which loses digits when it is small beside the losses: 50 / 1e-3 of 1e-16, over a temperature of 0.01
        torch.testing.assert_close(softmax_of(strategy, 3 * losses + 1, delta, temperature), w, rtol=1e-6, atol=1e-9)
    order = torch.arange(len(losses) - 1, -1, -1)
    torch.testing.assert_close(softmax_of(strategy, losses[order], delta, temperature), w[order])


def test_equal_losses_get_equal_weights():
    for strategy in ("linupper", "quadratic", "extremes", "published uniform"):
        assert softmax_of(strategy, torch.full((3,), 2.5)).tolist() == pytest.approx([1 / 3] * 3)


def test_length_normalisation_weights_tokens_else_samples():
    losses = StepLosses(torch.tensor([[2.0, 2.0, 2.0], [4.0, 0.0, 0.0]]), torch.tensor([[1.0, 1, 1], [1, 0, 0]]))

    class Trainer:
        world_size = 1

    for normalised, expected in ((True, [1.0, math.e]), (False, [1 / 3, math.e])):
        policy = LossReweighting(length_normalised=normalised)
        policy._trainer = Trainer
        w = policy.weigh(losses, None)
        # linupper: h = -1, 1 so f = 0, 1
        torch.testing.assert_close(w / w[0] * expected[0], torch.tensor(expected))
