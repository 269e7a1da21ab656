"""Models on the emulated accelerator give the CPU's numbers, bit for bit, in whatever order its lanes run."""

import copy

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.emulated import DEVICE, emulated_device

POLICIES = ["lazy", "eager:weights", "eager:gradients", "eager:compute", "random:1", "random:2"]
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SMALL))
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8))
    if name == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4, output_router_logits=True))
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))  # with dropout, as it comes


def _loss_and_gradients(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, autocast: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach().cpu(), **{name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("autocast", [False, True], ids=["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("name", "policy"),
    [*(("llama", policy) for policy in POLICIES), ("qwen3", "lazy"), ("gpt2", "lazy"), ("gpt2", "random:3"), ("mixtral", "lazy")],
)
def test_loss_and_gradients_equal_the_cpus(name: str, autocast: bool, policy: str) -> None:
    model = _model(name)
    ids, mask = torch.randint(0, 64, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    expected = _loss_and_gradients(copy.deepcopy(model), ids, mask, autocast)
    with emulated_device(policy):
        found = _loss_and_gradients(model.to("emu"), ids.to("emu"), mask.to("emu"), autocast)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_recomputed_dropout_draws_what_the_forward_drew() -> None:
    model = _model("gpt2")
    model.gradient_checkpointing_enable()
    ids, mask = torch.randint(0, 64, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    expected = _loss_and_gradients(copy.deepcopy(model), ids, mask, False)
    found = _loss_and_gradients(model.to("emu"), ids.to("emu"), mask.to("emu"), False)
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_nothing_has_run_before_it_is_asked_for() -> None:
    model = _model("llama").to("emu")
    ids = torch.randint(0, 64, (2, 12)).to("emu")
    with emulated_device("lazy"):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert torch.isnan(loss.raw)
        assert len(DEVICE.compute.items) > 200
        assert torch.isfinite(loss.cpu())
