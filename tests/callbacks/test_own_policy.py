"""What a policy of one's own may return, and what it is told when it returns something else."""

import math
import re

import numpy as np
import pytest
import torch

from lightning_megatrain import model_ops
from lightning_megatrain.callbacks import (
    MixturePolicy,
    PolicyError,
    RandomSelection,
    ReweightingPolicy,
    Selected,
    SelectionPolicy,
    read_decisions,
)
from lightning_megatrain.datamodules import DynamicLoader
from tests.callbacks.modules import Linear, Points, fit, points, third, weights


class Own(SelectionPolicy):
    def __init__(self, make):
        super().__init__(size=4)
        self.make = make

    def select(self, trainer, module, size):
        return self.make()


class OwnMixture(MixturePolicy):
    def __init__(self, mixed):
        super().__init__(domain=third)
        self.mixed = mixed

    def mix(self, trainer, module):
        return self.mixed


class OwnWeights(ReweightingPolicy):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def weigh(self, losses, batch):
        return self.make(losses)


def refused(policy, error, says):
    with pytest.raises(PolicyError, match=f"^{policy.name} failed at step 0: {says}") as caught:
        fit(Linear(), points(), [policy])
    assert type(caught.value.__cause__) is error


INDEX, SCORE = [5, 3, 8, 1], [0.5, 0.25, -2.0, 3.0]


@pytest.mark.parametrize(
    ("index", "score"),
    [
        (np.array(INDEX), np.array(SCORE)),
        (INDEX, SCORE),
        (torch.tensor(INDEX), torch.tensor(SCORE)),
        (torch.tensor(INDEX, dtype=torch.int32), torch.tensor(SCORE, dtype=torch.bfloat16)),
        (np.array(INDEX[::-1], dtype=np.uint8)[::-1], torch.tensor(SCORE, requires_grad=True)),
        ([torch.tensor(i) for i in INDEX], np.array(SCORE, dtype=np.float16)),
    ],
)
def test_select_may_return_arrays_tensors_and_lists(index, score, tmp_path):
    module, policy = Linear(), Own(lambda: Selected(index, score, ordered=True))
    fit(module, points(), [policy], default_root_dir=tmp_path)
    assert module.seen == [INDEX] * 6
    table = read_decisions(tmp_path / "policies" / "Own" / "decisions")
    assert table["index"].to_pylist() == INDEX
    assert table["score"].to_pylist() == SCORE
    assert [m for _, m in policy.history] == [{"samples": 4.0, "score/mean": 0.4375, "score/least": -2.0}]


def test_select_may_choose_by_the_losses_that_it_asked_for():
    class Hardest(SelectionPolicy):
        def select(self, trainer, module, size):
            losses = self.ask(model_ops.sample_losses, module)
            index = losses.argsort(descending=True)[:size]
            return Selected(index, score=losses[index])

    policy = Hardest(size=4)
    module, untrained = Linear(), Linear()
    fit(module, points(), [policy])
    losses = untrained.compute_sample_losses(torch.utils.data.default_collate([Points()[i] for i in range(24)])).detach()
    assert {i for batch in module.seen for i in batch} == set(losses.topk(4).indices.tolist())
    assert policy.history[0][1]["score/least"] == losses.topk(4).values[-1].item()


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: None, TypeError, r"`select` must return a Selected, got a NoneType\. Return `Selected\(index\)`"),
        (lambda: [1, 2], TypeError, "`select` must return a Selected, got a list"),
        (lambda: np.arange(4), TypeError, "`select` must return a Selected, got a ndarray"),
        (lambda: Selected(INDEX, SCORE[:3]), ValueError, ".* a score for each index, got 4 indices and 3 scores"),
        (lambda: Selected(INDEX, np.zeros((4, 1))), ValueError, r"`score` of a Selected must be 1-D, .* ndarray of shape \(4, 1\)"),
        (lambda: Selected(torch.zeros(2, 2).long()), ValueError, r"`index` of a Selected must be 1-D, .* Tensor of shape \(2, 2\)"),
        (lambda: Selected(3), ValueError, r"`index` of a Selected must be 1-D, .* int of shape \(\)"),
        (lambda: Selected(None), TypeError, "`index` of a Selected must be .* numbers, got a NoneType"),
        (lambda: Selected(INDEX, ["a"] * 4), TypeError, "`score` of a Selected must be .* numbers, got a list"),
        (lambda: Selected([[1, 2], [3]]), TypeError, "`index` of a Selected cannot be made an array of numbers, got a list"),
        (lambda: Selected(torch.tensor([0.0, 1.0])), TypeError, "A pool needs whole numbers"),
        (lambda: Selected([]), ValueError, "A pool needs indices between 0 and 23, got 0 of them"),
    ],
)
def test_what_select_must_return_is_said(make, error, says):
    refused(Own(make), error, says)


