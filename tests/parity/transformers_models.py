"""Hugging Face models, tiny, as they come: caches on, dropout where the original has it."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.parity.subject import Batch, Subject, own_loss, text

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.5, "output_router_logits": True}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}


def _without(*names: str, **more: Any) -> dict[str, Any]:
    return {key: value for key, value in SIZES.items() if key not in names} | more


def _model(model: str, config: str, layer: str, batch: Callable[[int], Batch] = text, **sizes: Any) -> Subject:
    def build() -> nn.Module:
        module: nn.Module = getattr(hf, model)(getattr(hf, config)(**(sizes or SIZES)))
        return module

    return Subject(build, own_loss, batch, streamed=(layer,))


def _translation(index: int) -> Batch:
    source, target = text(index), text(index + 7, width=6)
    return {"input_ids": source["input_ids"], "attention_mask": source["attention_mask"], "labels": target["labels"]}


def _images(index: int) -> Batch:
    torch.manual_seed(100 + index)
    return {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.randint(0, 3, (2,))}


def _images_in_text(index: int) -> Batch:
    batch = text(index)
    batch["input_ids"][:, 1:5] = 63  # one image of four patches each
    batch["labels"] = batch["labels"].masked_fill(batch["input_ids"] == 63, -100)
    torch.manual_seed(200 + index)
    return {**batch, "pixel_values": torch.randn(2, 3, 8, 8)}


def _pairs(index: int) -> Batch:
    batch = text(index)
    batch["input_ids"][:, 6] = 2
    torch.manual_seed(200 + index)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "pixel_values": torch.randn(2, 3, 8, 8)}


def _llava() -> nn.Module:
    vision = hf.CLIPVisionConfig(**VISION, projection_dim=16)
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**SIZES), image_token_id=63))


def _clip() -> nn.Module:
    config = hf.CLIPConfig(
        text_config=_without("num_key_value_heads", "head_dim", hidden_size=16, projection_dim=16),
        vision_config={**VISION, "projection_dim": 16},
        projection_dim=16,
    )
    return hf.CLIPModel(config)


def _clip_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = module(**batch, return_loss=True).loss
    return loss


MODELS: dict[str, Subject] = {
    "llama": _model("LlamaForCausalLM", "LlamaConfig", "LlamaDecoderLayer"),
    "qwen2": _model("Qwen2ForCausalLM", "Qwen2Config", "Qwen2DecoderLayer"),
    "qwen3": _model("Qwen3ForCausalLM", "Qwen3Config", "Qwen3DecoderLayer"),
    "mistral": _model("MistralForCausalLM", "MistralConfig", "MistralDecoderLayer", **SIZES, sliding_window=4),
    "gemma2": _model("Gemma2ForCausalLM", "Gemma2Config", "Gemma2DecoderLayer", **SIZES, sliding_window=4, query_pre_attn_scalar=8),
    "gemma3": _model("Gemma3ForCausalLM", "Gemma3TextConfig", "Gemma3DecoderLayer", **SIZES, sliding_window=4, layer_types=MIXED),
    "gemma3n": _model(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        "Gemma3nTextDecoderLayer",
        **(SIZES | {"num_hidden_layers": 4, "intermediate_size": [48] * 4}),
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        laurel_rank=4,
        altup_num_inputs=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    ),
    "gemma4": _model(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        "Gemma4TextDecoderLayer",
        **(SIZES | {"num_hidden_layers": 4}),
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
        global_head_dim=8,
    ),
    "phi3": _model("Phi3ForCausalLM", "Phi3Config", "Phi3DecoderLayer", **SIZES),
    "gpt2": _model("GPT2LMHeadModel", "GPT2Config", "GPT2Block", vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32),
    "gpt_neox": _model("GPTNeoXForCausalLM", "GPTNeoXConfig", "GPTNeoXLayer", **_without("num_key_value_heads", "head_dim")),
    "opt": _model(
        "OPTForCausalLM",
        "OPTConfig",
        "OPTDecoderLayer",
        **_without("num_key_value_heads", "head_dim", "intermediate_size", ffn_dim=48, word_embed_proj_dim=32),
    ),
    "falcon": _model(
        "FalconForCausalLM", "FalconConfig", "FalconDecoderLayer", **_without("num_key_value_heads", "head_dim", "intermediate_size")
    ),
    "mixtral": _model(
        "MixtralForCausalLM",
        "MixtralConfig",
        "MixtralDecoderLayer",
        **SIZES,
        **EXPERTS,
        num_local_experts=4,
        router_jitter_noise=0.1,
    ),
    "qwen3_moe": _model(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", "Qwen3MoeDecoderLayer", **SIZES, **EXPERTS, num_experts=8, mlp_only_layers=[1]
    ),
    "deepseek_v3": _model(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        "DeepseekV3DecoderLayer",
        **_without("head_dim", num_key_value_heads=4),
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt_oss": _model(
        "GptOssForCausalLM",
        "GptOssConfig",
        "GptOssDecoderLayer",
        **SIZES,
        sliding_window=4,
        layer_types=MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    ),
    "qwen3_next": _model(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        "Qwen3NextDecoderLayer",
        **SIZES,
        **EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "bert": _model("BertForMaskedLM", "BertConfig", "BertLayer", **_without("num_key_value_heads", "head_dim")),
    "distilbert": _model(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        "TransformerBlock",
        vocab_size=64,
        dim=32,
        hidden_dim=48,
        n_layers=3,
        n_heads=4,
        max_position_embeddings=32,
    ),
    "t5": _model(
        "T5ForConditionalGeneration",
        "T5Config",
        "T5Block",
        batch=_translation,
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "vit": _model("ViTForImageClassification", "ViTConfig", "ViTLayer", batch=_images, **VISION, num_labels=3),
    "llava": Subject(_llava, own_loss, _images_in_text, streamed=("CLIPEncoderLayer", "LlamaDecoderLayer")),
    "clip": Subject(_clip, _clip_loss, _pairs, streamed=("CLIPEncoderLayer",)),
}
