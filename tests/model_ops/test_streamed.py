"""Under the megatrain strategy operations give what they give in plain training, bit for bit, and leave training as it was."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_megatrain.engine import Engine
from lightning_megatrain.model_ops import GradientSettings, embed, generate, gradient_features, over_dataset, projection, sample_losses
from tests.emulated import DEVICE, EmulatedAccelerator, emulated_device
from tests.model_ops.subjects import VOCABULARY, Lit, bert, gpt2, llama, loop_features, rows_of, text_batch, tied_llama

SUBJECTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "llama": (llama, text_batch(samples=8)),
    "tied llama": (tied_llama, text_batch(samples=8)),
    "gpt2": (gpt2, text_batch(samples=8)),
    "bert": (bert, text_batch(samples=8, classes=3)),
}
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "losses": sample_losses,
    "embeddings": lambda m, b: embed(m, b, "position_weighted"),
    "features": lambda m, b: gradient_features(m, b, GradientSettings(width=36)),
    "dense features": lambda m, b: gradient_features(m, b, GradientSettings(width=36, projection="dense")),
    "adam features": lambda m, b: gradient_features(m, b, GradientSettings(width=36, preconditioner="adam")),
    "features of one layer": lambda m, b: gradient_features(m, b, GradientSettings(width=36, parameters=("*.1.*",))),
    "over dataset": lambda m, b: over_dataset(sample_losses, m, rows_of(b), batch_size=3, progress=False),
}


class Ask(pl.Callback):
    """Asks everything after the second step."""

    def __init__(self, batch: dict[str, Tensor], also: dict[str, Callable[[Any, Any], Any]]) -> None:
        self.batch, self.operations, self.found = batch, OPERATIONS | also, {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == 2:
            grads = [(p, p.grad, p.grad.clone()) for p in pl_module.parameters() if p.grad is not None]
            assert grads
            self.found = {name: operation(pl_module, self.batch) for name, operation in self.operations.items()}
            assert all(p.grad is grad and torch.equal(grad, value) for p, grad, value in grads)


def train(
    subject: str, strategy: str, ask: bool = True, precision: Any = "32-true", accelerator: Any = "cpu", **also: Any
) -> tuple[Any, list[Tensor]]:
    build, batch = SUBJECTS[subject]
    pl.seed_everything(1, verbose=False)
    callback = Ask(batch, also)
    # The same optimizer kernel on both sides: the strategy would choose the fused one for itself.
    module = Lit(build(), optimizer=FusedAdamW)
    fit(module, batch, strategy, [callback] if ask else [], precision=precision, accelerator=accelerator, max_steps=4)
    return callback.found, [p.detach() for p in module.parameters()]


def fit(module: Lit, batch: dict[str, Tensor], strategy: str, callbacks: list[pl.Callback], **options: Any) -> None:
    trainer = pl.Trainer(
        devices=1,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(module, DataLoader(rows_of(batch), batch_size=2))  # type: ignore[arg-type]


class FusedAdamW(torch.optim.AdamW):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr, fused=True)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_streamed_answers_equal_plain_ones_bit_for_bit(subject: str, precision: str) -> None:
    also = {} if subject == "bert" else {"texts": lambda m, b: generate(m, b, 3, num_samples=2, seed=0)}
    plain, plain_weights = train(subject, "auto", precision=precision, **also)
    streamed, streamed_weights = train(subject, "megatrain", precision=precision, **also)
    assert plain.keys() == streamed.keys() == (OPERATIONS | also).keys()
    for name, expected in plain.items():
        leaves = zip(torch.utils._pytree.tree_leaves(streamed[name]), torch.utils._pytree.tree_leaves(expected), strict=True)
        assert all(torch.equal(found, wanted) for found, wanted in leaves), name
    for found, wanted in zip(streamed_weights, plain_weights, strict=True):
        assert torch.equal(found, wanted)


def test_streamed_training_goes_on_as_if_nobody_had_asked() -> None:
    _, asked = train("llama", "megatrain")
    _, silent = train("llama", "megatrain", ask=False)
    for found, expected in zip(asked, silent, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("policy", ["lazy", "random:1"])
def test_answers_on_an_accelerator_equal_those_of_the_cpu(policy: Any) -> None:
    plain, _ = train("tied llama", "auto")
    with emulated_device(policy):
        streamed, _ = train("tied llama", "megatrain", accelerator=EmulatedAccelerator())
        for name, expected in plain.items():
            # The kernels are the CPU's own; what differs is the order of sums where a tensor is laid out otherwise.
            torch.testing.assert_close(streamed[name].cpu(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()), msg=name)


@pytest.mark.parametrize(
    "settings", [GradientSettings(width=64), GradientSettings(width=64, preconditioner="adam")], ids=["factored", "adam"]
)
def test_device_memory_for_features_does_not_grow_with_the_model(settings: GradientSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers more add their inputs, which backward needs, and none of their weights, gradients or sign matrices."""
    monkeypatch.setattr(projection, "MAX_ELEMENTS", 2**12)  # blocks of 16 KiB, below this model's layers of 160 KiB
    samples, tokens, hidden = 2, 8, 64
    peaks = []
    for layers in (3, 6):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=2
        )
        module, found = Lit(LlamaForCausalLM(config), optimizer=FusedAdamW), []

        class Measure(pl.Callback):
            def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
                if trainer.global_step == 1:
                    DEVICE.reset_counters()
                    gradient_features(pl_module, text_batch(samples, tokens), settings)
                    found.append(DEVICE.peak_bytes)  # noqa: B023

        with emulated_device("lazy"):
            fit(module, text_batch(samples=4), "megatrain", [Measure()], accelerator=EmulatedAccelerator(), max_steps=2)
        peaks += found
    layer = sum(p.nbytes for p in module.model.model.layers[0].parameters())  # type: ignore[union-attr,index,misc]
    saved = samples * tokens * hidden * 4
    assert layer > 100_000
    # Each layer keeps its input; the tap's and the join's copies of it and a cache line each are generous.
    assert peaks[1] - peaks[0] <= 3 * 3 * saved


