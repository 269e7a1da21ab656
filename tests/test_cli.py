import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.cli import main
from lightning_megatrain.export import export
from lightning_megatrain.language_model import CausalLM


@pytest.fixture
def config(tmp_path):
    """A config as a user writes it; a test changes the mapping and calls `write`."""
    for name in ("ants", "bees"):
        lines = [json.dumps({"text": f"{name} number {i} " * 4}) + "\n" for i in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return {
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 2,
            "logger": False,
            "enable_progress_bar": False,
            "callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"dirpath": "saved", "save_last": True}}],
        },
        "model": {
            "class_path": "CausalLM",
            "init_args": {
                "model": {
                    "model_type": "llama",
                    "vocab_size": 300,
                    "hidden_size": 16,
                    "intermediate_size": 32,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "max_position_embeddings": 32,
                }
            },
        },
        "data": {
            "class_path": "MixtureDataModule",
            "init_args": {
                "tokenizer": "bytes",
                "block_size": 32,
                "batch_size": 2,
                "test_fraction": 0.1,
                "cache_dir": "cache",
                "domains": {"ants": {"files": "ants.jsonl"}, "bees": {"files": "bees.jsonl"}},
            },
        },
    }


def write(config):
    with open("config.yaml", "w") as file:
        yaml.safe_dump(config, file)


def run(config, *arguments):
    write(config)
    main([arguments[0], "-c", "config.yaml", *arguments[1:]])


def test_fit_then_validate_test_and_predict_from_the_same_config(config, tmp_path, capsys):
    run(config, "fit")
    assert (tmp_path / "saved" / "last.ckpt").is_file()
    assert (tmp_path / "config.yaml").is_file()
    for command in ("validate", "test"):
        capsys.readouterr()
        run(config, command, "--ckpt_path=saved/last.ckpt")
        printed = capsys.readouterr().out
        prefix = {"validate": "val", "test": "test"}[command]
        assert f"{prefix}_perplexity/ants" in printed
        assert f"{prefix}_perplexity/bees" in printed
    run(config, "predict", "--ckpt_path=saved/last.ckpt", "--return_predictions=false")


def test_the_strategy_is_megatrain_unless_told_otherwise(config, monkeypatch):
    used = []
    monkeypatch.setattr(CausalLM, "on_fit_start", lambda self: used.append(self.trainer.strategy))
    run(config, "fit")
    run(config, "fit", "--trainer.strategy=auto")
    config["trainer"]["strategy"] = {"class_path": "MegaTrainStrategy", "init_args": {"fused_optimizer": False}}
    run(config, "fit")
    assert [isinstance(strategy, MegaTrainStrategy) for strategy in used] == [True, False, True]


def test_a_second_run_in_the_same_folder_resumes(config):
    run(config, "fit")
    run(config, "fit", "--trainer.max_steps=3", "--ckpt_path=saved/last.ckpt")
    assert torch.load("saved/last.ckpt", weights_only=True)["global_step"] == 3


def test_the_config_counts_not_the_checkpoints_hyperparameters(config, monkeypatch):
    run(config, "fit")
    rates = []
    monkeypatch.setattr(CausalLM, "on_validation_end", lambda self: rates.append(self.hparams["learning_rate"]))
    run(config, "validate", "--ckpt_path=saved/last.ckpt", "--model.init_args.learning_rate=0.5")
    assert rates == [0.5]


def test_subclasses_with_other_arguments_run_from_the_command_line(config, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from lightning_megatrain.datamodules import MixtureDataModule\n"
        "from lightning_megatrain.language_model import CausalLM\n"
        "class Model(CausalLM):\n"
        "    def __init__(self, model: dict, width: int = 3):\n"
        "        super().__init__(model, schedule='constant')\n"
        "class Data(MixtureDataModule):\n"
        "    def __init__(self, domains: dict, rows: int = 2):\n"
        "        super().__init__(domains, tokenizer='bytes', block_size=16, batch_size=rows, cache_dir='cache')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    domains = {"ants": {"files": "ants.jsonl"}, "bees": {"files": "bees.jsonl"}}
    config["model"] = {"class_path": "mine.Model", "init_args": {"model": config["model"]["init_args"]["model"]}}
    config["data"] = {"class_path": "mine.Data", "init_args": {"domains": domains, "rows": 3}}
    run(config, "fit")
    saved = torch.load("saved/last.ckpt", weights_only=True)
    assert saved["hyper_parameters"]["width"] == 3
    assert {"tokenizer": "bytes", "block_size": 16}.items() <= saved["datamodule_hyper_parameters"].items()


@pytest.mark.parametrize(
    ("place", "key", "message"),
    [
        (("trainer",), "max_step", "max_step"),
        (("model", "init_args"), "learning_rte", "learning_rte"),
        (("data", "init_args"), "blok_size", "blok_size"),
        (("data", "init_args", "domains", "ants"), "file", "file"),
        ((), "trianer", "trianer"),
    ],
)
def test_an_unknown_key_is_named_before_anything_is_written(config, tmp_path, capsys, place, key, message):
    target = config
    for step in place:
        target = target[step]
    target[key] = 1
    with pytest.raises(SystemExit):
        run(config, "fit")
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "saved").exists()


