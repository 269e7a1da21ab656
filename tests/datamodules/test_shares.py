"""Shares of domains: whole samples that add up, in any order of the domains, exact over a window."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatrain.datamodules.shares import Mixture, largest_remainder, normalise

weights = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=8).filter(lambda w: sum(w) > 1e-3)


def mixture(shares, window=100, names=None, seed=(0,)):
    shares = np.array(shares) / np.sum(shares)
    return Mixture(names or [f"d{i}" for i in range(len(shares))], shares, window, seed)


@given(weights, st.integers(0, 500))
def test_largest_remainder_hands_out_all_and_stays_within_one_of_each_share(w, total):
    wanted = np.array(w) / sum(w) * total
    counts = largest_remainder(wanted, total)
    assert counts.sum() == total
    assert (counts >= 0).all()
    assert np.abs(counts - wanted).max() < 1 + 1e-6


def test_largest_remainder_is_not_floor_with_the_rest_to_the_last_domain():
    assert largest_remainder(np.array([0.55, 0.25, 0.2]) * 9, 9).tolist() == [5, 2, 2]  # 4.95 2.25 1.8; floor gives 4 2 3


@given(weights, st.randoms(use_true_random=False))
def test_the_order_of_the_domains_does_not_change_the_counts(w, random):
    order = list(range(len(w)))
    random.shuffle(order)
    wanted = np.array(w) / sum(w) * 10
    counts = largest_remainder(wanted, 10, range(len(w)))
    assert largest_remainder(wanted[order], 10, order).tolist() == counts[order].tolist()


def test_a_window_has_exactly_its_shares():
    m = mixture([0.541, 0.287, 0.042, 0.037, 0.034, 0.031, 0.028], window=1000)
    for _ in range(3):
        assert np.bincount(m.take(1000)).tolist() == [541, 287, 42, 37, 34, 31, 28]


@given(weights, st.integers(1, 300))
def test_every_part_of_a_window_is_close_to_the_shares(w, n):
    m = mixture(w, window=300)
    counts = np.bincount(m.take(n), minlength=len(w))
    # each domain is within one of its share of the place reached, which is itself a sum of K such errors
    assert np.abs(counts - m.shares * n).max() <= 2 + len(w)


def test_a_share_smaller_than_one_sample_a_window_gets_its_sample_in_time():
    m = mixture([0.999, 0.001], window=100)
    counts = np.bincount(m.take(10_000), minlength=2)
    assert abs(counts[1] - 10) <= 1


def test_a_mixture_does_not_depend_on_the_order_of_the_domains():
    a = mixture([0.5, 0.3, 0.2], names=["x", "y", "z"])
    b = mixture([0.2, 0.5, 0.3], names=["z", "x", "y"])
    assert [["x", "y", "z"][i] for i in a.take(250)] == [["z", "x", "y"][i] for i in b.take(250)]


@given(st.lists(st.integers(1, 70), min_size=1, max_size=6))
def test_a_mixture_goes_back_to_any_place(steps):
    m = mixture([3, 2, 1.5], window=50)
    for n in steps:
        m.take(n)
    place = m.position()
    ahead = m.take(160).tolist()
    m.seek(place)
    assert m.take(160).tolist() == ahead
    other = mixture([3, 2, 1.5], window=50)
    other.seek(place)
    assert other.take(160).tolist() == ahead


@pytest.mark.parametrize(
    ("proportions", "says"),
    [({"a": 1}, "Missing: \\['b'\\]"), ({"a": 1, "b": 1, "c": 1}, "unknown: \\['c'\\]"), ({"a": 0, "b": 0}, "not all zero"),
     ({"a": -1, "b": 2}, "non-negative"), ({"a": float("nan"), "b": 2}, "finite")],
)  # fmt: skip
def test_wrong_proportions_are_refused(proportions, says):
    with pytest.raises(ValueError, match=says):
        normalise(proportions, ["a", "b"])
