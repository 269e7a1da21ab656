"""Blocks of plain torch in a row: what most parity models of plain torch are made of."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, mse_loss

from tests.parity.subject import Batch, Subject, numbers

WIDTH = 16
STACK = numbers(2, 5, WIDTH)  # x, y: (2, 5, WIDTH)


class Block(nn.Module):
    """x: (..., WIDTH) -> (..., WIDTH)."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return x + dropout(self.down(gelu(self.up(self.norm(x)))), self.rate, self.training)


class Stack(nn.Module):
    """Blocks of one kind in a row, between two linear layers. Subclasses run them in their own way."""

    def __init__(self, block: Callable[[], nn.Module] = Block, number: int = 3) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(number)])

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.leave(self.run(self.enter(x))), y)


def loss_of(module: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = module(**batch)
    return loss


def stack(
    kind: type[Stack] = Stack,
    block: Callable[[], nn.Module] = Block,
    batch: Callable[[int], Batch] = STACK,
    number: int = 3,
    streamed: str = "",
) -> Subject:
    return Subject(lambda: kind(block, number), loss_of, batch, streamed=(streamed or getattr(block, "__name__", "Block"),))


class Dropping(Block):
    def __init__(self) -> None:
        super().__init__(rate=0.3)


def growing(index: int) -> Batch:
    return numbers(1 + index % 2, 3 + index, WIDTH)(index)
