"""Layers with every habit that a layer of a user's own may have: how it is called, what it returns, and what of it learns."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss

from tests.parity.stacks import WIDTH, Block, Stack

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
        return self.sometimes(x) if x.shape[1] == 4 else x  # in the second batch only


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
