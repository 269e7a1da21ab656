"""Modules and data that the check command is pointed at."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Even(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Counting(Even):
    """Keeps a counter that only its gradient depends on: running it once more in backward changes that, and no output tells."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        output = super().forward(hidden)
        scaled = output * self.calls
        return output + (scaled - scaled.detach())


class PassAware(Even):
    """Returns something else in a streamed forward than in a plain one."""

    def forward(self, hidden: Tensor) -> Tensor:
        from lightning_megatrain.engine.passes import current_pass

        return super().forward(hidden) * (1 if current_pass() is None else 2)


BLOCKS: dict[str, type[Even]] = {"even": Even, "counting": Counting, "pass aware": PassAware}


class Regression(L.LightningModule):
    """Blocks of one kind, two of another among them."""

    def __init__(self, odd_block: str = "even") -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Even(), BLOCKS[odd_block](), BLOCKS[odd_block](), Even()])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        hidden = batch[0]
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.mse_loss(hidden, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Points(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:  # type: ignore[type-arg]
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 4, generator=generator))
        return DataLoader(data, batch_size=4, shuffle=True)
