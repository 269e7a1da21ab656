"""Layers of every kind: attention, recurrent, convolutional, flat, and with normalized weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from tests.parity.stacks import WIDTH, Block, Stack
from tests.parity.subject import Batch

# --- attention ---


class Encoder(nn.Module):
    """`nn.TransformerEncoder` with a padding mask; dropout on."""

    def __init__(self, training: bool = True, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, 0.1, batch_first=True, norm_first=norm_first, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 3, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.encoder_training = training

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.encoder.train(self.encoder_training)
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        padding[1, 3:] = True
        return mse_loss(self.leave(self.encoder(x, src_key_padding_mask=padding)), y)


class EncoderDecoder(nn.Module):
    """`nn.Transformer`: the encoder's output feeds every decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 24, 0.1, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = self.transformer.generate_square_subsequent_mask(y.shape[1], device=y.device)
        return mse_loss(self.transformer(x, y, tgt_mask=mask), y)


# --- recurrent, convolutional, flat ---


class Perceptron(nn.Module):
    """Like blocks in a `Sequential`, activations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 24),
            nn.Tanh(),
            nn.Linear(24, WIDTH),
            nn.Dropout(0.1),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.net(x), y)


class SingleOperationsLSTM(nn.LSTM):
    """The CPU would take one kernel of oneDNN, which computes something else on each kind of processor."""

    def forward(self, *args: Any) -> Any:
        with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
            return super().forward(*args)


class Recurrent(Stack):
    """A list of LSTMs, each of which also returns its state."""

    def __init__(self, block: Callable[..., nn.Module], number: int) -> None:
        super().__init__(lambda: block(WIDTH, WIDTH, batch_first=True), number)

    def run(self, x: Tensor) -> Tensor:
        state = None
        for block in self.blocks:
            x, state = block(x, state)
        assert state is not None
        return x + state[1][-1].unsqueeze(1)


class Convolutions(nn.Module):
    """Convolutions with batch normalization. x: (B, 3, 8, 8), y: (B,)."""

    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(3)]
        )
        self.head = nn.Linear(8, 4)
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.to(memory_format=self.format)  # type: ignore[call-overload]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = self.body(self.stem(x.contiguous(memory_format=self.format)))
        return cross_entropy(self.head(features.mean((2, 3))), y)


def images(index: int) -> Batch:
    torch.manual_seed(100 + index)
    return {"x": torch.randn(4, 3, 8, 8), "y": torch.randint(0, 4, (4,))}


# --- normalized weights ---


def inside(normalize: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    """A block whose inner linear layers are normalized."""

    def block() -> nn.Module:
        made = Block()
        made.up, made.down = normalize(made.up), normalize(made.down)  # type: ignore[assignment]
        return made

    return block


def itself(normalize: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    """A block that is itself a normalized linear layer: the hook stands on the streamed layer."""
    return lambda: normalize(nn.Linear(WIDTH, WIDTH))
