"""ODM: Exp3 over domains."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatrain.callbacks import ODM, PolicyError
from lightning_megatrain.callbacks.mixture.odm import exploration, shares, update_rewards
from tests.callbacks.modules import Linear, Points, fit, points, third

rewards = st.lists(st.floats(-50, 50), min_size=2, max_size=7)


def test_exploration_follows_the_paper():
    assert exploration(0, 4) == 1 / 4
    assert exploration(1, 4) == 1 / 4  # sqrt(ln 4 / 4) = 0.59 is more
    assert exploration(100, 4) == pytest.approx(math.sqrt(math.log(4) / 400))
    assert exploration(10**6, 4, least=0.03) == 0.03


def test_shares_by_hand():
    """t = 50, K = 2: eps_49 = sqrt(ln 2 / 98), eps_50 = sqrt(ln 2 / 100)."""
    r = np.array([1.0, 3.0])
    e49, e50 = math.sqrt(math.log(2) / 98), math.sqrt(math.log(2) / 100)
    z = np.exp(e49 * r)
    np.testing.assert_allclose(shares(r, 50), (1 - 2 * e50) * z / z.sum() + e50)


def test_rewards_by_hand():
    """Two samples of domain 0 with losses 1 and 3, one of domain 1 with loss 6, none of domain 2."""
    seen = np.array([[4.0, 2], [6.0, 1], [0.0, 0]])
    got = update_rewards(np.array([1.0, 2.0, 7.0]), seen, np.array([0.5, 0.25, 0.25]), alpha=0.9, scale=1.0)
    np.testing.assert_allclose(got, [0.9 + 0.1 * (4 / 3) / 0.5, 1.8 + 0.1 * (6 / 3) / 0.25, 7.0])


def test_the_reward_of_a_mixed_batch_has_the_mean_loss_as_its_expectation():
    """A domain drawn with its share has the reward share x loss / share: its loss, whatever the share."""
    share, loss = np.array([0.7, 0.2, 0.1]), np.array([1.0, 2.0, 3.0])
    seen = np.stack([share * 1000 * loss, share * 1000], axis=1)
    np.testing.assert_allclose(update_rewards(np.zeros(3), seen, share, alpha=0.0, scale=1.0), loss)


@given(rewards, st.integers(1, 10_000), st.floats(0, 0.1))
def test_shares_are_on_the_simplex_and_no_domain_is_given_up(r, t, least):
    p = shares(np.array(r), t, least)
    assert p.sum() == pytest.approx(1)
    assert (p >= exploration(t, len(r), least) - 1e-12).all()


@given(rewards, st.integers(1, 1000), st.randoms(use_true_random=False), st.floats(-10, 10))
def test_shares_do_not_depend_on_the_order_of_domains_or_a_common_shift(r, t, random, shift):
    order = list(range(len(r)))
    random.shuffle(order)
    r = np.array(r)
    np.testing.assert_allclose(shares(r[order], t), shares(r, t)[order], rtol=1e-9)
    np.testing.assert_allclose(shares(r + shift, t), shares(r, t), rtol=1e-9)


def test_equal_rewards_give_equal_shares_and_a_higher_reward_more():
    assert shares(np.ones(5), 100).tolist() == pytest.approx([0.2] * 5)
    p = shares(np.array([1.0, 2.0, 3.0]), 1000)
    assert p[0] < p[1] < p[2]


class Known(Linear):
    """The loss of a sample is 1, 2 or 3 by its domain, whatever the weights."""

    def training_step(self, batch, batch_idx):
        losses = 1.0 + batch[0][:, 0].round() % 3 + 0 * self.layer(batch[0]).sum(1)
        self.seen.append([round(v) for v in batch[0][:, 0].tolist()])
        return {"loss": losses.mean(), "sample_losses": losses}


def replay(policy, seen, per_update, start):
    """The paper's updates from the samples that were seen, one by one."""
    r, p, out = np.zeros(3), start, []
    for t in range(1, 1 + len(seen) // per_update):
        stats = np.zeros((3, 2))
        for i in sum(seen[(t - 1) * per_update : t * per_update], []):
            stats[i % 3] += [1 + i % 3, 1]
        r = update_rewards(r, stats, p, policy.alpha, policy.reward_scale)
        p = shares(r, t, policy.least_exploration)
        out.append(p)
    return out


@pytest.mark.parametrize("accumulate", [1, 2])
def test_b7_each_sample_is_credited_to_its_own_domain_over_all_micro_batches(accumulate):
    """The published code credits a mixed batch to its first sample's domain, and only the last micro-batch counts."""
    policy = ODM(domain=third, warmup_steps=2, every_n_steps=2, alpha=0.5, reward_scale=4.0)
    module = Known()
    fit(module, points(48), [policy], max_epochs=2, accumulate_grad_batches=accumulate)
    got = [[m[f"share/{n}"] for n in "abc"] for _, m in policy.history]
    expected = replay(policy, module.seen, 2 * accumulate, np.full(3, 1 / 3))[: len(got)]
    assert len(got) >= 3
    np.testing.assert_allclose(got, expected, rtol=1e-5)  # losses are FP32


def test_b6_arguments_arrive():
    """The published registry drops reward_scale and min_exploration_rate."""
    odm = ODM(reward_scale=3.0, least_exploration=0.2)
    assert (odm.reward_scale, odm.least_exploration) == (3.0, 0.2)
    with pytest.raises(TypeError, match="reward_sclae"):
        ODM(reward_sclae=3.0)


def test_initial_shares_hold_through_the_warm_up():
    module = Known()
    fit(module, points(48), [ODM(domain=third, warmup_steps=6, initial={"a": 0.5, "b": 0.5, "c": 0.0})])
    assert np.bincount(np.array(sum(module.seen[:6], [])) % 3, minlength=3).tolist() == [12, 12, 0]


@pytest.mark.parametrize("schedule", [{}, {"every_n_steps": 0}, {"max_updates": 1}])
def test_without_a_warm_up_initial_shares_hold_until_a_loss_was_seen(schedule):
    module, policy = Known(), ODM(domain=third, alpha=0.5, reward_scale=40.0, initial={"a": 1.0, "b": 1.0, "c": 0.0}, **schedule)
    fit(module, points(48), [policy])
    assert {i % 3 for i in module.seen[0]} == {0, 1}
    assert [step for step, _ in policy.history] == (list(range(1, 12)) if not schedule else [1])
    expected = replay(policy, module.seen, 1, np.array([0.5, 0.5, 0.0]))
    for (_, metrics), shares_K in zip(policy.history, expected, strict=False):
        np.testing.assert_allclose([metrics[f"share/{n}"] for n in "abc"], shares_K, rtol=1e-5)


def test_the_highest_loss_gets_the_largest_share():
    policy = ODM(domain=third, reward_scale=50.0, every_n_steps=2)
    fit(Known(), points(96), [policy], max_epochs=3)
    last = policy.history[-1][1]
    assert last["share/a"] < last["share/b"] < last["share/c"]


def test_the_shares_are_what_is_then_sampled():
    module = Known()
    policy = ODM(domain=third, warmup_steps=4, every_n_steps=0, reward_scale=500.0, alpha=0.0)
    fit(module, points(400, batch_size=8), [policy])
    share = [policy.history[0][1][f"share/{n}"] for n in "abc"]
    later = np.array(sum(module.seen[4:], []))
    # even inside a window, a domain is within a sample or two of its share
    np.testing.assert_allclose(np.bincount(later % 3, minlength=3), np.array(share) * len(later), atol=4)


def test_dataflex_variant_changes_the_defaults():
    odm = ODM(variant="dataflex")
    assert (odm.reward_scale, odm.least_exploration) == (15.0, 0.03)
    p = shares(np.array([0.0, 1000.0]), 10_000, 0.03, 5.0)  # exponents at most 5 apart
    assert p[0] == pytest.approx((1 - 0.06) * math.exp(-5) / (1 + math.exp(-5)) + 0.03)


def test_more_exploration_than_domains_allow_is_refused():
    with pytest.raises(PolicyError, match="at most 1 / 3 for 3 domains"):
        fit(Linear(), points(), [ODM(domain=third, least_exploration=0.5)])


@pytest.mark.parametrize("arguments", [{"alpha": 1.0}, {"reward_scale": 0.0}, {"variant": "x"}, {"least_exploration": -1.0}])
def test_wrong_arguments_are_refused_by_name(arguments):
    with pytest.raises(ValueError, match=f"`{next(iter(arguments))}`"):
        ODM(**arguments)


def test_points_have_three_domains():
    assert {third(Points()[i]) for i in range(6)} == {"a", "b", "c"}
