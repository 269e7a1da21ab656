"""Weights in the training loss of any module."""

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lightning_megatrain.callbacks import LossReweighting
from lightning_megatrain.callbacks.reweighting.loss import shape_of
from lightning_megatrain.callbacks.training_losses import _plain_mean
from lightning_megatrain.model_ops import compute_sample_losses
from tests.callbacks.modules import Linear, Llama, Points, Sentences, fit, points, sentences, weights
from tests.callbacks.reweighting.subjects import Fixed, Logits, PerSample


def by_hand(module, table, batch):
    """Sum of weight x token losses over the sum of weight x tokens, with its gradient."""
    batch = torch.utils.data.default_collate([Sentences()[i] for i in batch])
    if isinstance(module, Logits):
        logits, labels = module.parts[1](module.parts[0](batch["input_ids"])), batch["labels"]
    else:
        logits, labels = module.model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100).view(labels.shape)
    tokens = (labels != -100).float()
    loss = (table[:, None] * losses).sum() / (table[:, None] * tokens).sum()
    return loss, torch.autograd.grad(loss, list(module.parameters()))


@pytest.mark.parametrize("kind", [Llama, PerSample, Logits])
def test_the_loss_is_the_weighted_mean_over_tokens_and_so_is_its_gradient(kind):
    torch.manual_seed(3)
    table = torch.rand(16)
    seen = {}

    class Watched(kind):
        def on_after_backward(self):
            seen.setdefault("grads", [p.grad.clone() for p in self.parameters()])

        def on_before_backward(self, loss):
            seen.setdefault("loss", loss.detach().clone())

    torch.manual_seed(0)
    module, copy = Watched(), None
    import copy as copies

    copy = copies.deepcopy(module)
    fit(module, sentences(shuffle=False), [Fixed(table.tolist())], max_steps=1)
    loss, grads = by_hand(copy, table[:4], range(4))
    torch.testing.assert_close(seen["loss"], loss.detach(), rtol=1e-5, atol=1e-6)  # FP32 sums in another order
    for got, wanted in zip(seen["grads"], grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)  # the same, through two layers


@pytest.mark.parametrize("kind", [Llama, PerSample, Logits, Linear])
@pytest.mark.parametrize("policy", [lambda: Fixed([2.5] * 24), lambda: LossReweighting("uniform")])
def test_equal_weights_leave_the_modules_own_loss_untouched(kind, policy):
    loader = points if kind is Linear else sentences

    def run(policies):
        torch.manual_seed(0)
        module = kind()
        fit(module, loader(), policies, accumulate_grad_batches=2)
        return weights(module)

    assert torch.equal(run([]), run([policy()]))


def test_b2_weights_change_the_loss():
    """The published DoReMi weights never reached it."""

    def run(table):
        module = Llama()
        fit(module, sentences(), [Fixed(table)])
        return weights(module)

    assert not torch.equal(run([0.99] * 8 + [0.01] * 8), run([0.5] * 16))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_b5_l6_weights_do_not_change_the_scale_of_the_gradient_at_any_accumulation(accumulate):
    """A published weighter divided twice, another not at all. Nearly equal weights must give nearly the plain gradient."""
    norms = []
    for table in ([1.0] * 16, [1.0, 1.0 + 1e-4] * 8):

        class Watched(Llama):
            def on_before_optimizer_step(self, optimizer):
                norms.append(float(torch.cat([p.grad.flatten() for p in self.parameters()]).norm()))

        fit(Watched(), sentences(shuffle=False), [Fixed(table)], max_steps=1, accumulate_grad_batches=accumulate)
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


