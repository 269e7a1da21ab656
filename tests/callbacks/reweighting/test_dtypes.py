"""Losses in BF16: weights are reckoned in FP32, and the loss that goes back has the dtype that the module gave it."""

import math

import lightning as L
import pytest
import torch
from torch import nn

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.callbacks import ReweightingPolicy
from tests.callbacks.modules import fit
from tests.callbacks.reweighting.subjects import Fixed


class Stacked(L.LightningModule):
    """Layers that repeat; the loss of each sample is BF16 in `bf16-true`, and is made so under autocast."""

    def __init__(self, tokens=(1, 1, 1, 1), by_sample=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.tokens, self.by_sample, self.returned, self.weighted = torch.tensor(tokens), by_sample, [], []

    def training_step(self, batch, batch_idx):
        x = batch
        for layer in self.layers:
            x = x + layer(x).tanh()
        means = x.square().mean(1).to(torch.bfloat16)
        sums = means * self.tokens
        loss = means.mean() if self.by_sample else sums.sum() / self.tokens.sum()
        self.returned.append((loss.detach(), sums.detach()))
        return {"loss": loss, "sample_losses": sums, "sample_tokens": self.tokens}

    def on_before_backward(self, loss):
        self.weighted.append(loss.detach())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def rows():
    return torch.utils.data.DataLoader(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)), 4)


@pytest.mark.parametrize("strategy", ["auto", MegaTrainStrategy])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
@pytest.mark.parametrize("tokens", [(1, 1, 1, 1), (1, 2, 3, 2)])
def test_a_loss_in_bf16_is_weighted_in_fp32_and_rounded_once(strategy, precision, tokens):
    table, module = torch.rand(16, generator=torch.Generator().manual_seed(1)), Stacked(tokens)
    strategy = strategy if strategy == "auto" else strategy()
    fit(module, rows(), [Fixed(table.tolist())], precision=precision, strategy=strategy)
    assert len(module.weighted) == 4
    for step, ((loss, sums), weighted) in enumerate(zip(module.returned, module.weighted, strict=True)):
        assert weighted.dtype == loss.dtype == torch.bfloat16
        weight, counts = table[4 * step : 4 * step + 4].double(), torch.tensor(tokens).double()
        factor = weight * counts.sum() / (weight * counts).sum()
        exact = loss.double() + ((factor - 1) * sums.double()).sum() / counts.sum()
        half_unit = 2.0 ** (math.floor(math.log2(exact)) - 8)  # of the last place of 8 significant bits
        assert abs(weighted.double() - exact) <= half_unit * 1.001  # FP32 may fall on the other side of the middle


class Table(L.LightningModule):
    """The loss of each sample is a parameter, so its gradient is what the sample counts."""

    def __init__(self, losses, tokens=None, by_sample=False):
        super().__init__()
        self.losses = nn.Parameter(torch.tensor(losses))
        self.tokens, self.by_sample = torch.ones(len(losses)) if tokens is None else torch.tensor(tokens), by_sample

    def training_step(self, batch, batch_idx):
        means = self.losses[batch]
        sums, tokens = means * self.tokens.to(means.dtype), self.tokens
        loss = means.mean() if self.by_sample else sums.sum() / tokens.sum()
        return {"loss": loss.to(means.dtype), "sample_losses": sums, "sample_tokens": tokens}

    def on_before_backward(self, loss):
        self.weighted = loss.detach()

    def on_after_backward(self):
        self.gradient = self.losses.grad.clone()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def run(module, table, precision="bf16-true"):
    fit(module, torch.utils.data.DataLoader(range(4), 4), [Fixed(table)], precision=precision)
    return module


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
def test_the_gradient_of_a_sample_is_its_weight(precision):
    """All of these are exact in BF16: weights of mean 1, over four samples."""
    module = run(Table([1.0, 2.0, 3.0, 4.0]), [0.0, 0.5, 1.0, 2.5], precision)
    assert module.gradient.tolist() == [0.0, 0.125, 0.25, 0.625]
    assert module.weighted == (0.5 * 2 + 3 + 2.5 * 4) / 4