@pytest.mark.parametrize(
    ("mixed", "error", "says"),
    [
        (None, TypeError, r"`mix` must return a weight for every domain, a mapping from each of \['a', 'b', 'c'\] .*, got a NoneType"),
        ([1, 1, 1], TypeError, r"`mix` must return .* each of \['a', 'b', 'c'\] to a number, got a list"),
        ({}, ValueError, "`proportions` must be finite, non-negative and not all zero"),
        ({"a": 1, "d": 1}, ValueError, r".*Missing: \['b', 'c'\]; unknown: \['d'\]"),
        ({"a": 1, "b": 1, "c": -1}, ValueError, "`proportions` must be finite, non-negative"),
        ({"a": 1, "b": 1, "c": math.nan}, ValueError, "`proportions` must be finite, non-negative"),
    ],
)
def test_what_mix_must_return_is_said(mixed, error, says):
    refused(OwnMixture(mixed), error, says)


def test_mix_may_return_tensors_and_numpy_scalars():
    module = Linear()
    fit(module, points(), [OwnMixture({"a": torch.tensor(1.0), "b": np.float32(3), "c": 0})])
    assert np.bincount(np.array(sum(module.seen, [])) % 3, minlength=3).tolist() == [6, 18, 0]


@pytest.mark.parametrize(
    "convert",
    [
        lambda w: w.tolist(),
        lambda w: tuple(w.tolist()),
        lambda w: w.numpy(),
        lambda w: w.double().numpy()[::-1].copy()[::-1],
        lambda w: list(w),
        lambda w: w.clone().requires_grad_(),
        lambda w: w.double(),
    ],
)
def test_weigh_may_return_arrays_lists_and_tensors_with_a_graph(convert):
    plain, converted = Linear(), Linear()
    fit(plain, points(), [OwnWeights(lambda losses: losses.means_B.clamp(max=4))])
    fit(converted, points(), [OwnWeights(lambda losses: convert(losses.means_B.clamp(max=4)))])
    assert plain.losses == converted.losses
    assert torch.equal(weights(plain), weights(converted))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda losses: None, TypeError, "got a NoneType."),
        (lambda losses: 1.0, TypeError, "got a float of shape ()."),
        (lambda losses: losses.means_B.mean(), TypeError, "got a Tensor of shape ()."),
        (lambda losses: losses.means_B[:, None], TypeError, "got a Tensor of shape (4, 1)."),
        (lambda losses: [1.0] * 3, TypeError, "got a list of shape (3,)."),
        (lambda losses: np.ones((4, 2)), TypeError, "got a ndarray of shape (4, 2)."),
        (lambda losses: ["a"] * 4, TypeError, "got a list."),
        (lambda losses: {"a": 1}, TypeError, "got a dict."),
    ],
)
def test_what_weigh_must_return_is_said(make, error, says):
    refused(OwnWeights(make), error, re.escape(f"`weigh` must return a tensor (B,) = (4,), a weight for each sample, {says}"))


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_weights_below_zero_or_not_finite_are_refused(bad):
    refused(OwnWeights(lambda losses: [1.0, 1.0, bad, 1.0]), ValueError, "`weigh` must return a finite, non-negative weight for each of 4")


@pytest.mark.parametrize("given", ["loader", "module", "dynamic loader"])
@pytest.mark.parametrize(
    ("domain", "says"),
    [
        ("nope", "`domain='nope'` names a column, but a sample is a tuple"),
        (lambda sample: sample["source"], "`domain` failed on sample 0, a tuple: TypeError: tuple indices"),
        (lambda sample: sample[0], "`domain` must give a string .* for sample 0 it gives a Tensor"),
    ],
)
def test_a_wrong_domain_is_said_and_not_that_the_loader_is_invalid(given, domain, says):
    """Lightning reports a TypeError from a loader's iterator as an invalid loader."""
    module, loader, policy = Linear(), points(), RandomSelection(size=4, domain=domain)
    if given == "module":
        module.train_dataloader, loader = points, None
    elif given == "dynamic loader":
        loader, policy = DynamicLoader(Points(), 4, domain=domain), RandomSelection(size=4)
    with pytest.raises(ValueError, match=f"^{says}"):
        fit(module, loader, [policy])
