"""LossSelection: bands of the loss, drawn by weight."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatrain.callbacks import LossSelection, PolicyError
from lightning_megatrain.callbacks.selection.loss import band_weights, draw
from tests.callbacks.modules import Linear, Llama, Points, Sentences, fit, points, sentences

LOSSES = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])


@pytest.mark.parametrize(
    ("focus", "expected"), [("low", [5] * 3 + [1] * 6), ("medium", [1] * 3 + [5] * 3 + [1] * 3), ("high", [1] * 6 + [5] * 3)]
)
def test_the_band_in_focus_weighs_more(focus, expected):
    assert band_weights(LOSSES, focus, 5.0, (1 / 3, 2 / 3)).tolist() == expected


def test_a_loss_that_is_not_finite_is_never_drawn():
    weights = band_weights(np.array([1.0, math.nan, 2.0, math.inf]), "high", 5.0, (0.33, 0.66))
    assert weights.tolist() == [1, 0, 5, 0]
    assert set(draw(weights, 4, 1.0, np.random.default_rng(0))) == {0, 2}
    with pytest.raises(ValueError, match="None of 2 losses is finite"):
        band_weights(np.array([math.nan, math.inf]), "high", 5.0, (0.33, 0.66))


def test_equal_losses_are_drawn_alike():
    assert len(set(band_weights(np.ones(6), "high", 5.0, (0.33, 0.66)))) == 1


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.integers(1, 25), st.floats(0.1, 5))
def test_a_draw_is_without_repeats_and_as_large_as_can_be(weights, size, temperature):
    drawn = draw(np.array(weights), size, temperature, np.random.default_rng(0))
    assert len(set(drawn)) == len(drawn) == min(size, sum(w > 0 for w in weights))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_first_of_a_draw_follows_the_weights(temperature):
    weights = np.array([1.0, 2.0, 5.0])
    firsts = [draw(weights, 2, temperature, np.random.default_rng(s))[0] for s in range(4000)]
    expected = weights ** (1 / temperature) / (weights ** (1 / temperature)).sum()
    # a binomial share of 4000 draws has a standard deviation below 0.008; four of them
    np.testing.assert_allclose(np.bincount(firsts, minlength=3) / 4000, expected, atol=0.032)


def test_the_second_of_a_draw_follows_the_weights_that_are_left():
    weights = np.array([1.0, 2.0, 5.0])
    pairs = [tuple(draw(weights, 2, 1.0, np.random.default_rng(s))) for s in range(4000)]
    after_2 = [b for a, b in pairs if a == 2]
    assert abs(np.mean(np.array(after_2) == 1) - 2 / 3) < 0.04  # about 2500 draws, standard deviation 0.0094


def test_it_scores_with_the_models_losses_and_records_them(tmp_path):
    module, policy = Linear(), LossSelection(size=6, focus="high", focus_weight=1e9, every_n_steps=0)
    before = module.compute_sample_losses((torch.stack([Points()[i][0] for i in range(24)]), torch.tensor([i % 2 for i in range(24)])))
    fit(module, points(), [policy])
    highest = set(before.argsort(descending=True)[:8].tolist())  # above the 66 % quantile
    assert set(sum(module.seen, [])) <= highest


def test_b14_warm_up_of_zero_steps_works():
    fit(Linear(), points(), [LossSelection(size=6, warmup_steps=0)])


def test_b9_nothing_is_taken_from_an_earlier_run(tmp_path):
    """The published caches were keyed by step alone."""
    first, second = Linear(), Linear()
    fit(first, points(24), [LossSelection(size=6, every_n_steps=1)], default_root_dir=tmp_path)
    fit(second, points(12), [LossSelection(size=6, every_n_steps=1)], default_root_dir=tmp_path)
    assert max(sum(second.seen, [])) < 12


def test_it_chooses_once_unless_told_otherwise():
    """Each choice is a pass over the data."""
    policy = LossSelection(size=6, warmup_steps=2)
    fit(Linear(), points(), [policy], max_epochs=2)
    assert [step for step, _ in policy.history] == [2]


def test_more_samples_asked_for_than_are_finite_warns():
    class Overflowing(Linear):
        def compute_sample_losses(self, batch):
            return torch.where(batch[0][:, 0] < 4, 1.0, math.nan)

    module = Overflowing()
    with pytest.warns(UserWarning, match="only 4 of 24 losses are finite, so 4 samples are chosen, not 6"):
        fit(module, points(), [LossSelection(size=6)])
    assert set(sum(module.seen, [])) == {0, 1, 2, 3}


def test_scores_do_not_depend_on_the_batch_size():
    """4B: the published selectors score one sample at a time."""
    histories = []
    for batch_size in (1, 5):
        policy = LossSelection(size=6, every_n_steps=2, batch_size=batch_size)
        fit(Llama(), sentences(), [policy])
        histories.append([m["score/mean"] for _, m in policy.history])
    np.testing.assert_allclose(histories[0], histories[1], rtol=1e-5)  # sums of FP32 in another order


def test_a_module_whose_losses_are_unknown_is_told_what_to_define():
    class Silent(Linear):
        compute_sample_losses = None

    with pytest.raises(PolicyError, match="LossSelection failed at step 0.*compute_sample_losses"):
        fit(Silent(), points(), [LossSelection(size=6)])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"focus": "middle"}, "`focus`"),
        ({"temperature": 0.0}, "`temperature`"),
        ({"quantiles": (0.8, 0.2)}, "`quantiles`"),
        ({"size": 0}, "`size`"),
        ({"size": 1.5}, "`size`"),
        ({"size": None}, "give `size`"),
        ({"warmup_steps": -1}, "`warmup_steps`"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, says):
    with pytest.raises(ValueError, match=says):
        LossSelection(**{"size": 4, **arguments})


def test_the_default_size_is_what_is_trained_on_until_the_next_choice():
    policy = LossSelection(every_n_steps=2, warmup_steps=1)
    fit(Linear(), points(48), [policy], accumulate_grad_batches=2)
    assert [m["samples"] for _, m in policy.history] == [16, 16, 16]  # 2 steps of 2 micro-batches of 4


def test_sentences_have_rows_of_different_lengths():
    assert len(set(Sentences().lengths.tolist())) > 1  # so that scores above compare means, not sums