@pytest.mark.parametrize("kind", [Llama, PerSample])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_weights_hold_between_micro_batches_at_any_accumulation(kind, batch_size):
    """Published weights are relative to a micro-batch. Rows of equal length, as Lightning averages micro-batches alike."""
    table = torch.linspace(0.1, 2, 16)
    seen = {}

    class Full(Sentences):
        def __init__(self):
            super().__init__(16)
            self.lengths[:] = 8

    class Watched(kind):
        def on_before_optimizer_step(self, optimizer):
            seen.setdefault(len(seen), [p.grad.clone() for p in self.parameters()])

    loader = torch.utils.data.DataLoader(Full(), batch_size)
    fit(Watched(), loader, [Fixed(table.tolist())], max_steps=1, accumulate_grad_batches=8 // batch_size)
    module = Llama()
    batch = torch.utils.data.default_collate([Full()[i] for i in range(8)])
    logits, labels = module.model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    loss = (table[:8, None] * losses).sum() / (table[:8].sum() * 7)
    for got, wanted in zip(seen[0], torch.autograd.grad(loss, list(module.parameters())), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)  # FP32, through two layers


@pytest.mark.parametrize("kind", [Llama, PerSample])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("by_sample", [True, False])
def test_micro_batches_of_unlike_length_are_averaged_as_the_module_averages_them(kind, accumulate, by_sample):
    """By hand: the mean over the micro-batches of (sum of w x loss), over the mean of (sum of w), per sample or per token."""
    size, seen = 8 // accumulate, []

    class Watched(kind):
        def on_before_optimizer_step(self, optimizer):
            seen.append([p.grad.clone() for p in self.parameters()])

    policy = LossReweighting("extremes", length_normalised=not by_sample)
    fit(Watched(), sentences(batch_size=size, shuffle=False), [policy], max_steps=1, accumulate_grad_batches=accumulate)
    module = Llama()
    sums, totals, counts = [], [], []
    for start in range(0, 8, size):
        batch = torch.utils.data.default_collate([Sentences()[i] for i in range(start, start + size)])
        logits, labels = module.model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100).view(labels.shape)
        tokens = (labels != -100).sum(1)
        weight = torch.softmax(shape_of(*[(losses.sum(1) / tokens).detach()] * 2, "extremes", 1.0), 0)
        sums.append((weight * losses.sum(1) / (tokens if by_sample else tokens.sum())).sum())
        totals.append((weight * (1 if by_sample else tokens / tokens.sum())).sum())
        counts.append(int(tokens.sum()))
    assert accumulate == 1 or len(set(counts)) > 1
    loss = torch.stack(sums).mean() / torch.stack(totals).mean()
    for got, wanted in zip(seen[0], torch.autograd.grad(loss, list(module.parameters())), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)  # FP32 sums in another order, through two layers


@pytest.mark.parametrize("kind", [PerSample, Llama])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_micro_batch_of_weight_zero_does_not_count(kind, order):
    """Its gradient is zero, wherever in the window it stands, and the mean weight is that of all micro-batches."""
    table, seen = torch.cat([torch.tensor([[0.0] * 4, [1.0, 2.0, 3.0, 4.0]])[i] for i in order]), []

    class Full(Sentences):
        def __init__(self):
            super().__init__(8)
            self.lengths[:] = 8

    class Watched(kind):
        def on_before_optimizer_step(self, optimizer):
            seen.append([p.grad.clone() for p in self.parameters()])

    fit(Watched(), torch.utils.data.DataLoader(Full(), 4), [Fixed(table.tolist())], max_steps=1, accumulate_grad_batches=2)
    module, batch = Llama(), torch.utils.data.default_collate([Full()[i] for i in range(8)])
    logits, labels = module.model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    loss = (table[:, None] * losses).sum() / (table.sum() * 7)
    for got, wanted in zip(seen[0], torch.autograd.grad(loss, list(module.parameters())), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)  # FP32 sums in another order, through two layers


def test_two_reweightings_multiply():
    a, b = torch.rand(16), torch.rand(16)
    results = []
    for policies in ([Fixed(a.tolist(), name="a"), Fixed(b.tolist(), name="b")], [Fixed((a * b).tolist())]):
        module = Llama()
        fit(module, sentences(), policies)
        results.append(weights(module))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)  # the product is rounded elsewhere


def test_the_schedule_says_which_steps_are_weighted():
    policy = Fixed(np.linspace(0.1, 1, 16).tolist(), warmup_steps=1, every_n_steps=2)
    fit(Llama(), sentences(), [policy], max_epochs=2)
    assert [step for step, _ in policy.history] == [2, 4, 6, 8]  # told after the second, fourth, sixth and eighth step


@pytest.mark.parametrize("mean", ["tokens", "samples"])
def test_what_the_module_adds_to_its_loss_is_kept_and_not_weighted(mean):
    """A penalty, a router's loss: the gradient is that of the weighted mean plus the addition as it is."""
    table, tokens, rates = torch.tensor([0.5, 3.0, 1.0, 1.5]), torch.tensor([1.0, 2.0, 3.0, 2.0]), []

    class Penalised(Linear):
        def training_step(self, batch, batch_idx):
            x, y = batch
            sums = F.cross_entropy(self.layer(x), y, reduction="none") * tokens
            plain = sums.sum() / tokens.sum() if mean == "tokens" else (sums / tokens).mean()
            return {"loss": plain + 0.5 * self.layer.weight.square().sum(), "sample_losses": sums, "sample_tokens": tokens}

        def on_before_backward(self, loss):
            rates.append(loss.detach().clone())

    module, copy = Penalised(), Penalised()
    fit(module, points(4, shuffle=False), [Fixed(table.tolist())], max_steps=1)
    x, y = torch.utils.data.default_collate([Points()[i] for i in range(4)])
    losses = F.cross_entropy(copy.layer(x), y, reduction="none")
    loss = (table * tokens * losses).sum() / (table * tokens).sum() + 0.5 * copy.layer.weight.square().sum()
    loss.backward()
    if mean == "samples":  # a loss that is another mean plus an addition cannot be told apart: the difference of the means stays
        loss = loss + losses.detach().mean() - (tokens * losses.detach()).sum() / tokens.sum()
    else:
        wanted = torch.cat([(p - copy.lr * p.grad).detach().flatten() for p in copy.parameters()])
        torch.testing.assert_close(weights(module), wanted, rtol=1e-5, atol=1e-6)  # sums in another order
    torch.testing.assert_close(rates[0], loss.detach(), rtol=1e-5, atol=1e-6)  # the same


