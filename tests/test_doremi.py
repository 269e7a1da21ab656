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


@pytest.fixture
def texts(tmp_path):
    for name, words in (("code", "def f(x): return x"), ("prose", "the quick brown fox")):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{words} {i} " * 4}) + "\n" for i in range(40)))
    (tmp_path / "config.yaml").write_text(CONFIG)


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(
    "smaller", [["--proxy", "smaller.yaml"], ["--proxy.hidden_size", "8", "--proxy.intermediate_size=16", "--proxy.num_hidden_layers=1"]]
)
def test_one_command_runs_reference_proxy_and_final_stage(tmp_path, capsys, smaller):
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


SAVER = "{class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {dirpath: saved, every_n_train_steps: 2, save_last: true}}"
SAVED = CONFIG.replace("limit_val_batches: 0}", f"limit_val_batches: 0, callbacks: [{SAVER}]}}") + "ckpt_path: last\n"


@pytest.mark.usefixtures("texts")
def test_each_stage_resumes_from_its_own_checkpoint_and_from_no_others(tmp_path):
    (tmp_path / "config.yaml").write_text(SAVED)
    command = ["doremi", "-c", "config.yaml", "--proxy.num_hidden_layers", "1", "--output"]
    main([*command, "first"])
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"reference", "proxy", "final"}
    (tmp_path / "config.yaml").write_text(CONFIG)
    main([*command, "plain"])
    shares = [(tmp_path / run / "shares.json").read_text() for run in ("first", "plain")]
    assert shares[0] == shares[1]
    first, plain = (torch.load(tmp_path / run / "final.ckpt", weights_only=False)["state_dict"] for run in ("first", "plain"))
    assert all(torch.equal(first[name], plain[name]) for name in plain)
    # stopped after the proxy's last step and before its shares were written
    (tmp_path / "config.yaml").write_text(SAVED)
    (tmp_path / "first" / "shares.json").unlink()
    main([*command, "first"])
    assert (tmp_path / "first" / "shares.json").read_text() == shares[0]


@pytest.mark.usefixtures("texts")
def test_what_cannot_give_shares_is_refused_before_time_is_spent(tmp_path, capsys):
    def refused(*arguments):
        with pytest.raises((SystemExit, ValueError)) as error:
            main(["doremi", "-c", "config.yaml", *arguments])
        return str(error.value) + capsys.readouterr().err

    assert "`step_size` must be positive" in refused("--step-size", "-1")
    assert "`smoothing` between 0 and 1" in refused("--smoothing", "5")
    assert "config.yaml" in refused("--output", "config.yaml/out")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "shares.json").write_text('{"code": 0.5,')
    assert "shares.json holds no shares of domains" in refused("--output", "cut")
    (tmp_path / "config.yaml").write_text(CONFIG + "ckpt_path: mine.ckpt\n")
    assert "`ckpt_path` mine.ckpt would be loaded into reference, proxy and final model alike" in refused("--output", "out")
    assert not (tmp_path / "out" / "reference.ckpt").exists()


@pytest.mark.usefixtures("texts")
def test_a_proxy_too_short_for_an_update_is_named_and_leaves_no_shares(tmp_path, capsys):
    (tmp_path / "short.yaml").write_text("trainer: {max_steps: 1}")
    command = ["doremi", "-c", "config.yaml", "--proxy", "short.yaml", "--output", "out"]
    with pytest.raises(SystemExit):
        main(command)
    assert "ended after 1 steps without an update of the shares" in capsys.readouterr().err
    assert not (tmp_path / "out" / "shares.json").exists()
    (tmp_path / "short.yaml").write_text("trainer: {max_steps: 2}")
    main(command)
    assert sum(json.loads((tmp_path / "out" / "shares.json").read_text()).values()) == pytest.approx(1)


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
