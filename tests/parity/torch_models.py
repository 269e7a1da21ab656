"""Plain torch modules with every habit that a layer of a user's own may have."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gelu, mse_loss
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

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


def _loss(module: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = module(**batch)
    return loss


def _stack(
    kind: type[Stack] = Stack,
    block: Callable[[], nn.Module] = Block,
    batch: Callable[[int], Batch] = STACK,
    number: int = 3,
    streamed: str = "",
) -> Subject:
    return Subject(lambda: kind(block, number), _loss, batch, streamed=(streamed or getattr(block, "__name__", "Block"),))


class Dropping(Block):
    def __init__(self) -> None:
        super().__init__(rate=0.3)


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


class Recurrent(Stack):
    """A list of LSTMs, each of which also returns its state."""

    def __init__(self, block: Callable[[], nn.Module], number: int) -> None:
        super().__init__(lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), number)

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


def _images(index: int) -> Batch:
    torch.manual_seed(100 + index)
    return {"x": torch.randn(4, 3, 8, 8), "y": torch.randint(0, 4, (4,))}


# --- normalized weights ---


def _inside(normalize: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    """A block whose inner linear layers are normalized."""

    def block() -> nn.Module:
        made = Block()
        made.up, made.down = normalize(made.up), normalize(made.down)  # type: ignore[assignment]
        return made

    return block


def _itself(normalize: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    """A block that is itself a normalized linear layer: the hook stands on the streamed layer."""
    return lambda: normalize(nn.Linear(WIDTH, WIDTH))


# --- blocks used otherwise than once each, in order ---


class Twice(Stack):
    """Every block runs twice in a row."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


