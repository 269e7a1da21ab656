"""The loss of each sample is the model's own loss on a batch of one."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForSequenceClassification,
    BertForTokenClassification,
)

from lightning_megatrain.model_ops import compute_sample_losses, sample_losses, token_losses
from tests.model_ops.subjects import MLP, VOCABULARY, Lit, bert, gpt2, llama, mlp_batch, one_by_one, t5, text_batch

TINY_BERT = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}


def tiny_bert(cls: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return cls(BertConfig(**TINY_BERT, **options))


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (llama(), text_batch()),
        (gpt2(), text_batch()),
        (t5(), text_batch()),
        (bert(), text_batch(classes=3)),
        (tiny_bert(BertForMaskedLM), text_batch()),
        (tiny_bert(BertForTokenClassification, num_labels=VOCABULARY), text_batch()),
        (tiny_bert(BertForSequenceClassification, num_labels=1), text_batch() | {"labels": torch.randn(5)}),
        (tiny_bert(BertForSequenceClassification, num_labels=3), text_batch() | {"labels": torch.rand(5, 3)}),
    ],
    ids=["causal", "gpt2", "encoder-decoder", "classes", "masked", "token classes", "regression", "several labels"],
)
def test_losses_equal_the_models_own_on_batches_of_one(model: nn.Module, batch: dict[str, Tensor]) -> None:
    losses = sample_losses(model, batch)
    model.eval()
    with torch.no_grad():
        expected = torch.stack([model(**sample).loss for sample in one_by_one(batch)])
    # Padding enters the sums of attention as exact zeros; what is left is the order of FP32 sums.
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)


def test_the_mean_over_tokens_weighs_samples_by_their_tokens() -> None:
    """Five samples with 8, 6, 4, 2, 2 predicted tokens: the model's loss is the weighted mean."""
    model, batch = llama().eval(), text_batch()
    losses, valid = token_losses(model, batch)
    counts = valid.sum(1)
    assert counts.tolist() == [8, 6, 4, 2, 2]
    assert not valid[:, 0].any()  # nothing predicts the first token
    assert losses[~valid].abs().max() == 0
    torch.testing.assert_close(losses.sum() / counts.sum(), model(**batch).loss)
    torch.testing.assert_close(losses.sum(1) / counts, sample_losses(model, batch))


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    model = llama()
    nn.init.zeros_(model.lm_head.weight)  # type: ignore[union-attr,arg-type]
    torch.testing.assert_close(sample_losses(model, text_batch()), torch.tensor(float(VOCABULARY)).log().expand(5))


def test_a_sample_without_labels_costs_nothing() -> None:
    batch = text_batch()
    batch["labels"][1] = -100
    losses = sample_losses(llama(), batch)
    assert losses[1] == 0
    assert (losses[[0, 2, 3, 4]] > 0).all()


def test_the_model_is_found_inside_a_lightning_module_and_unknown_keys_are_left_out() -> None:
    model, batch = llama(), text_batch()
    expected = sample_losses(model, batch)
    assert torch.equal(sample_losses(Lit(model), batch | {"index": torch.arange(5), "domain": torch.zeros(5)}), expected)


def test_of_a_student_and_a_frozen_teacher_the_student_is_asked() -> None:
    student, teacher = llama(), gpt2().requires_grad_(False)
    module = nn.ModuleDict({"teacher": teacher, "student": student})
    assert torch.equal(sample_losses(module, text_batch()), sample_losses(student, text_batch()))
    teacher.requires_grad_(True)
    with pytest.raises(ValueError, match=r"holds 2 Hugging Face models \(teacher, student\)"):
        sample_losses(module, text_batch())


def test_a_module_of_another_kind_answers_by_its_hook() -> None:
    module, (category, x, y) = MLP(), mlp_batch()
    torch.testing.assert_close(
        sample_losses(module, (category, x, y)), F.cross_entropy(module.eval()(category, x), y, reduction="none").detach()
    )


def test_under_autocast_losses_are_fp32_and_near() -> None:
    model, batch = llama(), text_batch()
    exact = sample_losses(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = sample_losses(model, batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=2**-7, atol=0)  # BF16 keeps 8 bits; the loss averages over tokens


def test_the_differentiable_form_trains_like_the_models_own_loss() -> None:
    model, batch = llama().eval(), {k: v[:1] for k, v in text_batch().items()}
    gradients = torch.autograd.grad(compute_sample_losses(model, batch).sum(), list(model.parameters()))
    expected = torch.autograd.grad(model(**batch).loss, list(model.parameters()))
    for found, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_what_has_no_loss_per_sample_says_what_to_define() -> None:
    class Plain(pl.LightningModule):
        pass

    with pytest.raises(TypeError, match=r"Plain holds no Hugging Face model.*compute_sample_losses\(self, batch\)"):
        sample_losses(Plain(), text_batch())
    with pytest.raises(NotImplementedError, match="BertForNextSentencePrediction is not known"):
        sample_losses(tiny_bert(BertForNextSentencePrediction), text_batch(classes=2))
    with pytest.raises(TypeError, match="a batch that is a mapping"):
        sample_losses(llama(), MappingLike())
    with pytest.raises(KeyError, match="no `labels`"):
        sample_losses(llama(), {"input_ids": torch.ones(2, 3, dtype=torch.long)})
    with pytest.raises(NotImplementedError, match="one loss per sample, not one per token"):
        token_losses(bert(), text_batch(classes=3))

    class Wrong(MLP):
        def compute_sample_losses(self, batch: Any) -> Tensor:
            return super().compute_sample_losses(batch).mean()

    with pytest.raises(ValueError, match=r"returned a tensor of shape \(\) for a batch of 5; return one loss per sample, shape \(5,\)"):
        sample_losses(Wrong(), mlp_batch())


class MappingLike:
    """Has labels, but is no mapping."""

    def __contains__(self, key: str) -> bool:
        return key == "labels"

    def __getitem__(self, key: str) -> Tensor:
        return torch.zeros(1)
