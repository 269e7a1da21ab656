"""What goes into a layer and comes out of it: trees, objects, and arguments that are one object."""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_megatrain.engine import Engine
from tests.emulated import emulated_device
from tests.engine.models import Tower, loss_of, tokens


@dataclasses.dataclass
class State:
    hidden: Tensor
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Tensor


@dataclasses.dataclass
class Slotted:
    __slots__ = ("hidden",)
    hidden: Tensor


class Plain:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Layer(nn.Module):
    """A linear layer that takes and gives its hidden state as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(6, 6), kind

    def forward(self, given: Any, *others: Any) -> Any:
        make: dict[str, Callable[[Tensor], Any]] = {
            "dataclass": lambda h: dataclasses.replace(given, hidden=h),
            "frozen": Frozen,
            "slotted": Slotted,
            "object": Plain,
            "nested": lambda h: {"state": [State(h)]},
            "mapping": lambda h: UserDict(hidden=h),
        }
        if self.kind == "changed object":
            given.hidden = torch.tanh(self.linear(given.hidden))
            return None
        if self.kind == "one tensor twice":
            hidden, again = given, others[0]
            return torch.tanh(self.linear(hidden)) * again if hidden is again else hidden
        return make[self.kind](torch.tanh(self.linear(hidden_of(given))))


def hidden_of(given: Any) -> Tensor:
    if isinstance(given, dict):
        given = given["state"][0]
    hidden: Tensor = given["hidden"] if isinstance(given, UserDict) else given.hidden
    return hidden


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList([Layer(kind) for _ in range(3)]), kind

    def forward(self, hidden: Tensor) -> Tensor:
        start: dict[str, Callable[[Tensor], Any]] = {
            "frozen": Frozen,
            "slotted": Slotted,
            "nested": lambda h: {"state": [State(h)]},
            "mapping": lambda h: UserDict(hidden=h),
            "changed object": Plain,
            "object": Plain,
        }
        if self.kind == "one tensor twice":
            for layer in self.layers:
                hidden = layer(hidden, hidden)
            return hidden
        state: Any = start.get(self.kind, State)(hidden)
        for layer in self.layers:
            returned = layer(state)
            state = state if returned is None else returned
        return hidden_of(state)


def gradients(kind: str, device: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model(kind)
    inputs = torch.randn(2, 6)
    if device is None:
        model(inputs).square().sum().backward()
    else:
        with Engine(model, device):
            model(inputs.to(device)).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("kind", ["dataclass", "frozen", "slotted", "object", "nested", "mapping", "changed object", "one tensor twice"])
def test_tensors_in_objects_are_seen(kind: str, device: str) -> None:
    expected = gradients(kind, None)
    assert len(expected) == 6
    with emulated_device("random:3"):
        found = gradients(kind, device)
    assert len(found) == 6
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class Context(nn.Module):
    """Puts a tensor into a context that was given to it empty, for the layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden: Tensor, context: Any) -> Tensor:
        store = context if isinstance(context, dict | UserDict) else vars(context)
        hidden = torch.tanh(self.linear(hidden)) * (1 if store.get("last") is None else store["last"])
        store["last"] = hidden
        return hidden


@dataclasses.dataclass
class Empty:
    last: Tensor | None = None


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("kind", [dict, UserDict, Empty])
def test_an_empty_container_that_layers_fill(kind: Callable[[], Any], device: str) -> None:
    found = []
    for streamed in (False, True):
        with emulated_device():
            torch.manual_seed(0)
            layers = nn.ModuleList([Context() for _ in range(3)])
            engine = Engine(layers, device) if streamed else None
            hidden, context = torch.randn(2, 6).to(device if streamed else "cpu"), kind()
            for layer in layers:
                hidden = layer(hidden, context)
            hidden.sum().backward()
            found.append([p.grad for p in layers.parameters()])
            if engine is not None:
                engine.close()
    for a, b in zip(*found, strict=True):  # the context's tensor feeds two layers: its two gradients are summed in another order
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


