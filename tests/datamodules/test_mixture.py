import gc
import json
import weakref

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers import AutoConfig

from lightning_megatrain.datamodules import MixtureDataModule
from lightning_megatrain.language_model import CausalLM

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def domains(tmp_path):
    for name, count in (("many", 60), ("few", 20)):
        lines = [json.dumps({"text": f"{name} {i} " + "word " * (i % 9)}) + "\n" for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return {name: {"files": f"{tmp_path}/{name}.jsonl"} for name in ("many", "few")}


def ready(domains, tmp_path, **arguments):
    settings = {"tokenizer": "bytes", "block_size": 16, "batch_size": 4, "packing": "packed", "cache_dir": str(tmp_path / "cache")}
    data = MixtureDataModule(domains, **{**settings, **arguments})
    data.prepare_data()
    data.setup("fit")
    return data


def test_batches_have_what_a_causal_lm_needs(domains, tmp_path):
    batch = next(iter(ready(domains, tmp_path).train_dataloader()))
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert all(value.shape == (4, 16) and value.dtype == torch.int64 for value in batch.values())
    padded = next(iter(ready(domains, tmp_path, packing="padded").train_dataloader()))
    assert set(padded) == {"input_ids", "labels", "attention_mask"}


def test_there_is_one_validation_loader_per_domain_with_its_own_documents(domains, tmp_path):
    data = ready(domains, tmp_path, val_fraction=0.2)
    assert data.domain_names == ["many", "few"]
    for name, loader in zip(data.domain_names, data.val_dataloader(), strict=True):
        text = data.tokenizer.decode(torch.cat([batch["input_ids"].flatten() for batch in loader]).tolist())
        assert name in text
        assert not any(other in text for other in data.domain_names if other != name)


def test_another_block_size_uses_the_same_tokens_on_disk(domains, tmp_path):
    ready(domains, tmp_path)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    ready(domains, tmp_path, block_size=8, batch_size=2)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == written


def test_changed_content_is_tokenised_anew(domains, tmp_path):
    before = len(ready(domains, tmp_path).rows["train"]["few"])
    with (tmp_path / "few.jsonl").open("a") as file:
        file.write(json.dumps({"text": "much more " * 100}) + "\n")
    assert len(ready(domains, tmp_path).rows["train"]["few"]) > before


def test_without_proportions_each_domain_weighs_as_many_rows_as_it_has(domains, tmp_path):
    data = ready(domains, tmp_path)
    sizes = [len(rows) for rows in data.rows["train"].values()]
    assert data.proportions() == pytest.approx([size / sum(sizes) for size in sizes])


def test_without_proportions_an_epoch_is_each_row_once(domains, tmp_path):
    loader = ready(domains, tmp_path).train_dataloader()
    drawn = torch.cat([loader.last.index for _ in loader])
    assert sorted(drawn.tolist()) == list(range(loader.num_samples))


def test_rows_come_in_the_proportions_given(domains, tmp_path):
    data = ready({**domains, "many": {**domains["many"], "proportion": 1}, "few": {**domains["few"], "proportion": 3}}, tmp_path)
    assert data.proportions() == [0.25, 0.75]
    loader = data.train_dataloader()
    drawn = [loader.last for _ in loader]
    domain, index = torch.cat([d.domain for d in drawn]), torch.cat([d.index for d in drawn])
    assert loader.domains == ["many", "few"]
    assert abs((domain == 0).sum() - 0.25 * len(domain)) <= 2  # in a part of a window
    size = len(data.rows["train"]["few"])
    assert len(set(index[domain == 1][:size].tolist())) == size, "no row twice before every other once"


def test_a_resumed_run_goes_on_where_it_was_although_the_schedule_asked_for_the_number_of_steps(domains, tmp_path):
    class Asking(CausalLM):
        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches > 3
            return super().configure_optimizers()

        def on_train_batch_start(self, batch, batch_idx):
            super().on_train_batch_start(batch, batch_idx)
            self.seen.append(self.trainer.train_dataloader.last.index.tolist())

    runs = []
    for ckpt_path in (None, tmp_path / "step=3.ckpt"):
        model, data = Asking(LLAMA), ready(domains, tmp_path)
        model.seen = []
        saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        trainer = L.Trainer(max_steps=6, callbacks=[saver], logger=False, enable_progress_bar=False, accelerator="cpu", limit_val_batches=0)
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
        runs.append(model.seen)
    assert runs[1] == runs[0][3:]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"block_size": 1}, ValueError, "`block_size` is 1: it must be at least 2"),
        ({"batch_size": 0}, ValueError, "`batch_size` is 0"),
        ({"packing": "tight"}, ValueError, "`packing` is 'tight'"),
        ({"val_fraction": 0.6, "test_fraction": 0.4}, ValueError, "`val_fraction` 0.6 and `test_fraction` 0.4"),
        ({"domains": {"a": {"files": "nowhere.txt"}}}, FileNotFoundError, "Domain 'a': no file matches 'nowhere.txt'"),
    ],
)
def test_a_wrong_setting_is_refused_at_once(domains, arguments, error, message):
    with pytest.raises(error, match=message):
        MixtureDataModule(**{"domains": domains, "tokenizer": "bytes", **arguments})


