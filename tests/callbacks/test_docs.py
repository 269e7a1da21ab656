"""docs/policies.md: its own policy runs as it stands, and its configs train."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch

from lightning_megatrain import callbacks
from lightning_megatrain.cli import main
from tests.callbacks.modules import Linear, Llama, fit, points


def block_of(repository, word):
    text = (repository / "docs" / "policies.md").read_text()
    (source,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.S) if word in block)
    return source


def test_the_policy_of_the_text_runs(repository):
    source = block_of(repository, "class ShortFirst")
    lines = [line for line in source.splitlines() if line.strip()]
    assert len(lines) <= 30
    names = {}
    exec(source, names)
    rows = [{"input_ids": torch.arange(1 + i % 8), "labels": torch.arange(1 + i % 8)} for i in range(16)]

    def collate(samples):
        return {k: torch.nn.utils.rnn.pad_sequence([s[k] for s in samples], batch_first=True, padding_value=0) for k in samples[0]}

    lengths = []

    class Watched(Llama):
        def on_train_batch_start(self, batch, batch_idx):
            lengths.append(max(len(rows[i]["input_ids"]) for i in self.trainer.train_dataloader.last.index.tolist()))

    loader = torch.utils.data.DataLoader(rows, 2, shuffle=True, collate_fn=collate)
    policy = names["ShortFirst"](grow=0.25, every_n_steps=2)
    fit(Watched(), loader, [policy])
    assert [m["samples"] for _, m in policy.history] == [4, 8, 12, 16]
    assert all(length <= bound for length, bound in zip(lengths, [2, 2, 4, 4, 6, 6, 8, 8], strict=True))


def test_the_reweighting_of_the_text_runs(repository, tmp_path):
    names = {}
    exec(block_of(repository, "def weigh"), names)
    module = Linear()
    fit(module, points(), [names["ByLoss"]()], default_root_dir=tmp_path)
    table = callbacks.read_decisions(tmp_path / "policies" / "ByLoss" / "decisions")
    index, score, weight = (table[column].to_numpy() for column in ("index", "score", "weight"))
    assert index.tolist() == sum(module.seen, [])
    assert score.min() < 4 < score.max()
    assert np.array_equal(weight, score.clip(max=4))


def test_the_text_names_every_field_that_a_weigh_is_given(repository):
    text = (repository / "docs" / "policies.md").read_text()
    properties = [name for name, value in vars(callbacks.StepLosses).items() if isinstance(value, property)]
    fields = [field.name for field in dataclasses.fields(callbacks.StepLosses)] + properties
    assert [name for name in fields if f"`{name}`" not in text] == []


def test_the_text_names_every_policy(repository):
    text = (repository / "docs" / "policies.md").read_text()
    for name in callbacks.__all__:
        policy = getattr(callbacks, name)
        if isinstance(policy, type) and issubclass(policy, callbacks.Policy) and not name.endswith("Policy"):
            assert f"| `{name}` |" in text, name
            assert any(f"class_path: {name}\n" in c.read_text() for c in (repository / "examples" / "policies").glob("*.yaml")), name


SMALL = """
trainer: {max_steps: 4, accelerator: cpu, enable_progress_bar: false, val_check_interval: 2, limit_val_batches: 1}
model:
  init_args:
    model: {model_type: llama, vocab_size: 264, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}
data: {init_args: {block_size: 32, batch_size: 4, val_fraction: 0.2}}
"""


@pytest.fixture
def project(tmp_path):
    """The demo's data in small, and a config that cuts its model down."""
    data = tmp_path / "demo_run" / "data"
    data.mkdir(parents=True)
    for name, words in (("code", "def f(x): return x"), ("prose", "the quick brown fox")):
        (data / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{words} {i} " * 4}) + "\n" for i in range(20)))
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path


def run(repository, policy, *more):
    main(["fit", "-c", str(repository / "examples" / "demo.yaml"), "-c", "small.yaml", "-c", str(policy), *more])


CONFIGS = ["random_selection", "loss_selection", "less", "replay_selection", "static_mixture", "odm", "doremi", "loss_reweighting"]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_example_config_trains(config, repository, project):
    path = repository / "examples" / "policies" / f"{config}.yaml"
    short = project / "policy.yaml"
    short.write_text(re.sub(r"(warmup_steps|every_n_steps): \d+", r"\1: 1", path.read_text()))
    if config == "replay_selection":
        run(repository, repository / "examples" / "policies" / "random_selection.yaml")
    if config == "doremi":
        run(repository, repository / "examples" / "policies" / "static_mixture.yaml", "--trainer.callbacks+=ModelCheckpoint")
        last = next((project / "demo_run").rglob("*.ckpt"))
        short.write_text(short.read_text().replace("demo_run/checkpoints/last.ckpt", str(last)))
    run(repository, short)
    (name,) = re.findall(r"class_path: (\w+)", path.read_text())
    assert list((project / "demo_run").rglob(f"policies/{name}/decisions/*.parquet"))
    assert list((project / "demo_run").rglob(f"policies/{name}/history.png"))


def test_every_config_is_tried(repository):
    assert sorted(CONFIGS) == sorted(p.stem for p in (repository / "examples" / "policies").glob("*.yaml"))
