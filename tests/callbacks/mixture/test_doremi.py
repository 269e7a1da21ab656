"""DoReMi: weights of domains from the excess loss over a reference."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatrain.callbacks import DoReMi, StaticMixture
from lightning_megatrain.callbacks.mixture.doremi import update_weights
from lightning_megatrain.model_ops import token_losses
from tests.callbacks.modules import Linear, Llama, Sentences, fit, points, sentences, third, weights


def reference(tmp_path, seed=5):
    path = tmp_path / "reference.ckpt"
    torch.save({"state_dict": Llama(seed=seed).state_dict()}, path)
    return str(path)


def test_an_update_by_hand():
    """eta = 1, c = 0.1, alpha = (.5, .5), lambda = (ln 3, 0): (.75, .25), smoothed (.725, .275)."""
    np.testing.assert_allclose(update_weights(np.array([0.5, 0.5]), np.array([math.log(3), 0.0]), 1.0, 0.1), [0.725, 0.275])


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=6),
    st.floats(0.01, 5),
    st.floats(0, 1),
    st.floats(0, 50),
    st.randoms(use_true_random=False),
)
def test_weights_are_on_the_simplex_in_any_order_and_a_common_excess_changes_nothing(excess, eta, c, shift, random):
    k = len(excess)
    start = np.arange(1, k + 1) / np.arange(1, k + 1).sum()
    w = update_weights(start, np.array(excess), eta, c)
    assert w.sum() == pytest.approx(1)
    assert (w >= c / k - 1e-12).all()
    np.testing.assert_allclose(update_weights(start, np.array(excess) + shift, eta, c), w, rtol=1e-6, atol=1e-12)
    order = list(range(k))
    random.shuffle(order)
    np.testing.assert_allclose(update_weights(start[order], np.array(excess)[order], eta, c), w[order], rtol=1e-9)


def test_no_excess_leaves_the_weights():
    w = np.array([0.2, 0.8])
    np.testing.assert_allclose(update_weights(w, np.zeros(2), 1.0, 0.0), w)


class Watched(Llama):
    """Keeps each step's weights, samples, loss and gradient."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.steps = []

    def on_train_batch_start(self, batch, batch_idx):
        self.before = copy.deepcopy(self.model.state_dict())
        self.batch = batch

    def on_before_backward(self, loss):
        self.value = float(loss)

    def on_before_optimizer_step(self, optimizer):
        self.steps.append((self.before, self.batch, self.value))


def one_step_by_hand(state, batch, reference_module, alpha, excess):
    module = Llama()
    module.model.load_state_dict(state)
    losses, valid = token_losses(module, batch)
    ref, _ = token_losses(reference_module, batch)
    domain = torch.tensor(["xy".index(s) for s in batch["source"]])
    loss = total = 0.0
    excess = excess.copy()
    for d in range(2):
        mine = domain == d
        tokens = valid[mine].sum()
        if tokens:
            loss, total = loss + alpha[d] * float(losses[mine].sum() / tokens), total + alpha[d]
            excess[d] = float((losses - ref).clamp(min=0)[mine].sum() / tokens)
    return loss / total, update_weights(alpha, excess, 1.0, 1e-3), excess


def test_b2_b21_each_step_updates_from_its_tokens_and_weights_the_loss(tmp_path):
    """Published: the loss was never weighted, and one micro-batch of one rank was looked at now and then, after it was trained on."""
    module, policy = Watched(), DoReMi(reference(tmp_path), domain="source")
    fit(module, sentences(), [policy], max_epochs=2)
    reference_module = Llama(seed=5)
    alpha, excess, expected = np.full(2, 0.5), np.zeros(2), []
    for state, batch, value in module.steps:
        loss, alpha_next, excess = one_step_by_hand(state, batch, reference_module, alpha, excess)
        assert value == pytest.approx(loss, rel=1e-5)  # sums of FP32 in another order
        alpha = alpha_next
        expected.append(alpha)
    shares = [[m["share/x"], m["share/y"]] for _, m in policy.history if "share/x" in m]
    np.testing.assert_allclose(shares, expected[: len(shares)], rtol=1e-5)
    assert len(shares) == len(module.steps) - 1  # nothing follows the last step
    assert np.ptp([s[0] for s in shares]) > 1e-3  # how much depends on the order of the batches, which another test may have seeded


def test_accumulation_updates_from_all_micro_batches(tmp_path):
    counts = []

    class Count(DoReMi):
        def act(self, trainer, module):
            counts.append(self._seen_K2[:, 1].sum())
            super().act(trainer, module)

    fit(Llama(), sentences(), [Count(reference(tmp_path), domain="source")], accumulate_grad_batches=2, max_epochs=2)
    tokens = 2 * sum(int((Sentences()[i]["labels"][1:] != -100).sum()) for i in range(16))
    assert 0.5 * tokens / 4 < counts[0] < 2 * tokens / 4  # a quarter of two epochs' tokens, give or take their lengths


