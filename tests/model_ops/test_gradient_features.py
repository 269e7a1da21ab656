"""Gradient features equal a loop over batches of one."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatrain.model_ops import GradientSettings, compute_sample_losses, gradient_features
from tests.model_ops.subjects import (
    MLP,
    bert,
    gpt2,
    llama,
    loop_features,
    loop_gradients,
    mlp_batch,
    project,
    t5,
    text_batch,
    tied_llama,
)

SUBJECTS = {
    "llama": (llama, text_batch),
    "tied llama": (tied_llama, text_batch),
    "gpt2 (tied, Conv1D, shared positions)": (gpt2, text_batch),
    "bert classification": (bert, lambda: text_batch(classes=3)),
    "t5 (encoder-decoder, relative positions)": (t5, text_batch),
    "mlp": (MLP, mlp_batch),
}
RELATIVE = 1e-5  # of the largest feature; both sides are FP32 and sum in different orders


def assert_close(found: Tensor, expected: Tensor, relative: float = RELATIVE) -> None:
    assert found.shape == expected.shape
    assert expected.abs().max() > 0
    assert (found - expected).abs().max() <= relative * expected.abs().max()


@pytest.mark.parametrize("kind", ["factored", "dense"])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_features_equal_a_loop_over_batches_of_one(subject: str, kind: Any) -> None:
    build, make_batch = SUBJECTS[subject]
    module, batch, settings = build(), make_batch(), GradientSettings(width=36, projection=kind)
    if subject.startswith("t5"):  # its table of relative positions is called with (T, T) places for all samples at once
        settings = GradientSettings(
            width=36, projection=kind, parameters=("*Attention.[qkvo].*", "*layer_norm*", "*DenseReluDense*", "shared*")
        )
        for name, p in module.named_parameters():
            p.requires_grad_("relative_attention_bias" not in name)
    assert_close(gradient_features(module, batch, settings), loop_features(module, batch, settings))


@pytest.mark.parametrize("subject", ["tied llama", "gpt2 (tied, Conv1D, shared positions)", "mlp"])
def test_features_in_double_precision_equal_the_loop_to_rounding(subject: str) -> None:
    build, make_batch = SUBJECTS[subject]
    module, settings = build().double(), GradientSettings(width=36)
    batch = make_batch()
    batch = tuple(t.double() if t.is_floating_point() else t for t in batch) if isinstance(batch, tuple) else batch
    assert_close(gradient_features(module, batch, settings), loop_features(module, batch, settings), relative=1e-12)


def test_each_kind_of_layer_matches_its_closed_form() -> None:
    """One linear layer y = w.x, loss y: the gradient is x itself."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def compute_sample_losses(self, batch: Tensor) -> Tensor:
            return self.layer(batch).squeeze(1)

    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    settings = GradientSettings(width=16, projection="dense")
    expected = [project({"layer.weight": row.view(1, 3), "layer.bias": torch.ones(1)}, settings) for row in x]
    torch.testing.assert_close(gradient_features(Linear(), x, settings), torch.stack(expected))


