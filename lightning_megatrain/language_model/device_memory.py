"""How much device memory a long context takes, from a model's config."""

from __future__ import annotations

from typing import Literal

import torch
from transformers import PretrainedConfig


def device_peak_bytes(
    config: PretrainedConfig,
    tokens: int,
    *,
    token_slice: int,
    loss_slice: int,
    saved_inputs: Literal["host", "device"] = "host",
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Return the most bytes that live on the device at once in a training step of :class:`~lightning_megatrain.language_model.CausalLM`.

    For `strategy="megatrain"`, `precision="bf16-true"` (or `"32-true"` with `dtype=torch.float32`), a model of Llama's make (RMSNorm,
    rotary positions, an MLP of three matrices; Llama, Mistral, Qwen2), all weights trained, and an attention kernel that needs no T x T
    memory. All of it is counted but what kernels take for themselves in between: CUDA's flash attention takes 4 bytes for each value of the
    queries in its backward, and as many again where several heads share keys.

    The peak is in one of three places: the backward of a layer's MLP, of its attention, or of the loss. All grow with the tokens, none
    with the number of layers unless their inputs stay on the device.

    Args:
        config: The model's.
        tokens: Tokens of a micro-batch, over all rows; more than either slice.
        token_slice: As in `CausalLM`.
        loss_slice: As in `CausalLM`.
        saved_inputs: As in `MegaTrainStrategy`.
        dtype: In which the device computes.
    """
    size = torch.empty((), dtype=dtype).element_size()
    width, inner, layers, vocabulary = config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head

    attention_weights = 2 * width * queries + 2 * width * keys
    mlp_weights = 3 * width * inner
    layer_weights = attention_weights + mlp_weights + 2 * width
    embedding = vocabulary * width
    weights = 2 * layer_weights + (embedding if config.tie_word_embeddings else 2 * embedding) + width  # two slots, and what is resident
    hidden, query, key = tokens * width, tokens * queries, tokens * keys
    kept = min(layers, 2) if saved_inputs == "host" else layers
    # While backward is `done` layers from the end: inputs of the layers to come, and gradients of two layers on their way to the host. That
    # of the head has left by the second layer; where it is the embedding's as well it waits for the rest of that until backward ends.
    around = max(
        min(kept, layers - done) * hidden + min(done, 2) * layer_weights + (embedding if done == 0 or config.tie_word_embeddings else 0)
        for done in range(layers)
    )
    rotary = 2 * tokens * head
    exact = tokens * (4 * config.num_attention_heads + 4 + 6 * 8)  # log-sum-exps and losses in FP32; ids, labels, positions

    # In both: the first norm's output, the gradient of the layer's output, that of the hidden states between attention and MLP; queries,
    # keys and values; what attention returned.
    in_layer = around + 3 * hidden + 2 * query + 2 * key + rotary + weights
    # The hidden states between, the second norm's output; of a slice: gate, up, their product and gradients of them.
    in_mlp = (2 * hidden + 6 * min(token_slice, tokens) * inner + width * inner) * size + 4 * mlp_weights  # sums of gradients in FP32
    in_attention = (2 * query + 2 * key + mlp_weights + width * queries) * size  # gradients
    layer = in_layer * size + exact + max(in_mlp, in_attention)

    logits = min(loss_slice, tokens) * vocabulary  # log-probabilities and two gradients of them in FP32; or logits and the head's gradient
    in_loss = (kept * hidden + 3 * hidden + rotary + weights) * size + exact + 4 * embedding
    return max(layer, in_loss + max(12 * logits, (4 + size) * logits + size * embedding))
