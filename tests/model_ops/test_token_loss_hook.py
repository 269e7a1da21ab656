"""A module that has each token's loss without whole logits, as CausalLM in slices, is asked for them; the numbers stay."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_megatrain.datamodules.packing import IGNORED, pad_batch
from lightning_megatrain.language_model import CausalLM
from lightning_megatrain.model_ops import GradientSettings, compute_sample_losses, embed, gradient_features, sample_losses, token_losses
from tests.emulated import DEVICE, EmulatedAccelerator, emulated_device
from tests.language_model.test_causal_lm import LLAMA, SGD, loader, make_model, make_rows, make_trainer

VOCABULARY, SLICE = 2000, 24
# Neither weights (vocabulary x hidden) nor hidden states are as large as a slice's logits.
SMALL = {**LLAMA, "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16}
LAYERS = GradientSettings(width=36, parameters=("*layers*",))


def batch_of(lengths: tuple[int, ...] = (33, 17, 20, 28)) -> dict[str, Tensor]:
    batch = pad_batch(make_rows(lengths))
    batch["labels"][1, :5] = IGNORED
    batch["labels"][2] = IGNORED
    return batch


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


@pytest.mark.parametrize("tokens", [None, 10_000])
def test_in_one_slice_the_losses_are_those_of_whole_logits_bit_for_bit(tokens: int | None) -> None:
    """The same kernels see the same rows, and sums over a row have the same length."""
    module, batch = make_model(LLAMA, loss_slice=tokens), batch_of()
    assert torch.equal(sample_losses(module, batch), sample_losses(module.model, batch))
    for found, expected in zip(token_losses(module, batch), token_losses(module.model, batch), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("tokens", [1, 7, SLICE])
def test_in_slices_they_are_within_1e_6(tokens: int) -> None:
    """A matrix product of fewer rows may sum in another order."""
    module, batch = make_model(LLAMA, loss_slice=tokens), batch_of()
    whole = sample_losses(module.model, batch)
    torch.testing.assert_close(sample_losses(module, batch), whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(compute_sample_losses(module, batch).detach(), whole, rtol=1e-6, atol=1e-6)
    found, valid = token_losses(module, batch)
    expected, expected_valid = token_losses(module.model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(valid, expected_valid)


def test_no_tensor_of_tokens_times_vocabulary_ever_exists() -> None:
    module, batch = make_model(SMALL, loss_slice=SLICE), batch_of()
    peaks = {}
    for operation in (sample_losses, token_losses, embed):
        with Largest() as largest:
            operation(module, batch)
        peaks[operation.__name__] = largest.elements
    largest_weight = VOCABULARY * 16
    assert peaks == {"sample_losses": SLICE * VOCABULARY, "token_losses": SLICE * VOCABULARY, "embed": largest_weight}
    with Largest() as largest:
        sample_losses(module.model, batch)
    assert largest.elements >= 4 * 32 * VOCABULARY


@pytest.mark.parametrize("head", ["frozen", "left out", "chosen"])
@pytest.mark.parametrize("kind", ["factored", "dense"])
def test_gradient_features_make_whole_logits_only_for_those_of_the_head(head: str, kind: Any) -> None:
    settings = GradientSettings(width=36, projection=kind, parameters=("*layers*",) if head == "left out" else None)
    features, largest = {}, {}
    for tokens in (SLICE, None):
        module = make_model(SMALL, loss_slice=tokens)
        if head == "frozen":
            module.model.get_output_embeddings().requires_grad_(False)
            module.model.get_input_embeddings().requires_grad_(False)  # else its own gradients are the largest
        with Largest() as watch:
            features[tokens] = gradient_features(module, batch_of(), settings)
        largest[tokens] = watch.elements
    assert largest[None] >= 4 * 32 * VOCABULARY
    assert (largest[SLICE] == SLICE * VOCABULARY) == (head != "chosen")
    if head == "chosen":
        assert torch.equal(features[SLICE], features[None])
    assert features[None].abs().max() > 0
    torch.testing.assert_close(features[SLICE], features[None], rtol=0, atol=1e-6 * float(features[None].abs().max()))


def test_a_tied_head_is_chosen_with_the_embedding() -> None:
    module = make_model({**SMALL, "tie_word_embeddings": True}, loss_slice=SLICE)
    with Largest() as largest:
        gradient_features(module, batch_of(), GradientSettings(width=36, parameters=("*embed_tokens*",)))
    assert largest.elements >= 4 * 32 * VOCABULARY


class Ask(pl.Callback):
    """Asks after the first step, and notes the largest allocation meanwhile."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.found, self.peaks = sizes, [], []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == 1:
            for operation in (sample_losses, embed, partial(gradient_features, settings=LAYERS)):
                self.sizes.clear()
                self.found.append(operation(pl_module, batch_of()).cpu())
                self.peaks.append(max(self.sizes, default=0))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_in_a_streamed_run_on_a_device_too(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    allocated = DEVICE.memory.allocated
    monkeypatch.setattr(DEVICE.memory, "allocated", lambda nbytes: sizes.append(nbytes) or allocated(nbytes))
    asks = {tokens: Ask(sizes) for tokens in (SLICE, None)}
    for tokens, ask in asks.items():
        with emulated_device():
            make_trainer(accelerator=EmulatedAccelerator(), strategy="megatrain", max_steps=2, precision=precision, callbacks=[ask]).fit(
                make_model(SMALL, loss_slice=tokens, **SGD), loader(make_rows([33, 17, 20, 28]), 2)
            )
    # FP32 logits of one slice; whole ones have one token a row less or not. The largest weight, in FP32, is what embeddings take.
    assert asks[SLICE].peaks == [SLICE * VOCABULARY * 4, 16 * VOCABULARY * 4, SLICE * VOCABULARY * 4]
    assert min(asks[None].peaks[0], asks[None].peaks[2]) >= 4 * 32 * VOCABULARY * 4
    tolerance = 1e-6 if precision == "32-true" else 2e-4  # of losses about 7.6, through BF16 logits whose last bit is 0.4 %
    *found, features = asks[SLICE].found
    *expected, expected_features = asks[None].found
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    tolerance = 1e-6 if precision == "32-true" else 2**-8  # half an ulp of BF16, in which gradients of hidden states are
    torch.testing.assert_close(features, expected_features, rtol=0, atol=tolerance * float(expected_features.abs().max()))


class Ready(nn.Module):
    """Has the loss of each token, and no Hugging Face model."""

    def __init__(self, losses: Any) -> None:
        super().__init__()
        self.losses = losses

    def compute_token_losses(self, batch: dict[str, Tensor]) -> Any:
        return self.losses


def test_any_module_may_have_the_hook() -> None:
    batch = {"input_ids": torch.ones(2, 4), "labels": torch.tensor([[5, 5, 5, IGNORED], [5, IGNORED, IGNORED, IGNORED]])}
    module = Ready(torch.tensor([[1.0, 3.0, 0.0], [0.0, 0.0, 0.0]]).bfloat16())
    assert sample_losses(module, batch).tolist() == [2.0, 0.0]
    losses, valid = token_losses(module, batch)
    assert losses.tolist() == [[0, 1, 3, 0], [0, 0, 0, 0]]
    assert losses.dtype == torch.float32
    assert valid.tolist() == [[False, True, True, False], [False] * 4]
    for wrong, got in ((torch.ones(2, 4), r"a tensor of shape \(2, 4\)"), (None, "a NoneType")):
        with pytest.raises(ValueError, match=rf"Ready.compute_token_losses returned {got} .* shape \(2, 3\)"):
            sample_losses(Ready(wrong), batch)


def test_a_loss_of_each_sample_goes_first() -> None:
    class Own(CausalLM):
        def compute_sample_losses(self, batch: Any) -> Tensor:
            return torch.arange(len(batch["labels"])).float()

    module = Own(LLAMA)
    module.configure_model()
    assert sample_losses(module, batch_of()).tolist() == [0, 1, 2, 3]
