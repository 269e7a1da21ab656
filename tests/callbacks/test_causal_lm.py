"""Weights in the loss of CausalLM, whose mean is over the tokens of the whole accumulation window."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from lightning_megatrain.callbacks import ReweightingPolicy
from lightning_megatrain.datamodules import DynamicLoader
from lightning_megatrain.language_model import CausalLM
from tests.callbacks.modules import Sentences, tiny_llama

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


class Fixed(ReweightingPolicy):
    def weigh(self, losses, batch):
        return torch.linspace(0.1, 2, 16)[self.loader.last.index]


class Rows(Sentences):
    """Rows with different numbers of labels."""

    def __getitem__(self, i):
        row = super().__getitem__(i)
        return {"input_ids": row["input_ids"], "labels": row["labels"], "attention_mask": torch.ones(8, dtype=torch.long)}


@pytest.mark.parametrize("strategy", ["auto", "megatrain"])
@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_the_gradient_is_that_of_the_weighted_mean_over_all_tokens_at_any_accumulation(batch_size, strategy):
    seen = []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            seen.append([p.grad.clone() for p in module.parameters()])

    model = CausalLM(CONFIG, schedule="constant")
    model.configure_model()
    model.model.load_state_dict(tiny_llama().state_dict())
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, max_steps=1, accumulate_grad_batches=8 // batch_size, callbacks=[Fixed(), Watch()], **options
    )
    trainer.fit(model, DynamicLoader(Rows(), batch_size, shuffle=False))

    reference, batch = tiny_llama(), torch.utils.data.default_collate([Rows()[i] for i in range(8)])
    logits, labels = reference(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100).view(labels.shape)
    weight = torch.linspace(0.1, 2, 16)[:8, None]
    loss = (weight * losses).sum() / (weight * (labels != -100)).sum()
    for got, wanted in zip(seen[0], torch.autograd.grad(loss, list(reference.parameters())), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)  # FP32 sums in another order, through two layers
