"""What cannot be weighted is refused, or said and left as it is."""

import math

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatrain.callbacks import ODM, DoReMi, LossReweighting, PolicyError
from tests.callbacks.modules import Linear, Llama, fit, points, sentences, third
from tests.callbacks.reweighting.subjects import Fixed, Logits


def test_a_batch_of_one_warns():
    with pytest.warns(UserWarning, match="LossReweighting: a batch of one sample"):
        fit(Llama(), sentences(batch_size=1), [LossReweighting()], max_steps=2)


def test_a_module_that_tells_too_little_is_told_what_to_return():
    class Scalar(Linear):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)["loss"]

    with pytest.raises(PolicyError, match=r"LossReweighting failed at step 0(.|\n)*`sample_losses`(.|\n)*`logits`"):
        fit(Scalar(), points(), [LossReweighting()])


def test_logits_that_do_not_give_the_loss_are_refused():
    class Odd(Logits):
        def training_step(self, batch, batch_idx):
            out = super().training_step(batch, batch_idx)
            return {**out, "loss": 3 * out["loss"]}

    with pytest.raises(PolicyError, match="as cross-entropy"):
        fit(Odd(), sentences(), [LossReweighting()])


@pytest.mark.parametrize("policy", [LossReweighting, lambda: DoReMi("nowhere", domain=third)])
def test_a_module_that_optimizes_by_hand_is_refused_by_name(policy, monkeypatch):
    monkeypatch.setattr("lightning_megatrain.callbacks.mixture.doremi._load_reference", lambda *_: torch.nn.Linear(1, 1))

    class ByHand(Linear):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(MisconfigurationException, match="weights the loss .*ByHand has automatic_optimization=False"):
        fit(ByHand(), points(), [policy()])


@pytest.mark.parametrize("policy", [LossReweighting, lambda: ODM(domain=third)])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda losses: losses.mean(), r"`sample_losses` of Shaped.training_step must be \(B,\) = \(4,\).* got \(\)"),
        (lambda losses: losses[:, None], r"must be \(B,\) = \(4,\).* got \(4, 1\)"),
        (lambda losses: losses[:2], r"must be \(B,\) = \(4,\).* got \(2,\)"),
        (lambda losses: losses.tolist(), r"must be a tensor \(B,\), got a list"),
    ],
)
def test_sample_losses_that_are_not_one_number_a_sample_are_refused(policy, change, says):
    class Shaped(Linear):
        def training_step(self, batch, batch_idx):
            given = super().training_step(batch, batch_idx)
            return {"loss": given["loss"], "sample_losses": change(given["sample_losses"])}

    policy = policy()
    with pytest.raises(PolicyError, match=f"{policy.name} failed at step 0: {says}" if says.startswith("`") else says):
        fit(Shaped(), points(), [policy])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_batch_with_a_loss_that_is_not_finite_is_not_weighted(bad):
    class Broken(Linear):
        def training_step(self, batch, batch_idx):
            given = super().training_step(batch, batch_idx)
            scale = torch.where(torch.arange(4) == 0, bad, 1.0) if batch_idx == 1 else torch.ones(4)
            return {"loss": given["loss"], "sample_losses": given["sample_losses"] * scale}

    policy = LossReweighting()
    with pytest.warns(UserWarning, match="not finite: a batch that holds such a one is not weighted"):
        fit(Broken(), points(), [policy])
    ranges = [(m["weight/least"], m["weight/most"]) for _, m in policy.history]
    assert ranges[1] == (1.0, 1.0)
    assert all(least < 1 < most for least, most in ranges[:1] + ranges[2:])


def test_weights_that_are_not_numbers_are_refused():
    with pytest.raises(PolicyError, match="Fixed failed at step 0: `weigh` must return a finite"):
        fit(Llama(), sentences(), [Fixed([math.nan] * 16)])
