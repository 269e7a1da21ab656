"""Embeddings are pooled over a sample's own tokens, wherever its padding is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from lightning_megatrain.model_ops import embed, pool
from tests.model_ops.subjects import MLP, Lit, bert, gpt2, llama, mlp_batch, t5, text_batch

HIDDEN = torch.tensor([[[1.0, 10], [2, 20], [3, 30], [9, 90]]])  # one sample, four tokens


@pytest.mark.parametrize(
    ("pooling", "mask", "expected"),
    [
        ("mean", [1, 1, 1, 0], [2, 20]),
        ("mean", [0, 1, 1, 0], [2.5, 25]),
        ("last_token", [1, 1, 1, 0], [3, 30]),
        ("last_token", [0, 0, 1, 1], [9, 90]),
        ("position_weighted", [1, 1, 1, 0], [(1 + 4 + 9) / 6, 10 * (1 + 4 + 9) / 6]),
        ("position_weighted", [0, 1, 1, 0], [(2 + 2 * 3) / 3, 10 * (2 + 2 * 3) / 3]),
        ("mean", [0, 0, 0, 0], [0, 0]),
        ("last_token", [0, 0, 0, 0], [0, 0]),
    ],
)
def test_pooling_in_numbers(pooling: Any, mask: list[int], expected: list[float]) -> None:
    torch.testing.assert_close(pool(HIDDEN, torch.tensor([mask]), pooling), torch.tensor([expected], dtype=torch.float32))


def test_without_a_mask_all_tokens_count() -> None:
    torch.testing.assert_close(pool(HIDDEN, None, "mean"), HIDDEN.mean(1))


def last_hidden(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    arguments = {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        if model.config.is_encoder_decoder:  # type: ignore[union-attr]
            return model.eval().get_encoder()(**arguments).last_hidden_state  # type: ignore[operator]
        return model.eval()(**arguments, output_hidden_states=True).hidden_states[-1]


def bert_lm() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(vocab_size=128, **sizes))


@pytest.mark.parametrize(
    ("model", "batch"),
    [(llama(), text_batch()), (gpt2(), text_batch()), (bert(), text_batch(classes=3)), (bert_lm(), text_batch()), (t5(), text_batch())],
)
def test_embeddings_are_pooled_last_hidden_states(model: nn.Module, batch: dict[str, Tensor]) -> None:
    for pooling in ("mean", "last_token", "position_weighted"):
        expected = pool(last_hidden(model, batch), batch["attention_mask"], pooling)  # type: ignore[arg-type]
        torch.testing.assert_close(embed(Lit(model), batch, pooling), expected)  # type: ignore[arg-type]
    without_labels = {k: v for k, v in batch.items() if k != "labels"}
    torch.testing.assert_close(embed(model, without_labels), pool(last_hidden(model, batch), batch["attention_mask"], "mean"))


@pytest.mark.parametrize("pooling", ["mean", "last_token", "position_weighted"])
def test_padding_on_either_side_gives_the_same_embedding(pooling: Any) -> None:
    model, batch = llama(), text_batch()
    right = embed(model, batch, pooling)
    lengths = batch["attention_mask"].sum(1)
    left = {k: torch.stack([row.roll(int(9 - n)) for row, n in zip(v, lengths, strict=True)]) for k, v in batch.items()}
    left["position_ids"] = (left["attention_mask"].cumsum(1) - 1).clamp(min=0)
    torch.testing.assert_close(embed(model, left, pooling), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "batch"), [(llama(), text_batch()), (gpt2(), text_batch()), (bert_lm(), text_batch()), (t5(), text_batch())]
)
def test_the_head_runs_for_one_token_only(model: nn.Module, batch: dict[str, Tensor]) -> None:
    head, shapes = model.get_output_embeddings(), []  # type: ignore[operator]
    head.register_forward_hook(lambda m, args, out: shapes.append(out.shape[1]))
    embed(model, batch)
    embed(model, {**batch, "labels": batch["labels"].repeat(1, 2)})
    assert shapes == [1, 1]
    model(**batch)
    assert shapes[-1] == batch["labels"].shape[1], "the hook is gone"


def test_a_module_of_another_kind_answers_by_its_hook_or_says_what_to_define() -> None:
    module = MLP()
    torch.testing.assert_close(embed(module, mlp_batch()), module.first(mlp_batch()[1]).detach())
    with pytest.raises(TypeError, match=r"Linear holds no Hugging Face model.*compute_embeddings\(self, batch\)"):
        embed(nn.Linear(2, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match="pooling='max' is none of"):
        embed(llama(), text_batch(), "max")  # type: ignore[arg-type]
