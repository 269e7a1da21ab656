"""Small modules that several engine tests train."""

import torch
from torch import Tensor, nn

WIDTH = 16
INPUT = 2 * 5 * WIDTH * 4  # bytes of the hidden state that a block of `Tower` is given for `tokens()`


class Block(nn.Module):
    """A residual block of one width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Tower(nn.Module):
    """An embedding, like blocks, and a head."""

    def __init__(self, layers: int = 4, width: int = WIDTH, vocabulary: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def tokens(seed: int = 0, device: str = "cpu", vocabulary: int = 12) -> Tensor:
    return torch.randint(vocabulary, (2, 5), generator=torch.Generator().manual_seed(seed)).to(device)
