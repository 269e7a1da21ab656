"""A small language model, its data, and the LightningModule around it that the strategy's tests train.

Shapes: B samples, T tokens, V words, D width.
"""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

V, D, T = 11, 8, 4


class Block(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 2 * D)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(2 * D, D)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD + self.down(self.dropout(torch.relu(self.up(self.norm(hidden_BTD)))))


class Net(nn.Module):
    """Resident embedding, norm and head around three streamed blocks."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
        return self.head(self.norm(hidden_BTD))  # (B, T, V)


class Subject(L.LightningModule):
    """Trains `Net` with AdamW; the subclass in a test changes what the test is about."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = Net()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.net(tokens_BT)

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens_BT, targets_BT = batch
        return cross_entropy(self(tokens_BT).flatten(0, 1), targets_BT.flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr)


def batches(number: int = 3, batch_size: int = 2, shuffle: bool = False) -> DataLoader[Any]:
    """The same data at each call: token ids and targets, each (B, T)."""
    generator = torch.Generator().manual_seed(1)
    tokens_NT = torch.randint(V, (number * batch_size, T), generator=generator)
    targets_NT = torch.randint(V, (number * batch_size, T), generator=generator)
    # by keyword: Lightning cannot make a predict loader anew from a positional batch size, once its patch of DataLoader was left in place
    return DataLoader(TensorDataset(tokens_NT, targets_NT), batch_size=batch_size, shuffle=shuffle)
