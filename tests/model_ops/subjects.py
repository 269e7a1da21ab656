from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_megatrain.model_ops import GradientSettings, compute_sample_losses
from lightning_megatrain.model_ops.signs import key_of, rademacher

VOCABULARY, SAMPLES, TOKENS = 61, 5, 9


def llama(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def tied_llama() -> nn.Module:
    return llama(tied=True)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=1)
    )


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, decoder_start_token_id=0, feed_forward_proj="relu"
    )
    return T5ForConditionalGeneration(config)


class MLP(nn.Module):
    """A category and numbers to a class; the norms, a loose parameter and a module of no known kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.category = nn.Embedding(7, 6, padding_idx=0)
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.convolution = nn.Conv1d(1, 3, 3)
        self.rms = nn.RMSNorm(12, eps=1e-5)
        self.scale = Scale(12)
        self.last = nn.Linear(12, 3)

    def forward(self, category: Tensor, x: Tensor) -> Tensor:
        hidden = F.gelu(self.norm(self.first(x)).add_(self.category(category)))  # written in place
        hidden = self.convolution(hidden.unsqueeze(1)).flatten(1)
        return self.last(self.scale(self.rms(hidden)))

    def compute_sample_losses(self, batch: Any) -> Tensor:
        category, x, y = batch
        return F.cross_entropy(self(category, x), y, reduction="none")

    def compute_embeddings(self, batch: Any) -> Tensor:
        return self.first(batch[1])


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.randn(size) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.log_scale.exp()


class Lit(pl.LightningModule):
    """An ordinary LightningModule around a Hugging Face model."""

    def __init__(self, model: nn.Module, learning_rate: float = 1e-2, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        self.model, self.learning_rate, self.optimizer_class = model, learning_rate, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_class(self.parameters(), lr=self.learning_rate)


def text_batch(samples: int = SAMPLES, tokens: int = TOKENS, classes: int = 0) -> dict[str, Tensor]:
    """Token ids of different lengths, padded on the right; labels are the ids, or one class per sample."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (samples, tokens), generator=generator)
    lengths = torch.tensor([max(3, tokens - 2 * i) for i in range(samples)])
    mask = (torch.arange(tokens) < lengths.view(-1, 1)).long()
    labels = torch.randint(classes, (samples,), generator=generator) if classes else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def rows_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{k: v[i] for k, v in batch.items()} for i in range(len(batch["input_ids"]))]


def mlp_batch(samples: int = SAMPLES) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    category = torch.randint(7, (samples,), generator=generator)
    category[0] = 0  # the padding index
    return category, torch.randn(samples, 4, generator=generator), torch.randint(3, (samples,), generator=generator)


def one_by_one(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return [{k: v[i : i + 1] for k, v in batch.items()} for i in range(len(batch["input_ids"]))]
    if isinstance(batch, Tensor):
        return list(batch.split(1))
    return [tuple(t[i : i + 1] for t in batch) for i in range(len(batch[0]))]


def loop_gradients(
    module: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor] = compute_sample_losses
) -> list[dict[str, Tensor]]:
    """The gradient of each sample's loss, whole, from batches of one."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    found = []
    for sample in one_by_one(batch):
        gradients = torch.autograd.grad(loss(module, sample).sum(), list(named.values()), allow_unused=True)
        found.append({n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), gradients, strict=True)})
    for submodule, mode in modes:
        submodule.training = mode
    return found


def project(gradients: dict[str, Tensor], settings: GradientSettings) -> Tensor:
    """The features of one whole gradient by whole sign matrices, from the definition."""
    k_r, k_c = settings.make_projection().sides
    features = torch.zeros(settings.width, dtype=next(iter(gradients.values())).dtype)
    for name, gradient in gradients.items():
        matrix = gradient.reshape(gradient.shape[0], -1)
        if settings.projection == "dense" or matrix.shape[1] == 1:
            signs = rademacher(key_of(settings.seed, name, "dense"), torch.arange(matrix.numel()), settings.width, matrix.dtype)
            features += matrix.flatten() @ signs / settings.width**0.5
        else:
            left = rademacher(key_of(settings.seed, name, "rows"), torch.arange(matrix.shape[0]), k_r, matrix.dtype)
            right = rademacher(key_of(settings.seed, name, "columns"), torch.arange(matrix.shape[1]), k_c, matrix.dtype)
            features += (left.T @ matrix @ right).flatten() / settings.width**0.5
    return features


def loop_features(module: nn.Module, batch: Any, settings: GradientSettings) -> Tensor:
    return torch.stack([project(g, settings) for g in loop_gradients(module, batch)])
