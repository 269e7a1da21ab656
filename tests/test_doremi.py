import json

import pytest
import torch

from lightning_megatrain.cli import main

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


def test_one_command_runs_reference_proxy_and_final_stage(tmp_path, capsys):
    for name, words in (("code", "def f(x): return x"), ("prose", "the quick brown fox")):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{words} {i} " * 4}) + "\n" for i in range(40)))
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "smaller.yaml").write_text(SMALLER)
    command = ["doremi", "-c", "config.yaml", "--proxy", "smaller.yaml", "--output", "out"]
    main(command)
    shares = json.loads((tmp_path / "out" / "shares.json").read_text())
    assert shares.keys() == {"code", "prose"}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["code"] != 0.5
    sizes = {}
    for name in ("reference", "final"):
        state = torch.load(tmp_path / "out" / f"{name}.ckpt", weights_only=False)["state_dict"]
        sizes[name] = state["model.model.embed_tokens.weight"].shape[1]
    assert sizes == {"reference": 8, "final": 16}
    capsys.readouterr()
    main(command)
    assert "DoReMi: reference" not in capsys.readouterr().out, "what is there is not made again"
