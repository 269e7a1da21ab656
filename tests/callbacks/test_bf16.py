"""Policies where losses, inputs and new tensors are BF16."""

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from torch import nn

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.callbacks import LESS, ODM, DoReMi, LossReweighting, LossSelection, ReweightingPolicy
from lightning_megatrain.callbacks.selection.selection import Selected
from lightning_megatrain.datamodules import DynamicLoader
from lightning_megatrain.language_model import CausalLM
from lightning_megatrain.model_ops import embed, gradient_features, sample_losses
from lightning_megatrain.model_ops.embeddings import pool
from tests.callbacks.modules import Sentences, fit
from tests.callbacks.test_causal_lm import CONFIG


class Stacked(L.LightningModule):
    """Layers that repeat, on inputs that are no integers; its losses are of the dtype of its weights."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.steps = []

    def forward(self, x):
        x = x + torch.zeros(3)  # a tensor of the default dtype
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x

    def compute_sample_losses(self, batch):
        return self(batch[0]).square().mean(1)

    def compute_embeddings(self, batch):
        return self(batch[0])

    def training_step(self, batch, batch_idx):
        losses = self.compute_sample_losses(batch)
        self.steps.append((batch[0].detach(), batch[1].tolist(), losses.detach()))
        return {"loss": losses.mean(), "sample_losses": losses}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Points(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return self.x[i], int(i)


def parity(sample):
    return "ab"[sample[1] % 2]


def train(policy, strategy):
    module = Stacked()
    strategy = strategy if strategy == "auto" else strategy()
    fit(module, torch.utils.data.DataLoader(Points(), 4), [policy], precision="bf16-true", strategy=strategy)
    return module


either = pytest.mark.parametrize("strategy", ["auto", MegaTrainStrategy])


@either
def test_odm_is_rewarded_by_the_fp32_value_of_bf16_losses(strategy):
    policy = ODM(domain=parity, alpha=0.0)
    module = train(policy, strategy)
    _, index, losses = module.steps[0]
    assert losses.dtype == torch.bfloat16
    for name, parity_ in (("a", 0), ("b", 1)):
        own = sum(float(loss) for i, loss in zip(index, losses, strict=True) if i % 2 == parity_)
        assert policy.history[0][1][f"score/{name}"] == own / 4 / 0.5  # the sum of four BF16 numbers is exact


@either
def test_doremi_compares_with_a_reference_in_bf16_too(strategy, tmp_path):
    """The difference of two BF16 losses is FP32."""
    reference = Stacked(seed=5)
    torch.save({"state_dict": reference.state_dict()}, tmp_path / "reference.ckpt")
    policy = DoReMi(str(tmp_path / "reference.ckpt"), domain=parity)
    module = train(policy, strategy)
    x, index, losses = module.steps[0]
    assert x.dtype == losses.dtype == torch.bfloat16
    with _DtypeContextManager(torch.bfloat16), torch.no_grad():
        excess = (losses.float() - reference.bfloat16().compute_sample_losses((x, None)).float()).clamp(min=0)
    for name, parity_ in (("a", 0), ("b", 1)):
        own = [float(e) for i, e in zip(index, excess, strict=True) if i % 2 == parity_]
        assert next(m for _, m in policy.history if "excess/a" in m)[f"excess/{name}"] == sum(own) / 2  # exact in FP64


@either
def test_what_is_asked_of_a_bf16_model_is_fp32(strategy):
    """Also from within a training step, where the default dtype is BF16."""
    asked = []

    class Ask(LossReweighting):
        def weigh(self, losses, batch):
            module = self._trainer.lightning_module
            asked.append([op(module, batch) for op in (sample_losses, embed, gradient_features)])
            return super().weigh(losses, batch)

    module = train(Ask(), strategy)
    for (losses, vectors, features), (_, _, own) in zip(asked, module.steps, strict=False):
        assert losses.dtype == vectors.dtype == features.dtype == torch.float32
        assert losses.shape == own.shape
    assert torch.equal(asked[0][0], module.steps[0][2].float())


@either
@pytest.mark.parametrize("policy", [lambda: LossSelection(size=8), lambda: LESS(target=Points(), size=8, gradient="sgd", width=64)])
def test_selections_score_a_bf16_model(policy, strategy):
    policy = policy()
    chosen = []
    select = policy.select

    def watched(trainer, module, size):
        chosen.append(select(trainer, module, size))
        return chosen[-1]

    policy.select = watched
    train(policy, strategy)
    assert isinstance(chosen[0], Selected)
    assert len(set(chosen[0].index.tolist())) == 8
    if isinstance(policy, LossSelection):
        model = Stacked().bfloat16()
        with _DtypeContextManager(torch.bfloat16), torch.no_grad():
            wanted = model.compute_sample_losses((Points().x.bfloat16(), None)).float()
        assert np.array_equal(chosen[0].score, wanted.double().numpy()[chosen[0].index])


class Even(ReweightingPolicy):
    """Notes what it sees; weighs nothing."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def weigh(self, losses, batch):
        self.seen.append((losses.divisor, float(losses.tokens_B.sum())))
        return torch.ones_like(losses.means_B)


@either
def test_a_language_models_count_and_logged_loss_are_not_rounded(strategy):
    """37 rows of 7 label tokens: 259, which BF16 rounds to 260."""

    class Rows(Sentences):
        def __getitem__(self, i):
            return {"input_ids": self.ids[i], "labels": self.ids[i], "attention_mask": torch.ones(8, dtype=torch.long)}

    policy, model = Even(), CausalLM(CONFIG, schedule="constant")
    strategy = strategy if strategy == "auto" else strategy()
    trainer = fit(model, DynamicLoader(Rows(37), 37), [policy], precision="bf16-true", strategy=strategy)
    assert policy.seen == [(259.0, 259.0)]
    logged = trainer.callback_metrics["train_loss"]
    assert logged.dtype == torch.float32
    assert logged == torch.tensor(model.window.mean_loss, dtype=torch.float32) != logged.bfloat16().float()


def test_pooling_within_a_training_step_counts_further_than_bf16_does():
    with _DtypeContextManager(torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        places = torch.arange(300.0, dtype=torch.float32).view(1, 300, 1)
        assert pool(places, None, "last_token").tolist() == [[299.0]]
        assert pool(places, None, "mean").dtype == torch.float32
        assert pool(places, None, "mean").item() == pytest.approx(149.5, rel=1e-6)  # FP32 weights of 1/300
