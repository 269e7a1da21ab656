"""What cannot be right with streamed layers is refused by the layer's name, before any number is wrong."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from lightning_megatrain.engine import Engine
from tests.parity.stacks import WIDTH, Block, Stack


def _refused(module: nn.Module, message: str) -> None:
    x = torch.randn(2, 5, WIDTH)
    module(x, x).backward()  # plain torch allows it
    with Engine(module), pytest.raises(RuntimeError, match=message):
        module(x, x).backward()
    module(x, x).backward()  # and still does, once the engine has left


class _LooksBehind(Block):
    """Finds what the block before it left in an object that both hold, and leaves its own result there."""

    def __init__(self, shared: list[Tensor]) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.shared:
            out = out + self.shared.pop()
        self.shared.append(out)
        return out


class _ThroughAnObject(Stack):
    def __init__(self) -> None:
        shared: list[Tensor] = []
        super().__init__(lambda: _LooksBehind(shared))
        self.shared = shared

    def run(self, x: Tensor) -> Tensor:
        self.shared.clear()
        return super().run(x)


def test_layers_that_pass_tensors_through_an_object_of_their_own() -> None:
    _refused(
        _ThroughAnObject(),
        r"Streamed layer 'blocks.1' used a tensor that requires grad but is neither one of its arguments .* resident=\['blocks.1'\]",
    )


class _WritesItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(2)
        return super().forward(x)


def test_a_layer_that_writes_its_input() -> None:
    _refused(Stack(_WritesItsInput), r"Streamed layer 'blocks.0' changed an input tensor in place.* resident=\['blocks.0'\]")


class _TakesFromAList(Block):
    def forward(self, x: list[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(x.pop())


class _GivesLists(Stack):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block([x])
        return x


def test_a_layer_that_takes_something_out_of_its_argument() -> None:
    _refused(_GivesLists(_TakesFromAList), r"Streamed layer 'blocks.0' took something out of, or changed inside, a container .* argument 0")


def test_a_hook_on_the_layer_itself_that_computes_its_weight() -> None:
    _refused(
        Stack(lambda: spectral_norm(nn.Linear(WIDTH, WIDTH))),
        r"Streamed layer 'blocks.0' used a tensor that requires grad .*the result of DivBackward0",
    )


class _Forgets(Block):
    """Its second run gives a tensor of another shape than its first."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(x) if self.runs % 2 else super().forward(x)[:, :1]


def test_a_layer_whose_second_run_differs_from_its_first() -> None:
    module = Stack(_Forgets)
    x = torch.randn(2, 5, WIDTH)
    with (
        Engine(module),
        pytest.raises(RuntimeError, match=r"Streamed layer 'blocks.2' returned .* when backward ran it again, but .* in forward"),
    ):
        module(x, x).backward()


def test_keys_and_values_of_an_earlier_forward() -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4))
    ids = torch.randint(3, 64, (1, 6))
    with torch.no_grad():
        cache = model(ids, cache=DynamicCache(config=model.config), use_cache=True).past_key_values
    with (
        Engine(model),
        pytest.raises(ValueError, match=r"Layer 'model.layers.0' was given a DynamicCache that already holds keys and values"),
    ):
        model(ids, cache=cache, labels=ids)