def test_a_module_without_known_kind_inside_a_sequence_of_tokens_is_right() -> None:
    """Multi-head attention reads its projections' weights without calling them, and an LSTM keeps flat weights."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.recurrent = nn.LSTM(8, 5, batch_first=True)
            self.head = nn.Linear(5, 1)

        def compute_sample_losses(self, batch: Tensor) -> Tensor:
            hidden = self.attention(batch, batch, batch, need_weights=False)[0]
            return self.head(self.recurrent(hidden)[0]).tanh().sum((1, 2))

    module, batch, settings = Recurrent(), torch.randn(4, 6, 8), GradientSettings(width=36)
    assert_close(gradient_features(module, batch, settings), loop_features(module, batch, settings))


def test_a_layer_called_twice_counts_both_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)

        def compute_sample_losses(self, batch: Tensor) -> Tensor:
            return self.layer(torch.tanh(self.layer(batch))).pow(2).sum(1)

    module, batch, settings = Twice(), torch.randn(5, 4), GradientSettings(width=36)
    assert_close(gradient_features(module, batch, settings), loop_features(module, batch, settings))


def test_padding_does_not_change_a_sample() -> None:
    module, batch = llama(), text_batch()
    alone = {k: v[4:5, : int(batch["attention_mask"][4].sum())] for k, v in batch.items()}
    settings = GradientSettings(width=64)
    assert_close(gradient_features(module, batch, settings)[4:5], gradient_features(module, alone, settings))


def test_a_batch_as_long_as_its_sequence_is_not_mistaken() -> None:
    """Positions of shape (T,) and samples of shape (B,) look alike when T = B."""
    module, batch, settings = (
        LearnedPositions(),
        text_batch(samples=TOKENS_AS_SAMPLES, tokens=TOKENS_AS_SAMPLES),
        GradientSettings(width=36),
    )
    assert_close(gradient_features(module, batch, settings), loop_features(module, batch, settings))


TOKENS_AS_SAMPLES = 6


class LearnedPositions(nn.Module):
    """A model whose positions are `arange(T)`, as small language models have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places, self.head = nn.Embedding(61, 8), nn.Embedding(16, 8), nn.Linear(8, 61)

    def compute_sample_losses(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return F.cross_entropy(self.head(hidden.tanh()).transpose(1, 2), ids, reduction="none").mean(1)


def test_a_sample_without_labels_has_no_gradient() -> None:
    module, batch = llama(), text_batch()
    batch["labels"][2] = -100
    features = gradient_features(module, batch, GradientSettings(width=64))
    assert features[2].abs().max() == 0
    assert (features[[0, 1, 3, 4]].norm(dim=1) > 0).all()


def test_frozen_parameters_and_patterns_choose_the_parameters() -> None:
    module, batch = llama(), text_batch()
    whole = loop_gradients(module, batch)
    settings = GradientSettings(width=64, parameters=("model.layers.1.mlp.*", "lm_head.weight"))
    chosen = [{n: g for n, g in sample.items() if "layers.1.mlp" in n or n == "lm_head.weight"} for sample in whole]
    assert len(chosen[0]) == 4
    expected = torch.stack([project(g, settings) for g in chosen])
    assert_close(gradient_features(module, batch, settings), expected)
    for name, p in module.named_parameters():
        p.requires_grad_("layers.1.mlp" in name or name == "lm_head.weight")
    assert_close(gradient_features(module, batch, GradientSettings(width=64)), expected)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'\*\.nothing' matches none of the \d+ parameters"):
        gradient_features(llama(), text_batch(), GradientSettings(parameters=("*.nothing",)))


def test_low_rank_adapters_get_features_of_their_own() -> None:
    import peft

    torch.manual_seed(0)
    module = peft.get_peft_model(llama(), peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"]))
    for name, p in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)  # zero at first, which would hide lora_A's gradients
    batch, settings = text_batch(), GradientSettings(width=36)
    assert_close(gradient_features(module, batch, settings), loop_features(module, batch, settings))


def test_activation_checkpointing_changes_nothing() -> None:
    module, batch, settings = llama(), text_batch(), GradientSettings(width=64)
    plain = gradient_features(module, batch, settings)
    module.gradient_checkpointing_enable({"use_reentrant": False})
    module.train()  # Hugging Face checkpoints in train mode only
    for m in module.modules():
        m.eval = lambda m=m: m  # type: ignore[method-assign,misc]
    module.config.attention_dropout = 0.0
    for layer in module.model.layers:
        layer.self_attn.attention_dropout = 0.0
    assert torch.equal(gradient_features(module, batch, settings), plain)


def test_features_under_bf16_autocast_are_accumulated_in_fp32() -> None:
    """The linear layers' inputs and output gradients are BF16; what is made of them is FP32: nearer to FP32's than BF16 gradients are."""
    module, batch, settings = llama(), text_batch(), GradientSettings(width=64)
    exact = loop_features(module, batch, settings)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradient_features(module, batch, settings)
        rounded = loop_features(module, batch, settings)
    assert found.dtype == torch.float32
    error, error_of_loop = (found - exact).norm() / exact.norm(), (rounded - exact).norm() / exact.norm()
    assert error <= 2**-8 * math.sqrt(30)  # BF16's rounding, once for each of some 30 operations on the way, at random
    assert error <= 1.2 * error_of_loop


def test_the_linear_weight_gradient_under_autocast_is_the_fp32_product_of_rounded_factors() -> None:
    """One layer whose BF16 inputs and output gradients are known exactly."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 4, bias=False)

        def compute_sample_losses(self, batch: Tensor) -> Tensor:
            return (self.layer(batch).float() * torch.arange(1.0, 5.0)).sum((1, 2))

    x, settings = torch.randn(3, 500, 8), GradientSettings(width=16)
    gradient = torch.arange(1.0, 5.0).view(4, 1) * x.bfloat16().float().sum(1).view(
        3, 1, 8
    )  # in BF16 the sum of 500 terms would lose two digits
    with torch.autocast("cpu", torch.bfloat16):
        found = gradient_features(Linear(), x, settings)
    assert_close(found, torch.stack([project({"layer.weight": g}, settings) for g in gradient]))


def test_another_loss_can_be_asked_for() -> None:
    module, batch, settings = llama(), text_batch(), GradientSettings(width=64)
    reward = torch.tensor([0.0, 1.0, -2.0, 0.5, 3.0])
    weighted = gradient_features(module, batch, settings, losses=lambda m, b: compute_sample_losses(m, b) * reward)
    assert_close(weighted, gradient_features(module, batch, settings) * reward.view(-1, 1))


def test_works_within_inference_mode() -> None:
    module, settings = llama(), GradientSettings(width=64)
    expected = gradient_features(module, text_batch(), settings)
    with torch.inference_mode():
        found = gradient_features(module, text_batch(), settings)
    assert torch.equal(found, expected)


def test_a_weight_used_outside_its_module_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.loose = nn.Embedding(61, 8), nn.Linear(8, 8)

        def compute_sample_losses(self, batch: dict[str, Tensor]) -> Tensor:
            return F.linear(self.words(batch["input_ids"]), self.words.weight).logsumexp(-1).sum(1)

    with pytest.raises(NotImplementedError, match=r"`words.weight` is used outside a call of the module that owns it"):
        gradient_features(Tied(), text_batch())

    class Loose(Tied):
        def compute_sample_losses(self, batch: dict[str, Tensor]) -> Tensor:
            return F.linear(self.words(batch["input_ids"]), self.loose.weight).sum((1, 2))

    with pytest.raises(NotImplementedError, match=r"`loose.weight` is used outside"):
        gradient_features(Loose(), text_batch())
    assert gradient_features(Loose(), text_batch(), GradientSettings(width=36, parameters=("words.*",))).norm() > 0


class Routed(nn.Module):
    """Sends some tokens to an expert: those that the batch names, else about half."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.expert = nn.Embedding(61, 8), nn.Linear(8, 8)

    def compute_sample_losses(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.words(batch["input_ids"])
        routed = batch.get("routed", hidden[..., 0] > 0)
        out = torch.zeros_like(hidden)
        out[routed] = self.expert(hidden[routed])
        return out.pow(2).sum((1, 2))


def test_rows_of_unknown_samples_are_refused_and_a_batch_of_one_is_not() -> None:
    module, settings = Routed(), GradientSettings(width=36)
    with pytest.raises(
        NotImplementedError, match=r"`expert` \(Linear\) was called with a tensor of shape .* batch of 5 samples.*batch_size=1"
    ):
        gradient_features(module, text_batch(), settings)
    one = {k: v[:1] for k, v in text_batch().items()}
    assert_close(gradient_features(module, one, settings), loop_features(module, one, settings))


def test_memory_is_bounded_whatever_the_number_of_parameters() -> None:
    """No tensor as large as two samples' gradients is made, nor any sign matrix for all parameters."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for leaf in torch.utils._pytree.tree_leaves(out):
                if isinstance(leaf, Tensor):
                    Largest.elements = max(Largest.elements, leaf.untyped_storage().nbytes() // 4)
            return out

    from lightning_megatrain.model_ops import projection

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(100, 100) for _ in range(4)])

        def compute_sample_losses(self, batch: Tensor) -> Tensor:
            return self.layers(batch).sum(1)

    module, batch = Wide(), torch.randn(16, 100)
    optimizer = torch.optim.Adam(module.parameters())
    module.compute_sample_losses(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projection, "MAX_ELEMENTS", 2**13)
        for kind in ("factored", "dense"):
            for preconditioner in (None, "adam"):
                Largest.elements = 0
                with Largest():
                    gradient_features(module, batch, GradientSettings(64, kind, preconditioner=preconditioner), optimizers=[optimizer])
                # Blocks of 2^13 elements; hashes of 8 bytes for 64 signs are smaller. A sample's gradient has 40400 elements,
                # the optimizer's moments of one layer 10000, which are there anyway.
                assert Largest.elements <= 2 * 2**13, (kind, preconditioner)


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["places", "vectors"])
def test_a_table_of_as_many_rows_as_samples_is_not_mistaken(kind: str, samples: int) -> None:
    """Four learned queries, read by place or as they are: no axis of the batch has that length."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.table, self.mix, self.head = nn.Embedding(61, 8), nn.Embedding(4, 8), nn.Linear(8, 8), nn.Linear(8, 61)
            self.fixed = nn.Parameter(torch.randn(4, 8), requires_grad=False)

        def compute_sample_losses(self, batch: dict[str, Tensor]) -> Tensor:
            queries = self.mix(self.fixed) if kind == "vectors" else self.table(torch.arange(4))
            hidden = self.words(batch["input_ids"])  # (B, T, H)
            read = (torch.softmax(queries @ hidden.transpose(1, 2), -1) @ hidden).mean(1)  # (B, H)
            return F.cross_entropy(self.head(read), batch["input_ids"][:, 0], reduction="none")

    module, batch, settings = Queries(), text_batch(samples=samples, tokens=7), GradientSettings(width=36)
    batch = {"input_ids": batch["input_ids"]}
    if kind == "vectors" and samples != 4:  # rows that are not the samples', and never were
        with pytest.raises(NotImplementedError, match=r"`mix` \(Linear\) was called with a tensor of shape \(4, 8\)"):
            gradient_features(module, batch, settings)
    elif kind == "vectors":
        with pytest.raises(NotImplementedError, match=r"`mix` \(Linear\)"):
            gradient_features(module, batch, settings)
    else:
        assert_close(gradient_features(module, batch, settings), loop_features(module, batch, settings))


def test_an_expert_that_gets_as_many_rows_as_there_are_samples_is_refused() -> None:
    routed = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()  # four rows of two samples
    batch = {"input_ids": torch.arange(20).view(4, 5), "routed": routed}
    with pytest.raises(NotImplementedError, match=r"`expert` \(Linear\) was called with a tensor of shape \(4, 8\) in a batch of 3"):
        gradient_features(Routed(), batch, GradientSettings(width=36))