@pytest.mark.parametrize(("schedule", "steps"), [({"max_updates": 1}, [1]), ({"every_n_steps": 0, "warmup_steps": 2}, [3])])
def test_only_updates_of_the_weights_count(tmp_path, schedule, steps):
    """At the end of the warm-up there is nothing to update from yet; weighting goes on after the last update."""
    module, policy = Llama(), DoReMi(reference(tmp_path), domain="source", **schedule)
    fit(module, sentences(), [policy], max_epochs=2)
    assert [step for step, metrics in policy.history if "share/x" in metrics] == steps
    assert policy.updates == 1
    (shares,) = [m for _, m in policy.history if "share/x" in m]
    assert policy.average_shares == pytest.approx({"x": shares["share/x"], "y": shares["share/y"]})
    assert sum("weight/least" in metrics for _, metrics in policy.history) == 8 - schedule.get("warmup_steps", 0)


def test_the_proxy_sees_all_domains_alike_and_the_average_is_left_for_the_final_run(tmp_path):
    class Uneven(Sentences):
        def __getitem__(self, i):
            return {**super().__getitem__(i), "source": "x" if i < 2 else "y"}

    seen = []

    class Look(Llama):
        def on_train_batch_start(self, batch, batch_idx):
            seen.extend(batch["source"])

    policy = DoReMi(reference(tmp_path), domain="source")
    loader = torch.utils.data.DataLoader(Uneven(), 4, shuffle=True)
    fit(Look(), loader, [policy], max_epochs=4, default_root_dir=tmp_path)
    assert abs(seen.count("x") - 32) <= 2
    file = tmp_path / "policies" / "DoReMi" / "average_shares.json"
    average = json.loads(file.read_text())
    shares = np.array([[m["share/x"], m["share/y"]] for _, m in policy.history if "share/x" in m])
    np.testing.assert_allclose([average["x"], average["y"]], shares.mean(0), rtol=1e-9)
    final = StaticMixture(str(file), domain="source")
    trainer = fit(Llama(), loader, [final])
    assert trainer.train_dataloader.proportions == pytest.approx(average)


def test_a_resumed_run_has_the_same_weights(tmp_path):
    def make():
        return DoReMi(reference(tmp_path), domain="source")

    whole, resumed = Llama(), Llama()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    first, second = make(), make()
    fit(whole, sentences(), [first, saver], max_epochs=2, enable_checkpointing=True)
    fit(resumed, sentences(), [second], max_epochs=2, ckpt_path=tmp_path / "step=3.ckpt")
    assert second.history == first.history
    assert second.average_shares == first.average_shares
    assert torch.equal(weights(whole), weights(resumed))


def test_a_missing_reference_is_refused():
    """B21: published, a reference that cannot be loaded silently becomes none."""
    with pytest.raises(FileNotFoundError, match=r"no reference checkpoint nowhere\.ckpt"):
        DoReMi("nowhere.ckpt")
    with pytest.raises(Exception, match="DoReMi failed at step 0"):
        fit(Llama(), sentences(), [DoReMi("no/such-model", domain="source")])


def test_modules_without_tokens_are_compared_by_sample(tmp_path):
    path = tmp_path / "reference.ckpt"
    torch.save({"state_dict": Linear().state_dict()}, path)
    policy = DoReMi(str(path), domain=third)
    fit(Linear(lr=0.5), points(48), [policy])
    shares = np.array([[m[f"share/{n}"] for n in "abc"] for _, m in policy.history if "share/a" in m])
    np.testing.assert_allclose(shares.sum(1), 1)
    np.testing.assert_allclose(shares[0], 1 / 3, rtol=1e-6)  # the first step's model is the reference: no excess


def test_the_reference_computes_in_the_precision_of_the_run(tmp_path):
    """In BF16 too the model at the first step has no excess over itself, exactly; batches of a module of one's own hold floats."""
    path, seen = tmp_path / "reference.ckpt", []
    torch.save({"state_dict": Linear().state_dict()}, path)

    class Look(DoReMi):
        def _excess(self, losses, batch):
            seen.append((next(self._reference.parameters()).dtype, super()._excess(losses, batch)))
            return seen[-1][1]

    fit(Linear(), points(), [Look(str(path), domain=third)], precision="bf16-true")
    assert seen[0][0] == torch.bfloat16
    assert seen[0][1].tolist() == [0.0] * 4
    assert any(excess.any() for _, excess in seen[1:])


def test_the_reference_is_no_part_of_the_checkpoint(tmp_path):
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}")
    module = Llama()
    fit(module, sentences(), [DoReMi(reference(tmp_path), domain="source"), saver], enable_checkpointing=True)
    state = torch.load(next(tmp_path.glob("step*.ckpt")), weights_only=False)
    assert state["state_dict"].keys() == module.state_dict().keys()
