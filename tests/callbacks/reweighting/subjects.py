"""A policy whose weights are given, and modules that tell of their losses in each way."""

import torch
import torch.nn.functional as F

from lightning_megatrain.callbacks import ReweightingPolicy
from tests.callbacks.modules import Llama


class Fixed(ReweightingPolicy):
    """Weights by the sample's index."""

    def __init__(self, table, **policy):
        super().__init__(**policy)
        self.table = torch.tensor(table)

    def weigh(self, losses, batch):
        return self.table[self.loader.last.index]


class PerSample(Llama):
    """Returns sums of token losses with their graph."""

    def training_step(self, batch, batch_idx):
        logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100).view(labels.shape)
        tokens = (labels != -100).sum(1)
        return {"loss": losses.sum() / tokens.sum(), "sample_losses": losses.sum(1), "sample_tokens": tokens}


class Logits(Llama):
    """Returns a scalar loss and logits, of a model that is not found by itself."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.parts = torch.nn.ModuleList([torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)])
        del self.model

    def training_step(self, batch, batch_idx):
        logits = self.parts[1](self.parts[0](batch["input_ids"]))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}