def test_a_mean_over_samples_is_replaced_by_the_weighted_mean_over_tokens():
    table, tokens = torch.tensor([0.5, 3.0, 1.0, 1.5]), torch.tensor([1.0, 2.0, 3.0, 2.0])

    class BySample(Linear):
        def training_step(self, batch, batch_idx):
            x, y = batch
            means = F.cross_entropy(self.layer(x), y, reduction="none")
            return {"loss": means.mean(), "sample_losses": means * tokens, "sample_tokens": tokens}

    module, copy = BySample(), BySample()
    fit(module, points(4, shuffle=False), [Fixed(table.tolist())], max_steps=1)
    x, y = torch.utils.data.default_collate([Points()[i] for i in range(4)])
    weighted = table * tokens
    ((weighted * F.cross_entropy(copy.layer(x), y, reduction="none")).sum() / weighted.sum()).backward()
    wanted = torch.cat([(p - copy.lr * p.grad).detach().flatten() for p in copy.parameters()])
    torch.testing.assert_close(weights(module), wanted, rtol=1e-5, atol=1e-6)  # sums in another order


@pytest.mark.parametrize("strategy", ["auto", "megatrain"])
def test_a_module_in_bf16_is_weighted(strategy):
    """Weights of which a quarter is a BF16 number: each sample's gradient is exactly its own times the weight."""
    table = torch.tensor([0.0, 2.0, 1.0, 1.0])

    class Blocks(Linear):
        def __init__(self, given=None):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(2)])
            self.given = given

        def training_step(self, batch, batch_idx):
            x, y = batch
            for block in self.blocks:
                x = block(x)
            losses = F.cross_entropy(self.layer(x), y, reduction="none")
            assert losses.dtype == torch.bfloat16
            if self.given is not None:
                return (losses * self.given.bfloat16()).mean()
            return {"loss": losses.mean(), "sample_losses": losses}

    def run(given, policies):
        module = Blocks(given)
        fit(module, points(4, shuffle=False), policies, max_steps=1, precision="bf16-true", strategy=strategy)
        return weights(module)

    assert torch.equal(run(None, [Fixed(table.tolist())]), run(table, []))
    assert not torch.equal(run(table, []), run(torch.ones(4), []))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mean", ["tokens", "samples"])
def test_which_mean_the_loss_is_can_be_told_within_the_digits_it_has(dtype, mean):
    """The two differ by 1 part in 200, which is one step of BF16."""
    tokens = torch.tensor([1.0, 3.0])
    sums = torch.tensor([1.0, 3.0 * 1.02])
    means = {"tokens": sums.sum() / tokens.sum(), "samples": (sums / tokens).mean()}
    assert means[mean].item() in (pytest.approx(1.015), pytest.approx(1.01))
    found = _plain_mean(means[mean].to(dtype), sums, tokens)
    assert found.item() == means[mean].item()


def test_the_losses_seen_are_those_of_the_samples():
    seen = []

    class Look(Fixed):
        def weigh(self, losses, batch):
            seen.append((losses.means_B.clone(), compute_sample_losses(self.trainer_module, batch).detach()))
            return super().weigh(losses, batch)

    policy = Look([1.0] * 16)
    policy.trainer_module = module = Llama()
    fit(module, sentences(), [policy])
    for got, wanted in seen:
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)  # sums in another order


def test_the_module_is_left_as_it_came():
    module = Llama()
    fit(module, sentences(), [LossReweighting()])
    assert "training_step" not in vars(module)
    assert not module.model._forward_hooks


def test_validation_is_not_weighted():
    """L8."""

    def run(policies):
        module = Llama(lr=0.0)
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=policies
        )
        trainer.fit(module, sentences(), sentences(shuffle=False))
        return trainer.callback_metrics["val_loss"]

    assert run([]) == run([Fixed(np.linspace(0.1, 1, 16).tolist())])
