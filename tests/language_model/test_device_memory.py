"""The formula for device memory against the emulated accelerator's own count, and at 512 k tokens."""

import re

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.language_model import CausalLM, device_peak_bytes
from tests.emulated import EmulatedAccelerator, emulated_device


def llama(width, inner, layers, heads, kv_heads, vocabulary, model_type="llama"):
    return {
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
    }


def measured(fields, tokens, token_slice, loss_slice, saved_inputs="host"):
    """The device's own count of its peak in a second step."""

    class CountSecond(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            device.reset_counters()

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, fields["vocab_size"], (2, tokens), generator=generator)
    torch.manual_seed(0)
    module = CausalLM(
        fields,
        attn_implementation="sdpa",
        optimizer="torch.optim.SGD",
        schedule="constant",
        loss_slice=loss_slice,
        token_slice=token_slice,
    )
    with emulated_device() as device:
        L.Trainer(
            accelerator=EmulatedAccelerator(),
            strategy=MegaTrainStrategy(saved_inputs=saved_inputs),
            precision="bf16-true",
            max_steps=2,
            callbacks=[CountSecond()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, DataLoader([{"input_ids": row, "labels": row.clone()} for row in ids], batch_size=1))
        return device.peak_bytes


# Each with another part as its peak.
SIZES = {
    "attention": (llama(64, 64, 4, 4, 4, 128), 768, 64, 64),
    "attention of grouped heads": (llama(128, 128, 3, 8, 4, 128), 512, 64, 64),
    "mlp": (llama(64, 384, 5, 4, 1, 128), 512, 128, 64),
    "mlp, with a head that counts": (llama(64, 384, 5, 4, 1, 1024), 512, 512, 64),
    "loss": (llama(64, 96, 3, 2, 2, 2048), 512, 64, 256),
}


@pytest.mark.long
@pytest.mark.parametrize("peak_in", SIZES)
def test_the_formula_is_what_a_device_counts(peak_in):
    fields, tokens, token_slice, loss_slice = SIZES[peak_in]
    formula = device_peak_bytes(AutoConfig.for_model(**fields), tokens, token_slice=token_slice, loss_slice=loss_slice)
    assert formula == pytest.approx(measured(fields, tokens, token_slice, loss_slice), rel=0.02)


@pytest.mark.long
def test_inputs_that_stay_on_the_device_add_one_for_each_layer():
    fields = llama(64, 64, 4, 4, 4, 128)
    formula = device_peak_bytes(AutoConfig.for_model(**fields), 512, token_slice=64, loss_slice=64, saved_inputs="device")
    assert formula == pytest.approx(measured(fields, 512, 64, 64, "device"), rel=0.02)


SEVEN_BILLION = {
    "Llama-2-7B": llama(4096, 11008, 32, 32, 32, 32000),  # keys as wide as queries: the most memory of these
    "Llama-3-8B": llama(4096, 14336, 32, 32, 8, 128256),
    "Qwen2.5-7B": llama(3584, 18944, 28, 28, 4, 152064, "qwen2"),
}


@pytest.mark.parametrize("name", SEVEN_BILLION)
def test_seven_billion_parameters_at_half_a_million_tokens_fit_in_80_gb(name):
    config = AutoConfig.for_model(**SEVEN_BILLION[name])
    tokens = 524288
    peak = device_peak_bytes(config, tokens, token_slice=4096, loss_slice=4096)
    grouped = config.num_key_value_heads < config.num_attention_heads
    kernel = tokens * config.hidden_size * 4 * (2 if grouped else 1)  # what CUDA's flash attention takes besides
    assert peak + kernel <= 80e9
    whole = device_peak_bytes(config, tokens, token_slice=tokens, loss_slice=4096)
    assert whole > 80e9, "the MLP of all tokens at once would not fit"


def test_the_page_shows_what_the_formula_gives(repository, capsys):
    text = (repository / "docs" / "long_context.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    exec(compile(program, "long_context.md", "exec"), {})
    assert f"# {float(capsys.readouterr().out):.1f} GB" in program
    for name in ("Qwen2.5-7B", "Llama-3-8B", "Llama-2-7B"):
        peak = device_peak_bytes(AutoConfig.for_model(**SEVEN_BILLION[name]), 524288, token_slice=4096, loss_slice=4096)
        assert f"{peak / 1e9:.0f} GB for {name}" in text


def test_a_mask_is_made_only_where_documents_are_packed_or_padded():
    module = CausalLM(llama(32, 32, 1, 4, 4, 64), attn_implementation="sdpa")
    module.configure_model()
    masks = []
    module.model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    ids, ones = torch.arange(12)[None], torch.ones(1, 12, dtype=torch.long)
    rows = {
        "bare": {},
        "one document": {"position_ids": torch.arange(12)[None]},
        "no padding": {"attention_mask": ones},
        "packed": {"position_ids": torch.arange(6).repeat(2)[None]},
        "padded": {"attention_mask": torch.cat([ones[:, :8], 0 * ones[:, 8:]], dim=1)},
    }
    for row in rows.values():
        module._run({"input_ids": ids, **row})
    made = {name: mask is not None for name, mask in zip(rows, masks, strict=True)}
    assert made == {"bare": False, "one document": False, "no padding": False, "packed": True, "padded": True}
