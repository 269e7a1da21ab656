"""Arguments that cannot be are refused where they are given, by name."""

import math

import pytest

from lightning_megatrain.callbacks import LESS, ODM, DoReMi, LossReweighting, LossSelection, RandomSelection, StaticMixture


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: LossReweighting(every_n_steps=1.5), TypeError, "`every_n_steps` must be a whole number, got 1.5"),
        (lambda: LossReweighting(warmup_steps=True), TypeError, "`warmup_steps` must be a whole number"),
        (lambda: LossReweighting(name="a/b"), ValueError, "`name` .* slash, got 'a/b'"),
        (lambda: LossReweighting(name=".."), ValueError, "`name`"),
        (lambda: LossReweighting(delta=math.nan), ValueError, "`delta`"),
        (lambda: LossReweighting(temperature=math.inf), ValueError, "`temperature`"),
        (lambda: ODM(domain=5), TypeError, "`domain` must be the name of a column or a function of a sample, got 5"),
        (lambda: ODM(initial={"a": -1.0, "b": 2.0}), ValueError, "`initial` must be finite, non-negative"),
        (lambda: ODM(initial=[0.5, 0.5]), TypeError, "`initial` must map each domain to its weight, got a list"),
        (lambda: ODM(least_exploration=5.0), ValueError, "`least_exploration` between 0 and 1"),
        (lambda: ODM(reward_scale=math.nan), ValueError, "`reward_scale`"),
        (lambda: StaticMixture([0.5, 0.5]), TypeError, "`proportions` must map"),
        (lambda: StaticMixture({"a": -1.0}), ValueError, "`proportions` must be finite, non-negative"),
        (lambda: StaticMixture({"a": 0.0}), ValueError, "not all zero"),
        (lambda: DoReMi(None), TypeError, "`reference` must be the path"),
        (lambda: DoReMi("hub", step_size=math.nan), ValueError, "`step_size`"),
        (lambda: LESS(None, size=4, warmup_steps=1), TypeError, "`target` is None"),
        (lambda: RandomSelection(size=math.nan), ValueError, "`size`"),
        (lambda: RandomSelection(size=True), ValueError, "`size`"),
        (lambda: RandomSelection(size=4, seed=-1), ValueError, "`seed`"),
        (lambda: RandomSelection(size=4, batch_size=0), ValueError, "`batch_size` must be at least 1, got 0"),
        (lambda: LossSelection(size=4, focus_weight=math.nan), ValueError, "`focus_weight`"),
        (lambda: LossSelection(size=4, quantiles=(0.5,)), ValueError, "`quantiles` must be two numbers"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_at_once(make, error, says):
    with pytest.raises(error, match=says):
        make()
