"""`lightning-megatrain check` tells whether a model trains the same streamed as plain, and where it does not."""

from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from lightning_megatrain.check import main


def config(folder: Path, odd_block: str, **trainer: object) -> str:
    path = folder / "config.yaml"
    text = {
        "trainer": {"accelerator": "cpu", "strategy": "megatrain", "max_epochs": 5, **trainer},
        "model": {"class_path": "tests.check.subjects.Regression", "init_args": {"odd_block": odd_block}},
        "data": {"class_path": "tests.check.subjects.Points"},
    }
    path.write_text(yaml.safe_dump(text))
    return str(path)


def test_a_model_that_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["-c", config(tmp_path, "even", accumulate_grad_batches=3, gradient_clip_val=0.5)])
    text = capsys.readouterr().out
    assert text.count("8 of 8 equal bit for bit") == 3  # the gradients of two steps, and the parameters
    assert text.endswith("Streamed and plain training agree.\n")
    assert "<-- differ" not in text


def test_options_that_hide_gradients_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = {"class_path": "MegaTrainStrategy", "init_args": {"transient_gradients": True, "masters": "split"}}
    main(["-c", config(tmp_path, "even", strategy=strategy)])
    assert capsys.readouterr().out.endswith("Streamed and plain training agree.\n")


def test_a_backward_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["-c", config(tmp_path, "counting")])
    assert ended.value.code == 1
    text = capsys.readouterr().out
    assert "Every forward agrees. They part in the backward of 'blocks.2.linear'" in text
    assert text.endswith("Streamed and plain training do NOT agree.\n")


def test_a_forward_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["-c", config(tmp_path, "pass aware")])
    assert "They part in the forward of 'blocks.1' (checksums" in capsys.readouterr().out


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="trains with SingleDeviceStrategy; `check` compares plain training with `strategy: megatrain`"):
        main(["-c", config(tmp_path, "even", strategy="auto")])


def test_without_arguments_it_says_how_to_call_it(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert capsys.readouterr().out.startswith("usage: lightning-megatrain check -c config.yaml")


def language_model(folder: Path, model: object) -> str:
    """The path of a config that trains a language model on a few lines."""
    (folder / "text.jsonl").write_text("".join(f'{{"text": "{"a line of text, number " * 9}{number}"}}\n' for number in range(30)))
    text = {
        "trainer": {"accelerator": "cpu", "strategy": "megatrain", "precision": "bf16-mixed"},
        "model": {"class_path": "CausalLM", "init_args": {"model": model}},
        "data": {
            "class_path": "MixtureDataModule",
            "init_args": {
                "tokenizer": "bytes",
                "block_size": 32,
                "batch_size": 2,
                "val_fraction": 0.1,
                "cache_dir": str(folder / "cache"),
                "domains": {"lines": {"files": str(folder / "text.jsonl")}},
            },
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(text))
    return str(folder / "config.yaml")


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 12, "num_attention_heads": 2, "vocab_size": 264}


def test_a_model_described_by_its_config_is_shrunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["-c", language_model(tmp_path, {"model_type": "llama", "max_position_embeddings": 32, **SIZES})])
    out = capsys.readouterr().out
    assert "The model is shrunk from num_hidden_layers=12 to 2, with random weights." in out
    assert "21 of 21 equal bit for bit" in out


def test_a_pretrained_model_is_shrunk_by_its_config_and_its_weights_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain training of the whole may not fit on the device, which is why someone asks. Its config lists the kind of each layer."""
    config = AutoConfig.for_model("qwen3", max_position_embeddings=32, num_key_value_heads=2, head_dim=8, written_by="somebody", **SIZES)
    assert len(config.layer_types) == 12
    config.save_pretrained(tmp_path / "model")
    main(["-c", language_model(tmp_path, str(tmp_path / "model"))])
    out = capsys.readouterr().out
    assert "The model is shrunk from num_hidden_layers=12 to 2, with random weights." in out
    assert out.endswith("Streamed and plain training agree.\n")