class OneManyTimes(Stack):
    """The first block runs again and again, as in ALBERT; the second ends."""

    def run(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.blocks[0](x)
        return self.blocks[1](x)


class SameTwice(nn.Module):
    """The same module stands at two places of a list."""

    def __init__(self) -> None:
        super().__init__()
        a, b = Block(), Block()
        self.blocks = nn.ModuleList([a, b, a])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mse_loss(x, y)


class StochasticDepth(Stack):
    """Each block is skipped with probability one half, another draw in every step."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) < 0.5:
                x = block(x)
        return x


class AnyOrder(Stack):
    """The blocks run in a new order every time."""

    def run(self, x: Tensor) -> Tensor:
        for index in torch.randperm(len(self.blocks)).tolist():
            x = self.blocks[index](x)
        return x


# --- what goes in and what comes out ---


class GivesTuple(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:  # type: ignore[override]
        inner = self.up(self.norm(x))
        return x + self.down(gelu(inner)), None, inner.square().mean()


class TakesTuples(Stack):
    """Blocks return (output, None, penalty)."""

    def run(self, x: Tensor) -> Tensor:
        penalty = x.new_zeros(())
        for block in self.blocks:
            x, nothing, one = block(x)
            assert nothing is None
            penalty = penalty + one
        return x + penalty


class GivesMapping(Block):
    def forward(self, *, state: dict[str, Tensor], scale: float, mask: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        hidden = state["hidden"] * scale
        if mask is not None:
            hidden = hidden * mask
        return {"hidden": super().forward(hidden), "step": state["step"] + 1}


class TakesMappings(Stack):
    """Blocks are called with keyword arguments and return a mapping."""

    def run(self, x: Tensor) -> Tensor:
        state = {"hidden": x, "step": torch.zeros((), device=x.device)}
        mask = (x.detach() > -1).float()
        for index, block in enumerate(self.blocks):
            state = block(state=state, scale=0.5 + index, mask=mask if index else None)
        return state["hidden"] + state["step"]


class WritesInto(Stack):
    """What a block returned is changed in place."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1
            x[..., 0] = 0
            x.relu_()
        return x


class GivesItsInput(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x, super().forward(x)


class TakesInputs(Stack):
    """Blocks return their own input beside their output."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            before, x = block(x)
            x = x + before
        return x


class PassesThrough(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] % 2 else x


class GivesViews(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(x).chunk(2, -1)


class TakesViews(Stack):
    """Blocks return views of one tensor."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            a, b = block(x)
            x = torch.cat([b, a], -1)
        return x


class UsesOneOutput(Stack):
    """Of two outputs that require grad only one reaches the loss."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)[1]
        return x


def _growing(index: int) -> Batch:
    return numbers(1 + index % 2, 3 + index, WIDTH)(index)


# --- what learns and what does not ---


class Frozen(Stack):
    """The first blocks and one bias of the last do not learn."""

    def __init__(self, block: Callable[[], nn.Module], number: int) -> None:
        super().__init__(block, number)
        self.enter.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        last = self.blocks[2]
        assert isinstance(last, Block)
        last.up.bias.requires_grad_(False)


class LowRank(nn.Module):
    """An adapter by hand: a frozen linear layer and a product of two thin ones that learn."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, 2) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Adapted(Stack):
    """Only the adapters learn."""

    def __init__(self, block: Callable[[], nn.Module], number: int) -> None:
        super().__init__(block, number)
        self.requires_grad_(False)
        for one in self.blocks:
            assert isinstance(one, Block)
            one.up, one.down = LowRank(one.up), LowRank(one.down)  # type: ignore[assignment]


class Tied(Stack):
    """The first and last block share a weight; so do the two outer layers."""

    def __init__(self, block: Callable[[], nn.Module], number: int) -> None:
        super().__init__(block, number)
        first, last = self.blocks[0], self.blocks[-1]
        assert isinstance(first, Block)
        assert isinstance(last, Block)
        last.up.weight = first.up.weight
        self.leave.weight = self.enter.weight


class HasUnused(Block):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(3))
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return self.sometimes(x) if x.shape[1] > 4 else x


class SeveralLosses(Stack):
    """Each block's output has a loss of its own."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.enter(x)
        losses = []
        for block in self.blocks:
            x = block(x)
            losses.append(mse_loss(self.leave(x), y))
        return torch.stack(losses).sum()


class Hooked(Stack):
    """Gradients of some parameters pass through hooks."""

    def __init__(self, block: Callable[[], nn.Module], number: int) -> None:
        super().__init__(block, number)
        for index, (_, parameter) in enumerate(self.named_parameters()):
            if index % 3 == 0:
                parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            if index % 3 == 1:
                parameter.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class ModuleHooks(Stack):
    """Hooks on the blocks change what goes in, what comes out, and the gradient on its way back."""

    def __init__(self, block: Callable[[], nn.Module], number: int) -> None:
        super().__init__(block, number)
        for one in self.blocks:
            assert isinstance(one, Block)
            one.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
            one.register_forward_hook(lambda module, args, output: output + 0.1)
            one.register_full_backward_hook(lambda module, before, after: tuple(None if g is None else g * 0.5 for g in before))
            one.up.register_forward_hook(lambda module, args, output: output.tanh())


class OddWeights(Block):
    """Weights that are views of larger ones, transposed, or scalars; a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight = nn.Parameter(torch.randn(WIDTH, 24).T / 4)
        self.down.weight = nn.Parameter((torch.randn(WIDTH, 48) / 4)[:, ::2])
        self.scale = nn.Parameter(torch.ones(()))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.scale + self.calls / 100


MODELS: dict[str, Subject] = {
    "encoder": Subject(Encoder, _loss, STACK, streamed=("TransformerEncoderLayer",)),
    "encoder_norm_first": Subject(lambda: Encoder(norm_first=True), _loss, STACK, streamed=("TransformerEncoderLayer",)),
    "encoder_eval": Subject(lambda: Encoder(training=False), _loss, STACK, streamed=("TransformerEncoderLayer",)),
    "encoder_decoder": Subject(EncoderDecoder, _loss, STACK, streamed=("TransformerEncoderLayer", "TransformerDecoderLayer")),
    "mlp": Subject(Perceptron, _loss, STACK, streamed=("Linear",)),
    "lstm": _stack(Recurrent, streamed="LSTM"),
    "dropout": _stack(block=Dropping),
    "convolutions": Subject(Convolutions, _loss, _images, streamed=("Sequential",)),
    "channels_last": Subject(lambda: Convolutions(channels_last=True), _loss, _images, streamed=("Sequential",)),
    "spectral_norm_inside": _stack(block=_inside(parametrizations.spectral_norm), streamed="Block"),
    "spectral_norm_itself": _stack(block=_itself(parametrizations.spectral_norm), streamed="ParametrizedLinear"),
    "spectral_norm_hook_inside": _stack(block=_inside(spectral_norm), streamed="Block"),
    "weight_norm_inside": _stack(block=_inside(parametrizations.weight_norm), streamed="Block"),
    "weight_norm_itself": _stack(block=_itself(parametrizations.weight_norm), streamed="ParametrizedLinear"),
    "weight_norm_hook_inside": _stack(block=_inside(weight_norm), streamed="Block"),
    "twice": _stack(Twice),
    "one_many_times": _stack(OneManyTimes, number=2),
    "same_twice": Subject(SameTwice, _loss, STACK),
    "stochastic_depth": _stack(StochasticDepth, number=4),
    "any_order": _stack(AnyOrder, number=4),
    "tuples": _stack(TakesTuples, GivesTuple),
    "mappings": _stack(TakesMappings, GivesMapping),
    "in_place": _stack(WritesInto),
    "input_returned": _stack(TakesInputs, GivesItsInput),
    "passed_through": _stack(block=PassesThrough, batch=_growing),
    "views": _stack(TakesViews, GivesViews),
    "one_output_used": _stack(UsesOneOutput, GivesItsInput),
    "growing": _stack(batch=_growing),
    "frozen": _stack(Frozen),
    "adapted": _stack(Adapted),
    "tied": _stack(Tied),
    "unused": _stack(block=HasUnused, batch=_growing),
    "several_losses": _stack(SeveralLosses),
    "parameter_hooks": _stack(Hooked),
    "module_hooks": _stack(ModuleHooks),
    "odd_weights": _stack(block=OddWeights),
}
