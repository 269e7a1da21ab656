"""StaticMixture: exact shares, from a mapping or from the file that DoReMi leaves."""

import json

import numpy as np
import pytest

from lightning_megatrain.callbacks import PolicyError, StaticMixture
from lightning_megatrain.datamodules import DynamicLoader
from tests.callbacks.modules import Linear, Points, fit, points, third


def counts(module):
    return np.bincount(np.array(sum(module.seen, [])) % 3, minlength=3).tolist()


@pytest.mark.parametrize("as_file", [False, True])
def test_shares_are_exact(tmp_path, as_file):
    shares = {"a": 2, "b": 1, "c": 1}
    (tmp_path / "shares.json").write_text(json.dumps(shares))
    module = Linear()
    loader = DynamicLoader(Points(48), 4, domain=third, window=48)
    fit(module, loader, [StaticMixture(str(tmp_path / "shares.json") if as_file else shares)])
    assert counts(module) == [24, 12, 12]


def test_b25_a_domain_is_not_drawn_with_replacement():
    """The published sampler gives 66 different ones of 100."""
    module = Linear()
    fit(module, points(48), [StaticMixture({"a": 0, "b": 1, "c": 0}, domain=third)])
    seen = sum(module.seen, [])
    assert sorted(seen[:16]) == sorted(seen[16:32]) == sorted(seen[32:]) == list(range(1, 48, 3))


def test_b20_without_proportions_the_shares_are_equal():
    module = Linear()
    fit(module, points(48), [StaticMixture(domain=third)])
    assert max(counts(module)) - min(counts(module)) <= 3  # in a part of a window


def test_an_unknown_domain_is_refused_by_name():
    with pytest.raises(PolicyError, match=r"Missing: \['c'\]; unknown: \['d'\]"):
        fit(Linear(), points(), [StaticMixture({"a": 1, "b": 1, "d": 1}, domain=third)])


def test_it_decides_once():
    policy = StaticMixture({"a": 1, "b": 1, "c": 1}, domain=third, warmup_steps=2)
    fit(Linear(), points(), [policy], max_epochs=2)
    assert [step for step, _ in policy.history] == [2]
