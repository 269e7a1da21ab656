"""MLPs and norms over slices of tokens give the numbers of the whole, plain and streamed."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.engine import Engine
from lightning_megatrain.language_model import CausalLM
from lightning_megatrain.language_model.token_slices import slice_tokens
from lightning_megatrain.model_ops import gradient_features
from tests.emulated import DEVICE, EmulatedAccelerator, emulated_device
from tests.language_model.test_causal_lm import LENGTHS, LLAMA, SGD, loader, make_model, make_rows, make_trainer
from tests.language_model.test_sliced_loss import FAMILIES, GPT2, batch_of

DENSE = [name for name, fields in FAMILIES.items() if "num_experts_per_tok" not in fields]


def built(fields, tokens=None):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    if tokens is not None:
        slice_tokens(model, tokens)
    return model


def logits_and_gradients(model, engine=False):
    batch = batch_of()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
    if engine:
        with Engine(model):
            logits = model(**inputs).logits
            logits.square().mean().backward()
    else:
        logits = model(**inputs).logits
        logits.square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("family", DENSE)
def test_sliced_equals_whole(family, tokens):
    logits, gradients = logits_and_gradients(built(FAMILIES[family], tokens))
    expected_logits, expected = logits_and_gradients(built(FAMILIES[family]))
    torch.testing.assert_close(logits, expected_logits, rtol=1e-6, atol=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)  # FP32 sums in another order, over 39 tokens


@pytest.mark.parametrize("family", DENSE)
def test_streamed_equals_plain_bit_for_bit(family):
    logits, gradients = logits_and_gradients(built(FAMILIES[family], 5), engine=True)
    expected_logits, expected = logits_and_gradients(built(FAMILIES[family], 5))
    assert torch.equal(logits, expected_logits)
    assert [name for name in expected if not torch.equal(gradients[name], expected[name])] == []


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("arguments", [{}, {"lora": {"r": 2, "target_modules": "all-linear"}}], ids=["all", "lora"])
def test_trainers_agree(precision, arguments):
    def trained(strategy, tokens):
        module = make_model(token_slice=tokens, **SGD, **arguments)
        make_trainer(max_epochs=1, accumulate_grad_batches=2, strategy=strategy, precision=precision).fit(
            module, loader(make_rows(LENGTHS), 4)
        )
        return dict(module.named_parameters())

    plain, streamed, whole = trained("auto", 7), trained(MegaTrainStrategy(fused_optimizer=False), 7), trained("megatrain", None)
    assert [name for name in plain if not torch.equal(plain[name], streamed[name])] == []
    tolerance = 1e-6 if precision == "32-true" else 1e-4  # learning rate 0.1 x a gradient's BF16 rounding
    for name, parameter in whole.items():
        torch.testing.assert_close(streamed[name], parameter, rtol=0, atol=tolerance)


def test_on_a_device_what_an_mlp_makes_exists_for_a_slice_only(monkeypatch):
    sizes = []
    allocated = DEVICE.memory.allocated
    monkeypatch.setattr(DEVICE.memory, "allocated", lambda nbytes: sizes.append(nbytes) or allocated(nbytes))
    model = {**LLAMA, "hidden_size": 16, "intermediate_size": 512, "vocab_size": 20}
    rows = [{key: value % 20 if key == "input_ids" else value for key, value in row.items()} for row in make_rows([400])]
    for row in rows:
        row["labels"] = row["input_ids"]
    for tokens in (40, None):
        module = make_model({**model, "max_position_embeddings": 512}, token_slice=tokens, **SGD)
        sizes.clear()
        with emulated_device():
            make_trainer(accelerator=EmulatedAccelerator(), strategy="megatrain", max_steps=1).fit(module, loader(rows, 1))
        made = {tokens: tokens * 512 * 4 in sizes for tokens in (40, 400)}
        assert made == {40: tokens == 40, 400: tokens is None}
        assert (max(sizes) < 400 * 512 * 4) == (tokens == 40)


def test_weights_still_travel_as_bf16_under_autocast():
    moved = []
    for tokens in (5, None):
        with emulated_device():
            model = built(LLAMA, tokens)
            ids = batch_of()["input_ids"].to("emu")
            with Engine(model, "emu") as engine:
                for _ in range(2):
                    engine.accounting.reset()
                    with torch.autocast("emu", torch.bfloat16, cache_enabled=False):
                        logits = model(input_ids=ids, use_cache=False).logits
                    logits.float().square().mean().backward()
                moved.append((engine.accounting.bytes_to_device, engine.accounting.bytes_to_host))
    assert moved[0] == moved[1]


def test_each_sliced_part_runs_once_more():
    def flops(tokens, engine):
        model, ids = built(LLAMA, tokens), batch_of()["input_ids"]
        with FlopCounterMode(display=False) as counter:
            logits_and_gradients(model, engine)
        assert ids.numel() == 39
        return counter.get_total_flops()

    mlps = 2 * 39 * 3 * 2 * 32 * 48  # forward of both, 39 tokens, three matrices
    assert flops(5, engine=False) == flops(None, engine=False) + mlps
    assert flops(5, engine=True) == flops(None, engine=True) + mlps


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (FAMILIES["mixtral"], r"layer 'model.layers.0' \(MixtralDecoderLayer\) has 0 dense MLPs among its parts .*MixtralSparseMoeBlock"),
        (FAMILIES["qwen3_moe"], "has 0 dense MLPs among its parts .*Qwen3MoeSparseMoeBlock"),
        ({**GPT2, "resid_pdrop": 0.1}, "the GPT2MLP of layer 'transformer.h.0' has dropout 0.1, which would draw other numbers"),
        (
            {
                "model_type": "opt",
                "hidden_size": 32,
                "ffn_dim": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "word_embed_proj_dim": 32,
            },
            r"\(OPTDecoderLayer\) has 0 dense MLPs",
        ),
        (
            {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 4, "hidden_dropout": 0.0},
            "the BloomMLP of layer 'transformer.h.0' takes hidden_states, residual, not the hidden states alone",
        ),
    ],
)
def test_what_may_not_be_sliced_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        slice_tokens(built(fields), 5)


def test_dropout_of_adapters_is_refused():
    with pytest.raises(ValueError, match=r"the LlamaMLP of layer .* has dropout 0.1.*\(or in `lora`\)"):
        make_model(token_slice=5, lora={"r": 2, "target_modules": "all-linear", "lora_dropout": 0.1})


def test_a_module_of_another_kind_in_an_mlp_is_refused():
    model = built(LLAMA)
    model.model.layers[1].mlp.act_fn = nn.PReLU()
    with pytest.raises(ValueError, match="the LlamaMLP of layer 'model.layers.1' holds a PReLU, which may mix tokens"):
        slice_tokens(model, 5)
    with pytest.raises(ValueError, match="Sequential has no Hugging Face decoder layers"):
        slice_tokens(nn.Sequential(nn.Linear(2, 2)), 5)


def test_a_slice_without_a_token_is_refused():
    with pytest.raises(ValueError, match="`token_slice` is 0: it must be at least 1 token"):
        CausalLM(LLAMA, token_slice=0)


def test_copies_are_sliced_too_and_stand_alone():
    model = built(LLAMA, 5)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    logits, gradients = logits_and_gradients(twin)
    expected_logits, expected = logits_and_gradients(built(LLAMA, 5))
    assert torch.equal(logits, expected_logits)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert pickle.loads(pickle.dumps(twin)).state_dict().keys() == twin.state_dict().keys()


def test_gradients_of_samples_are_refused():
    module = make_model(token_slice=5)
    with pytest.raises(NotImplementedError, match="token_slice"):
        gradient_features(module, batch_of())