@pytest.mark.parametrize(
    ("model", "arguments", "error", "message"),
    [
        (LLAMA, {"block_size": 128}, ValueError, "`block_size` is 128, but the model has 64 positions: set block_size=64 or less"),
        ({**LLAMA, "vocab_size": 200}, {}, ValueError, "tokenizer 'bytes' has 259 tokens, but the model's vocabulary holds 200"),
        (LLAMA, {"domains": {"hollow": {"files": "hollow.txt"}}}, ValueError, "Domain 'hollow' is empty: hollow.txt holds no text"),
        (LLAMA, {"tokenizer": "no/such"}, ValueError, "No tokenizer could be loaded from 'no/such'"),
    ],
    ids=["positions", "vocabulary", "empty", "tokenizer"],
)
def test_bad_data_is_refused_before_weights_or_tokens_are_made(domains, tmp_path, monkeypatch, model, arguments, error, message):
    (tmp_path / "hollow.txt").write_text(" \n")
    monkeypatch.setattr(CausalLM, "configure_model", lambda self: pytest.fail("the weights were built"))
    data = MixtureDataModule(
        **{"domains": domains, "tokenizer": "bytes", "block_size": 32, "cache_dir": str(tmp_path / "cache"), **arguments}
    )
    trainer = L.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(error, match=message):
        trainer.fit(CausalLM(model), data)
    assert not (tmp_path / "cache").exists()


def test_auto_packs_attention_and_pads_hybrids(domains, tmp_path):
    class Module(L.LightningModule):
        def __init__(self, config):
            super().__init__()
            self.config = config

    for model_type, keys in (("llama", {"position_ids"}), ("mamba", {"attention_mask"})):
        data = MixtureDataModule(domains, "bytes", block_size=16, cache_dir=str(tmp_path / "cache"))
        data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        data.trainer.strategy._lightning_module = Module(AutoConfig.for_model(model_type, vocab_size=300))
        data.prepare_data()
        data.setup("fit")
        assert keys < set(next(iter(data.train_dataloader())))


def test_auto_asks_when_it_cannot_know(domains, tmp_path):
    with pytest.raises(MisconfigurationException, match="packing='auto' needs .* Set packing='packed' or packing='padded'"):
        ready(domains, tmp_path, packing="auto")


def test_test_documents_are_their_own_or_asked_for(domains, tmp_path):
    with pytest.raises(MisconfigurationException, match="set `test_fraction`"):
        ready(domains, tmp_path).test_dataloader()
    assert len(ready(domains, tmp_path, test_fraction=0.2).test_dataloader()) == 2


@pytest.mark.parametrize("make", [lambda domains: MixtureDataModule(domains, tokenizer="bytes"), lambda _: CausalLM(LLAMA)])
def test_what_the_caller_holds_goes_when_the_caller_returns(domains, make):
    """Loaders whose workers run, say: the garbage collector ends them late, and slowly."""

    class Held:
        pass

    def caller():
        held = Held()
        made = make(domains)
        return weakref.ref(held), made

    gc.disable()
    try:
        held, made = caller()
        assert held() is None
        assert made.hparams
    finally:
        gc.enable()
