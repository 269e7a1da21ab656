"""A packed row is its documents run alone: shown here for each family of attention, in training and in evaluation."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_megatrain.datamodules.packing import IGNORED, PackedBlocks, PaddedDocuments, keeps_documents_apart, pad_batch
from lightning_megatrain.datamodules.token_cache import TokenizedDocuments

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Windows of 6 are shorter than the documents, so that a window crossing into the neighbour would show.
PACKED_MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 6},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 6},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6},
    "phi3": {},
    "gpt2": SMALL_GPT2,
    "gpt_neox": {},
    "falcon": {},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "qwen3_moe": {"head_dim": 8, **EXPERTS},
}
NO_SDPA = ("gemma2", "sdpa")  # transformers refuses the pair, as Gemma 2 caps its attention logits
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    **EXPERTS,
}
PADDED_MODELS = {"qwen3_next": HYBRID, "mamba": {"state_size": 4}, "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}}


def make_model(model_type: str, fields: dict, attention: str = "eager"):
    config = AutoConfig.for_model(model_type, **{**SMALL, **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # weights large enough that a glimpse of the neighbour shows
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def make_documents(lengths: list[int]) -> TokenizedDocuments:
    tokens = np.random.default_rng(0).integers(3, 99, sum(lengths)).astype(np.uint16)
    return TokenizedDocuments(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def largest_difference(logits: torch.Tensor, alone: torch.Tensor) -> float:
    """Relative to the largest logit, as FP32 rounds relative to it."""
    return ((logits - alone).abs().max() / alone.abs().max()).item()


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    ("model_type", "attention"), [(kind, how) for kind in PACKED_MODELS for how in ("sdpa", "eager") if (kind, how) != NO_SDPA]
)
def test_a_packed_row_equals_its_documents_run_alone(model_type, attention, training):
    fields = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0) if model_type == "gpt2" else {}
    model = make_model(model_type, {**PACKED_MODELS[model_type], **fields}, attention).train(training)
    lengths = [9, 12, 1, 10]
    documents = make_documents(lengths)
    row = PackedBlocks(documents, 32)[0]
    packed = model(input_ids=row["input_ids"][None], position_ids=row["position_ids"][None], use_cache=False).logits[0]
    alone = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in row["input_ids"].split(lengths)])
    # FP32 sums in another order over rows of another length; 1e-6 is eight times its epsilon.
    assert largest_difference(packed, alone) < 1e-6


@pytest.mark.parametrize("model_type", PADDED_MODELS)
def test_a_padded_batch_equals_its_documents_run_alone(model_type):
    model = make_model(model_type, PADDED_MODELS[model_type]).eval()
    documents = make_documents([9, 12, 5])
    rows = PaddedDocuments(documents, 32)
    batch = pad_batch([rows[index] for index in range(3)])
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    for index in range(3):
        ids = rows[index]["input_ids"]
        assert largest_difference(logits[index, : len(ids)], model(input_ids=ids[None], use_cache=False).logits[0]) < 1e-6


@pytest.mark.parametrize("model_type", PACKED_MODELS)
def test_models_of_attention_alone_are_packed(model_type):
    assert keeps_documents_apart(AutoConfig.for_model(model_type, **{**SMALL, **PACKED_MODELS[model_type]}))


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        *PADDED_MODELS.items(),
        ("jamba", {}),
        ("mamba2", {}),
        ("rwkv", {}),
        ("recurrent_gemma", {}),
        ("bloom", {}),
        ("mpt", {}),
        ("gpt_oss", {}),
    ]
    + [("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_that_would_mix_documents_are_padded(model_type, fields):
    config = AutoConfig.for_model(model_type, **{**SMALL, **fields}) if fields else AutoConfig.for_model(model_type)
    assert not keeps_documents_apart(config)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), block_size=st.integers(2, 16))
def test_packed_rows_hold_every_token_once_and_positions_restart_with_each_document(lengths, block_size):
    documents = make_documents(lengths)
    rows = [PackedBlocks(documents, block_size, pad_id=0)[index] for index in range(len(PackedBlocks(documents, block_size)))]
    ids = torch.cat([row["input_ids"] for row in rows])
    labels = torch.cat([row["labels"] for row in rows])
    positions = torch.cat([row["position_ids"] for row in rows])
    total = sum(lengths)
    assert len(ids) == -(-total // block_size) * block_size
    assert ids[:total].tolist() == documents.tokens.tolist()
    assert (ids[total:] == 0).all()
    assert (labels[total:] == IGNORED).all()
    begins = {*documents.starts[:-1].tolist(), *range(0, total, block_size)}
    expected, position = [], 0
    for place in range(total):
        position = 0 if place in begins else position + 1
        expected.append(position)
    assert positions[:total].tolist() == expected
    assert labels[:total].tolist() == [IGNORED if p == 0 else i for p, i in zip(expected, ids.tolist(), strict=False)]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), block_size=st.integers(2, 16))
def test_padded_rows_hold_every_token_once_and_never_two_documents(lengths, block_size):
    documents = make_documents(lengths)
    rows = PaddedDocuments(documents, block_size)
    pieces = [min(block_size, length - begin) for length in lengths for begin in range(0, length, block_size)]
    assert [len(rows[index]["input_ids"]) for index in range(len(rows))] == pieces
    assert torch.cat([rows[index]["input_ids"] for index in range(len(rows))]).tolist() == documents.tokens.tolist()
    assert all(rows[index]["labels"][0] == IGNORED for index in range(len(rows)))


def test_a_row_that_does_not_exist_ends_the_iteration():
    documents = make_documents([5, 5])
    for rows in (PackedBlocks(documents, 4), PaddedDocuments(documents, 4)):
        assert len(list(rows)) == len(rows)


def test_a_batch_of_unequal_rows_is_padded_on_the_right():
    rows = PaddedDocuments(make_documents([2, 4]), 8)
    batch = pad_batch([rows[0], rows[1]], pad_id=7)
    assert batch["input_ids"][0, 2:].tolist() == [7, 7]
    assert batch["labels"][0, 2:].tolist() == [IGNORED, IGNORED]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