def test_a_key_given_twice_is_named_with_its_line(config, capsys):
    write(config)
    with open("config.yaml") as file:
        text = file.read()
    with open("config.yaml", "w") as file:
        file.write(text.replace("      bees:\n", "      ants:\n"))
    with pytest.raises(SystemExit):
        main(["fit", "-c", "config.yaml"])
    assert "'ants' is given twice, the second time in line" in capsys.readouterr().err


def test_the_command_runs_as_a_module():
    shown = subprocess.run([sys.executable, "-m", "lightning_megatrain", "--help"], capture_output=True, text=True, check=True).stdout
    for command in ("fit", "validate", "test", "predict", "export"):
        assert command in shown


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}], ids=["full", "lora"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_exported_folder_computes_what_the_checkpoint_does(config, tmp_path, lora, tied):
    config["model"]["init_args"]["lora"] = lora
    config["model"]["init_args"]["model"]["tie_word_embeddings"] = tied
    run(config, "fit")
    main(["export", "--ckpt", "saved/last.ckpt", "--output", "out/model"])
    model, tokenizer = AutoModelForCausalLM.from_pretrained("out/model"), AutoTokenizer.from_pretrained("out/model")
    ids = tokenizer("ants and bees", return_tensors="pt")["input_ids"]
    trained = CausalLM.load_from_checkpoint("saved/last.ckpt").eval()
    expected = trained({"input_ids": ids})
    # Merged adapters add the same numbers in another order.
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0, atol=0 if lora is None else 1e-5)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"], "nothing half-written is left beside it"
    assert any(path.suffix == ".safetensors" for path in (tmp_path / "out" / "model").iterdir())


def test_a_model_from_a_folder_is_exported_without_its_old_weights(config, tmp_path, monkeypatch):
    torch.manual_seed(0)
    base = CausalLM(config["model"]["init_args"]["model"])
    base.configure_model()
    base.model.save_pretrained("base")
    config["model"]["init_args"]["model"] = "base"
    run(config, "fit")
    (tmp_path / "base" / "model.safetensors").unlink()
    export("saved/last.ckpt", "out", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained("out")
    assert model.dtype == torch.bfloat16


def test_what_a_subclass_has_besides_the_model_is_left_out_with_a_warning(config):
    class WithProbe(CausalLM):
        def __init__(self, model, width=3):
            super().__init__(model)
            self.probe = torch.nn.Linear(2, width)

    torch.manual_seed(0)
    module = WithProbe(config["model"]["init_args"]["model"], width=5)
    module.configure_model()
    content = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "callbacks": {"best": Path("best.ckpt")}}
    torch.save(content, "probed.ckpt")
    with pytest.warns(UserWarning, match=r"other weights are left out: probe.weight, probe.bias\."):
        main(["export", "--ckpt", "probed.ckpt", "--output", "out", "--tokenizer", "bytes", "--weights_only", "false"])
    ids = torch.tensor([[1, 2, 3]])
    expected = module.eval()({"input_ids": ids})
    assert torch.equal(AutoModelForCausalLM.from_pretrained("out")(input_ids=ids).logits, expected)


def test_export_refuses_what_it_cannot_do_and_writes_nothing(config, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "broken.ckpt").write_bytes(b"PK no")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    hyperparameters = {"model": config["model"]["init_args"]["model"]}
    bytes_ = {"tokenizer": "bytes"}
    torch.save({"state_dict": {}, "hyper_parameters": hyperparameters}, tmp_path / "untold.ckpt")
    torch.save({"state_dict": {}, "hyper_parameters": hyperparameters, "datamodule_hyper_parameters": bytes_}, tmp_path / "less.ckpt")
    torch.save({"state_dict": {}, "hyper_parameters": hyperparameters, "callbacks": tmp_path}, tmp_path / "objects.ckpt")
    (tmp_path / "sharded.ckpt").mkdir()
    for ckpt, output, message in (
        ("no.ckpt", "out", "There is no checkpoint no.ckpt"),
        ("other.ckpt", "full", "full exists and is not an empty folder"),
        ("broken.ckpt", "out", "broken.ckpt cannot be read as a checkpoint"),
        ("other.ckpt", "out", "other.ckpt is no checkpoint of a CausalLM"),
        ("less.ckpt", "out", "The weights of less.ckpt are not those of its hyperparameter `model`"),
        ("objects.ckpt", "out", "objects.ckpt holds more than tensors and plain values: pathlib"),
        ("sharded.ckpt", "out", "sharded.ckpt is a folder, as FSDP and DeepSpeed write it"),
        ("untold.ckpt", "out", "does not name a tokenizer: give one with `--tokenizer`"),
    ):
        with pytest.raises(SystemExit):
            main(["export", "--ckpt", ckpt, "--output", output])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