class Hides(nn.Module):
    """Lets its result out in an object within an object, where it is not looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden: Tensor) -> Any:
        outer = Plain(hidden)
        outer.hidden = Plain(self.linear(hidden))  # type: ignore[assignment]
        return outer


def test_a_tensor_that_leaves_unseen_is_refused_by_name() -> None:
    layers = nn.ModuleList([Hides(), Hides()])
    with Engine(layers):
        output = layers[0](torch.randn(2, 6, requires_grad=True)).hidden.hidden
        with pytest.raises(RuntimeError, match=r"streamed layer '0'.*hidden in an object.*resident=\['0'\]"):
            output.sum().backward()


def test_a_lazy_module_without_a_shape_is_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"'0\.weight' of a lazy module has no shape yet.*Run the module once"):
        Engine(model)


class Clamping(Tower):
    def __init__(self, through_data: bool) -> None:
        super().__init__(layers=2)
        for block in self.blocks:
            block.register_forward_pre_hook(lambda module, args: None)
            block.clamp = through_data
            block.forward = self.clamped(block)  # type: ignore[method-assign]

    @staticmethod
    def clamped(block: nn.Module) -> Callable[[Tensor], Tensor]:
        plain = type(block).forward

        def forward(hidden: Tensor) -> Tensor:
            if block.clamp:
                block.up.weight.data.clamp_(-0.1, 0.1)
            else:
                with torch.no_grad():
                    block.up.weight.clamp_(-0.1, 0.1)
            return plain(block, hidden)

        return forward


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("through_data", [True, False])
def test_a_layer_that_writes_its_own_weights_is_refused_by_name(device: str, through_data: bool) -> None:
    with emulated_device():
        model = Clamping(through_data)
        with Engine(model, device), pytest.raises(RuntimeError, match=r"'blocks\.0' wrote one of its own parameters in its forward"):
            loss_of(model, tokens(device=device))


def test_parameters_replaced_during_training() -> None:
    """Pruning puts other tensors where the parameters were: right on the host, refused by name on a device."""
    plain = Tower(layers=2)
    streamed = Tower(layers=2)
    streamed.load_state_dict(plain.state_dict())
    for model in (plain, streamed):
        engine = Engine(model) if model is streamed else None
        for block in model.blocks:
            prune.l1_unstructured(block.up, "weight", amount=0.5)
        loss_of(model, tokens()).backward()
        if engine is not None:
            engine.close()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), streamed.parameters(), strict=True))
    with emulated_device():
        model = Tower(layers=2)
        with Engine(model, "emu"):
            prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.5)
            with pytest.raises(RuntimeError, match=r"'blocks\.0' no longer holds the parameters.*weight"):
                loss_of(model, tokens(device="emu"))


class Graph(nn.Module):
    """Multiplies by a sparse adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden: Tensor, adjacency: Tensor) -> Tensor:
        return torch.relu(torch.sparse.mm(adjacency, self.linear(hidden)))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_argument(layout: torch.layout) -> None:
    adjacency = torch.eye(4).roll(1, 0).to_sparse(layout=layout)
    found = []
    for streamed in (False, True):
        torch.manual_seed(0)
        layers = nn.ModuleList([Graph() for _ in range(3)])
        engine = Engine(layers) if streamed else None
        hidden = torch.randn(4, 6)
        for layer in layers:
            hidden = layer(hidden, adjacency)
        hidden.square().sum().backward()
        found.append([p.grad for p in layers.parameters()])
        if engine is not None:
            engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_copy_made_while_the_engine_is_installed_can_be_saved_and_loaded(tmp_path: Path) -> None:
    model = Tower(layers=2)
    with Engine(model):
        loss_of(model, tokens()).backward()
        torch.save(copy.deepcopy(model), tmp_path / "copy.pt")
        torch.save(model, tmp_path / "model.pt")
    for name in ("copy.pt", "model.pt"):
        loaded = torch.load(tmp_path / name, weights_only=False)
        assert torch.equal(loaded(tokens()), model(tokens()))
