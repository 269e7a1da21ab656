"""Small modules and data that the tests of policies train."""

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from tests.trainers import quiet_trainer


def tiny_llama(seed=0, **config):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "max_position_embeddings": 32, **config}))


class Llama(L.LightningModule):
    """Returns a scalar loss, as most modules do."""

    def __init__(self, lr=1e-2, seed=0, optimizer=torch.optim.AdamW, **config):
        super().__init__()
        self.model = tiny_llama(seed, **config)
        self.lr, self.optimizer = lr, optimizer
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss)

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=self.lr)


class Linear(L.LightningModule):
    """Returns the loss of each sample; `seen` are the samples it was trained on."""

    def __init__(self, lr=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)
        self.lr = lr
        self.seen, self.losses = [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append([round(v) for v in x[:, 0].tolist()])
        losses = F.cross_entropy(self.layer(x), y, reduction="none")
        self.losses.append(losses.mean().item())
        return {"loss": losses.mean(), "sample_losses": losses}

    def compute_sample_losses(self, batch):
        x, y = batch
        return F.cross_entropy(self.layer(x), y, reduction="none")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Points(Dataset):
    """Sample i is ((i, sin i, cos i), i % 2); its domain is i % 3."""

    def __init__(self, n=24):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        i = int(i)
        return torch.tensor([float(i), torch.tensor(float(i)).sin(), torch.tensor(float(i)).cos()]), i % 2


def third(sample):
    return "abc"[round(float(sample[0][0])) % 3]


def points(n=24, batch_size=4, **kwargs):
    return DataLoader(Points(n), batch_size, **{"shuffle": True, **kwargs})


class Sentences(Dataset):
    """Rows of 8 tokens from 0..31, some without a label; `source` is the domain."""

    def __init__(self, n=16, seed=0, low=0, high=32):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(low, high, (n, 8), generator=generator)
        self.lengths = torch.randint(3, 9, (n,), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = self.ids[i].clone()
        labels[int(self.lengths[i]) :] = -100
        return {"input_ids": self.ids[i], "labels": labels, "source": "xy"[int(i) % 2]}


def sentences(n=16, batch_size=4, **kwargs):
    return DataLoader(Sentences(n), batch_size, **{"shuffle": True, **kwargs})


def fit(module, loader, callbacks=(), *, val=None, ckpt_path=None, **trainer):
    trainer = quiet_trainer(**{"accelerator": "cpu", "max_epochs": 1, "callbacks": list(callbacks), **trainer})
    torch.manual_seed(1)
    if isinstance(loader, L.LightningDataModule):
        trainer.fit(module, datamodule=loader, ckpt_path=ckpt_path)
    else:
        trainer.fit(module, loader, val, ckpt_path=ckpt_path)
    return trainer


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])