def test_weights_finer_than_bf16_reach_the_loss():
    """1.001 is 1 in BF16; of losses as large as 1000 the difference is to be seen."""
    module = run(Table([1000.0, 0.0, 0.0, 0.0]), [1.001 * 4, 0.0, 0.0, 0.0], "bf16-true")
    assert module.weighted == 1000.0
    module = run(Table([512.0, 512.0, 0.0, 0.0]), [1.0, 1.0, 1.0, 1.01], "bf16-true")
    assert module.weighted == torch.tensor(256 / 1.0025).bfloat16() != 256


def test_a_mean_over_samples_that_bf16_rounded_is_known_as_such():
    """5.015625 / 4 = 1.25390625 becomes 1.2578125 or 1.25 in BF16, further from it than FP32's tolerance of 1e-3."""
    losses, tokens, weights = [1.0078125, 2.0, 1.0, 1.0078125], [1.0, 9.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]
    over_samples, weight = sum(losses) / 4, torch.tensor(weights) * torch.tensor(tokens)
    assert abs(float(torch.tensor(over_samples).bfloat16()) / over_samples - 1) > 1e-3
    module = run(Table(losses, tokens, by_sample=True), weights)
    wanted = torch.tensor(losses).bfloat16().mean().float() + (weight * torch.tensor(losses)).sum() / weight.sum() - over_samples
    assert module.weighted == wanted.bfloat16()


def test_where_both_means_are_within_bf16_of_the_loss_it_is_the_mean_over_tokens():
    losses, tokens, weights = [1.0, 1.0, 1.0, 1.0234375], [1.0, 1.0, 1.0, 3.0], [1.0, 2.0, 3.0, 4.0]
    loss, weight = torch.tensor(losses).bfloat16().mean().float(), torch.tensor(weights) * torch.tensor(tokens)
    over_tokens = (torch.tensor(losses) * torch.tensor(tokens)).bfloat16().float().sum() / 6
    assert 1e-3 < abs(loss / over_tokens - 1) < 2**-8
    module = run(Table(losses, tokens, by_sample=True), weights)
    sums = (torch.tensor(losses) * torch.tensor(tokens)).bfloat16().float()
    wanted = loss + (torch.tensor(weights) * sums).sum() / weight.sum() - over_tokens
    assert module.weighted == wanted.bfloat16()


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
def test_weights_that_a_policy_makes_are_fp32(precision):
    class Made(ReweightingPolicy):
        def weigh(self, losses, batch):
            weights = torch.tensor([1.0, 1.001, 1.0, 1.0])
            assert weights.dtype == losses.means_B.dtype == torch.float32
            return weights

    policy = Made()
    fit(Table([1.0, 2.0, 3.0, 4.0]), torch.utils.data.DataLoader(range(4), 4), [policy], precision=precision)
    assert policy.history[0][1]["weight/most"] > 1.0007  # BF16 knows 1 and 1.0078
    assert torch.get_default_dtype() == torch.float32


def test_a_gradient_in_bf16_is_scaled_in_fp32_and_rounded_once():
    """Token losses of BF16: their gradient is a sixth, which BF16 rounds, times the factor, which it must not round before."""
    weights, g = torch.tensor([0.52, 1.44, 0.5, 1.08]), torch.tensor(1 / 6).bfloat16()

    class Tokens(Table):
        def training_step(self, batch, batch_idx):
            each = self.losses[batch["at"]].unsqueeze(1)
            return {"loss": each.sum() / 6, "token_losses": each, "loss_divisor": 6}

    module = Tokens([1.0, 2.0, 3.0, 4.0])
    data = [{"at": i, "labels": torch.tensor([5, 6])} for i in range(4)]
    fit(module, torch.utils.data.DataLoader(data, 4), [Fixed(weights.tolist())], precision="bf16-true")
    factors = (weights.double() / weights.double().mean()).float()
    assert torch.equal(module.gradient, (factors * g).bfloat16())
    assert (module.gradient != factors.bfloat16() * g).sum() == 3