class Frozen(nn.Module):
    """A frozen stem below streamed layers: no gradient enters them from below."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 8).requires_grad_(False)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(3)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))

    def compute_sample_losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("patterns", [None, ("blocks.0.*",), ("blocks.1.0.weight", "head.*")])
def test_layers_above_a_frozen_stem_are_reached(patterns: Any) -> None:
    module, batch = Frozen(), (torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1]))
    settings = GradientSettings(width=36, parameters=patterns)
    plain = gradient_features(module, batch, settings)
    if patterns is None:
        torch.testing.assert_close(plain, loop_features(module, batch, settings), rtol=1e-5, atol=1e-6)
    with Engine(module, "cpu"):
        assert torch.equal(gradient_features(module, batch, settings), plain)
    assert all(p.grad is None for p in module.parameters())


def test_features_recompute_each_layer_once_and_compute_no_weight_gradient() -> None:
    """No gradient reaches a host parameter, hooks on them stay silent, and a layer runs once in forward and once in backward."""
    module, batch = Frozen(), (torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1]))
    ran, fired = [], []
    for block in module.blocks:
        block[1].register_forward_hook(lambda *_: ran.append(1))  # type: ignore[index]
    for p in module.parameters():
        if p.requires_grad:
            p.register_hook(lambda g: fired.append(g))
    with Engine(module, "cpu"):
        gradient_features(module, batch, GradientSettings(width=36))
        # The first batch of this shape: a layer called with (5, 8) may have other rows than the samples, so one sample is run to see.
        assert len(ran) == 3 * 3
        ran.clear()
        gradient_features(module, batch, GradientSettings(width=36))
    assert len(ran) == 2 * 3
    assert fired == []


def test_a_layer_whose_output_the_loss_ignores_is_reported() -> None:
    class Ignored(Frozen):
        def compute_sample_losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            hidden = self.blocks[0](self.stem(batch[0]))
            self.blocks[1](hidden)
            return hidden.pow(2).sum(1)

    module, batch = Ignored(), (torch.randn(5, 6), torch.zeros(5))
    with Engine(module, "cpu"):
        with pytest.raises(RuntimeError, match=r"`blocks.1.0` among them, ran for their output, but backward never ran them again"):
            gradient_features(module, batch, GradientSettings(width=36, parameters=("blocks.*",)))
        assert gradient_features(module, batch, GradientSettings(width=36, parameters=("blocks.0.*",))).norm() > 0


def test_a_loose_parameter_around_streamed_layers_is_refused() -> None:
    class Loose(Frozen):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(self.stem(x) + self.offset))

    module, batch = Loose(), (torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1]))
    with Engine(module, "cpu"):
        with pytest.raises(NotImplementedError, match=r"`offset` belongs to `` \(Loose\), which holds streamed layers"):
            gradient_features(module, batch, GradientSettings(width=36))
        assert gradient_features(module, batch, GradientSettings(width=36, parameters=("blocks.*", "head.*"))).norm() > 0


def test_an_engine_of_ones_own_on_an_accelerator_answers_and_refuses_gradient_features() -> None:
    module, batch = llama(), text_batch()
    losses, texts = sample_losses(module, batch), generate(module, batch, 3)
    with emulated_device("lazy"), Engine(module, "emu"):
        torch.testing.assert_close(sample_losses(module, batch).cpu(), losses, rtol=1e-5, atol=1e-5)  # sums in another order
        assert [[t.tolist() for t in row] for row in generate(module, batch, 3)] == [[t.tolist() for t in row] for row in texts]
        with pytest.raises(NotImplementedError, match=r"computes on emu.* inside a Trainer with strategy='megatrain'"):
            gradient_features(module, batch, GradientSettings(width=36))


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_second_use_of_a_weight_in_a_streamed_layer_is_refused(place: str) -> None:
    """Autograd sees a streamed layer as one operation, so the graph does not tell."""

    class Twice(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.first, self.norm, self.again = nn.Linear(8, 8), nn.LayerNorm(8), again

        def forward(self, x: Tensor) -> Tensor:
            if self.again and place == "before":
                x = F.linear(x, self.first.weight)
            x = self.norm(self.first(x.to(self.first.weight.dtype)).tanh())
            return x @ self.first.weight.T if self.again and place == "after" else x

    module, batch = Frozen(), (torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1]))
    settings = GradientSettings(width=36)
    for again in (False, True):
        torch.manual_seed(1)
        module.blocks = nn.Sequential(*[Twice(again and i == 1) for i in range(3)])
        with Engine(module, "cpu"):
            if again:
                with pytest.raises(NotImplementedError, match=r"`blocks.1.first.weight` is used outside a call of the module that owns it"):
                    gradient_features(module, batch, settings)
                others = GradientSettings(width=36, parameters=("blocks.*.norm.*", "head.*"))
                assert gradient_features(module, batch, others).norm() > 0
            else:
                found = gradient_features(module, batch, settings)
        if not again:
            torch.testing.assert_close(found, loop_features(module, batch, settings), rtol=1e-5, atol=1e-6)
