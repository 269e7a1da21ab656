import json

import pytest
import torch
from transformers import Qwen2Config

from lightning_megatrain import doremi
from lightning_megatrain.cli import main
from lightning_megatrain.language_model.hugging_face_models import load_config

CONFIG = """
trainer: {max_steps: 4, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false, limit_val_batches: 0}
model:
  class_path: CausalLM
  init_args:
    schedule: constant
    model: {model_type: llama, vocab_size: 264, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}
data:
  class_path: MixtureDataModule
  init_args:
    tokenizer: bytes
    block_size: 32
    batch_size: 4
    cache_dir: cache
    domains: {code: {files: code.jsonl}, prose: {files: prose.jsonl}}
"""
SMALLER = """
model:
  init_args:
    model: {model_type: llama, vocab_size: 264, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2}
"""


@pytest.mark.parametrize(
    "smaller", [["--proxy", "smaller.yaml"], ["--proxy.hidden_size", "8", "--proxy.intermediate_size=16", "--proxy.num_hidden_layers=1"]]
)
def test_one_command_runs_reference_proxy_and_final_stage(tmp_path, capsys, smaller):
    for name, words in (("code", "def f(x): return x"), ("prose", "the quick brown fox")):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{words} {i} " * 4}) + "\n" for i in range(40)))
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "smaller.yaml").write_text(SMALLER)
    command = ["doremi", "-c", "config.yaml", *smaller, "--output", "out"]
    main(command)
    shares = json.loads((tmp_path / "out" / "shares.json").read_text())
    assert shares.keys() == {"code", "prose"}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["code"] != 0.5
    sizes = {}
    for name in ("reference", "final"):
        state = torch.load(tmp_path / "out" / f"{name}.ckpt", weights_only=False)["state_dict"]
        layers = {key.split(".")[3] for key in state if key.startswith("model.model.layers.")}
        sizes[name] = state["model.model.embed_tokens.weight"].shape[1], len(layers)
    assert sizes == {"reference": (8, 1), "final": (16, 2)}
    capsys.readouterr()
    main(command)
    assert "DoReMi: reference" not in capsys.readouterr().out, "what is there is not made again"


def test_fields_change_a_pretrained_models_config_and_what_it_lists_for_each_layer(tmp_path):
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    Qwen2Config(num_hidden_layers=3, layer_types=kinds, hidden_size=64, rope_theta=5e5).save_pretrained(tmp_path)
    model = {"class_path": "lightning_megatrain.language_model.CausalLM", "init_args": {"model": str(tmp_path), "revision": None}}
    doremi._change(model, {"num_hidden_layers": 2, "hidden_size": 32})
    config = load_config(model["init_args"]["model"])
    assert (config.num_hidden_layers, config.hidden_size, config.layer_types) == (2, 32, kinds[:2])
    assert config.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--proxy.hidden_sise", "8"], "unknown key 'hidden_sise': LlamaConfig has no such field"),
        (["--proxy.hidden_size"], "--proxy.hidden_size needs a value"),
        (["--porxy.hidden_size", "8"], "unrecognized arguments: --porxy.hidden_size"),
    ],
)
def test_wrong_fields_are_named(tmp_path, capsys, arguments, message):
    (tmp_path / "config.yaml").write_text(CONFIG.replace("code.jsonl", "config.yaml").replace("prose.jsonl", "config.yaml"))
    with pytest.raises((SystemExit, ValueError)) as error:
        main(["doremi", "-c", "config.yaml", *arguments])
    assert message in str(error.value) + capsys.readouterr().err


def test_fields_of_another_module_are_refused():
    with pytest.raises(ValueError, match=r"--proxy.hidden_size changes the config of a CausalLM, but the model is mine.Module: give"):
        doremi._change({"class_path": "mine.Module", "init_args": {"width": 8}}, {"hidden_size": 8})
