"""A text sampled from a model in training."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@torch.no_grad()
def sample_text(
    model: PreTrainedModel,
    device: torch.device,
    prompt: str,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    seed: int,
    **options: Any,
) -> str:
    """Continue a text; see :meth:`~lightning_megatrain.language_model.CausalLM.generate`. The global random state is left as it was."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else [start]
    input_ids = torch.tensor([ids], device=device)
    settings = {"do_sample": True, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, **options}
    training = model.training
    model.eval()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            output = model.generate(
                input_ids=input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=max_new_tokens, **settings
            )
    finally:
        model.train(training)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
