"""A layer that backward runs again must do what it did; where it does not, that is said by name."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatrain.engine import Engine
from tests.emulated import emulated_device


class OwnGenerator(nn.Module):
    """Draws from a generator that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(4, 4), torch.Generator().manual_seed(3)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden) * torch.rand(4, generator=self.generator).to(hidden.device)


class Counter(nn.Module):
    """Keeps a counter that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(hidden) * self.calls


class Reentrant(nn.Module):
    """Checkpoints inside, in the old way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.linear, hidden, use_reentrant=True)
        return output


def layers_of(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind())


def backward(model: nn.Module, device: str = "cpu") -> list[Tensor]:
    for _ in range(2):
        model(torch.ones(2, 4, device=device, requires_grad=True)).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_a_generator_that_a_layer_keeps_is_restored(device: str) -> None:
    expected = backward(layers_of(OwnGenerator))
    with emulated_device():
        model = layers_of(OwnGenerator)
        with Engine(model, device):
            found = backward(model, device)
    assert len(found) == 4
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_on_the_host_a_layer_that_returns_something_else_is_refused() -> None:
    model = layers_of(Counter)
    with (
        Engine(model),
        pytest.raises(RuntimeError, match=r"'1' returned other values when backward ran it again.*a counter it keeps.*resident=\['1'\]"),
    ):
        backward(model)


def test_on_a_device_whose_kernels_need_not_repeat_it_is_a_warning() -> None:
    with emulated_device():
        model = layers_of(Counter)
        with Engine(model, "emu"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            backward(model, "emu")
    assert len([w for w in caught if "returned other values when backward ran it again" in str(w.message)]) == 2  # once a layer


def test_the_old_checkpoint_inside_a_layer_is_refused_by_name() -> None:
    model = layers_of(Reentrant)
    with Engine(model), pytest.raises(RuntimeError, match=r"layer '1' uses torch\.utils\.checkpoint.*use_reentrant=False"):
        backward(model)


def test_function_transforms_are_refused_by_name() -> None:
    model = layers_of(lambda: nn.Linear(4, 4))
    with Engine(model), pytest.raises(RuntimeError, match=r"layer '0' was called under a torch\.func transform"):
        torch.func.vmap(model)(torch.ones(3, 4))


class Conditioned(nn.Module):
    """Reads a tensor that is put on it before the forward and taken off after."""

    condition: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden) + self.condition


@pytest.mark.parametrize(("after", "words"), [(None, "failed when backward ran it again"), (torch.zeros(4), "returned other values")])
def test_what_a_layer_reads_must_stay_until_backward(after: Tensor | None, words: str) -> None:
    model = layers_of(Conditioned)
    with Engine(model):
        for layer in model:
            layer.condition = torch.ones(4)
        loss = model(torch.ones(2, 4)).sum()
        for layer in model:
            layer.condition = after
        with pytest.raises(RuntimeError, match=rf"'1' {words}.*resident=\['1'\]"):
            loss.backward()
