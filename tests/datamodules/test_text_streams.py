"""Streamed domains of text: the rows of the token cache without it, mixed and resumed exactly, from files and Hugging Face data sets."""

import json
from collections import Counter
from itertools import pairwise

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from lightning_megatrain.cli import main
from lightning_megatrain.datamodules import Domain, MixtureDataModule
from lightning_megatrain.datamodules.documents import DocumentSource, document_hash
from lightning_megatrain.datamodules.text_streams import TextStream
from lightning_megatrain.datamodules.tokenizers import load_tokenizer

BYTES = load_tokenizer("bytes")
NAMES = ("many", "few")
FILES, DOCUMENTS = 4, 30  # of each domain, and of each file


def text(name, file, i):
    return f"{name} {file}.{i} " + "".join(f"{name[0]}{file}.{i}.{k} " for k in range(7 * i % 12))  # no two rows are alike


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    for name in NAMES:
        for file in range(FILES):
            texts = [text(name, file, i) for i in range(DOCUMENTS)]
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{file}.jsonl").write_text("".join(json.dumps({"id": 1, "text": t}) + "\n" for t in texts))
            (tmp_path / f"{name}-parquet").mkdir(exist_ok=True)
            pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}-parquet" / f"{file}.parquet")
    return tmp_path


def ready(domains, folder, **arguments):
    settings = {"tokenizer": "bytes", "block_size": 32, "batch_size": 4, "packing": "packed", "val_fraction": 0, "steps_per_epoch": 20}
    data = MixtureDataModule(domains, cache_dir=str(folder / "cache"), **{**settings, **arguments})
    data.prepare_data()
    data.setup("fit")
    return data


def sources(folder, name):
    return {
        "files": {"files": f"{folder}/{name}/*.jsonl"},
        "parquet": {"files": f"{folder}/{name}-parquet/*.parquet"},
        "data set": {"dataset": f"{folder}/{name}-parquet"},
        "saved": {"dataset": f"{folder}/saved"},
    }


def same(rows, others):
    rows, others = list(rows), list(others)
    assert len(rows) == len(others) > 10
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        assert all(torch.equal(row[key], other[key]) for key in row)


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("kind", ["files", "parquet", "data set", "saved"])
def test_a_stream_has_the_rows_of_the_token_cache(folder, monkeypatch, kind, packing):
    monkeypatch.setattr("lightning_megatrain.datamodules.text_streams.batched", lambda texts: ([t] for t in texts))  # rows go over batches
    datasets.Dataset.from_dict({"text": [text("many", 0, i) for i in range(DOCUMENTS)]}).save_to_disk(folder / "saved")
    source = sources(folder, "many")[kind]
    cached = ready({"many": source}, folder, packing=packing).rows["train"]["many"]
    streamed = ready({"many": {**source, "streamed": True}}, folder, packing=packing).rows["train"]["many"]
    assert isinstance(streamed, TextStream)
    same(streamed, (cached[i] for i in range(len(cached))))
    same(streamed, streamed)  # and again in the next pass


def test_nothing_is_kept_on_disk_and_a_data_set_is_not_downloaded(folder):
    data = ready({"many": {**sources(folder, "many")["data set"], "streamed": True}}, folder)
    assert len(list(data.train_dataloader())) == 20
    assert not (folder / "cache").exists()
    assert not [path for path in folder.glob("hf/**/*") if path.suffix == ".arrow"]


def test_streams_keep_the_order_of_their_documents_where_no_shards_are_shared_out(folder):
    data = ready({"many": {"files": f"{folder}/many/0.jsonl", "streamed": True}}, folder, packing="padded", num_workers=2, block_size=512)
    rows = [row for batch in data.train_dataloader() for row in batch["input_ids"]]
    read = [BYTES.decode(row.tolist(), skip_special_tokens=True) for row in rows]
    assert read == [text("many", 0, i % DOCUMENTS) for i in range(80)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["files", "data set"])
@pytest.mark.parametrize("shuffle_buffer", [0, 20])
def test_domains_are_mixed_exactly_and_resumed_exactly(folder, kind, world_size, num_workers, shuffle_buffer):
    domains = {
        name: {**sources(folder, name)[kind], "streamed": True, "proportion": share, "shuffle_buffer": shuffle_buffer}
        for name, share in zip(NAMES, (3, 1), strict=True)
    }

    def loaders():
        made = [ready(domains, folder, num_workers=num_workers).train_dataloader() for _ in range(world_size)]
        for rank, loader in enumerate(made):
            loader._rank, loader._world_size, loader._window = rank, world_size, 80 * world_size
        return made

    whole, batches, states, counts = loaders(), [], {}, Counter()
    for n, given in enumerate(zip(*whole, strict=True)):
        batches.append([batch["input_ids"] for batch in given])
        for loader in whole:
            counts.update(loader.last.domain.tolist())
        states[n] = whole[0].state_dict()  # of rank 0 alone, as Lightning keeps it
    assert counts == {0: 60 * world_size, 1: 20 * world_size}
    everything = [tuple(row.tolist()) for step in batches for batch in step for row in batch]
    assert len(set(everything)) == len(everything), "no row comes twice in one pass"
    for n in (2, 13):
        resumed = loaders()
        for loader in resumed:
            loader.load_state_dict(states[n])
        rest = [[batch["input_ids"] for batch in given] for given in zip(*resumed, strict=True)]
        assert len(rest) == 19 - n
        assert all(torch.equal(a, b) for one, other in zip(rest, batches[n + 1 :], strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shuffle_buffer_mixes_documents_before_they_are_packed(folder, num_workers):
    """Validation documents stay the first ones, and each pass has its own order."""
    domain = {"files": f"{folder}/many/[01].jsonl", "streamed": True, "val_documents": 3}

    def read(**more):
        data = ready({"many": {**domain, **more}}, folder, packing="padded", block_size=512, num_workers=num_workers, steps_per_epoch=27)
        rows = [row for batch in data.train_dataloader() for row in batch["input_ids"]]
        return [BYTES.decode(row.tolist(), skip_special_tokens=True) for row in rows], list(data.rows["val"]["many"])

    (plain, held), (mixed, still_held) = read(), read(shuffle_buffer=20)
    assert len(plain) == 108
    same([*held] * 4, [*still_held] * 4)
    if num_workers == 0:
        first, second = mixed[:57], mixed[57:]
        assert sorted(first) == sorted(plain[:57])
        assert first != plain[:57]
        assert [t for t in first if t in set(second)] != second, "the next pass has another order"
    assert set(mixed) == set(plain)
    assert read(shuffle_buffer=20)[0] == mixed


def test_a_resume_with_another_shuffle_buffer_of_a_domain_is_refused(folder):
    def loader(buffer):
        domains = {name: {**sources(folder, name)["files"], "streamed": True} for name in NAMES}
        domains["few"]["shuffle_buffer"] = buffer
        return ready(domains, folder).train_dataloader()

    state = loader(20).state_dict()
    assert state["shuffle_buffers"] == {"many": 0, "few": 20}
    loader(20).load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle_buffer=20 for the stream 'few', which now has shuffle_buffer=10"):
        loader(10).load_state_dict(state)


@pytest.mark.parametrize("kind", ["files", "parquet", "data set"])
def test_each_part_reads_its_own_documents_and_together_all(folder, kind):
    source = DocumentSource("many", Domain(**sources(folder, "many")[kind], streamed=True))
    assert source.num_shards == FILES
    parts = [list(source.shard(2, index)) for index in range(2)]
    assert [len(part) for part in parts] == [2 * DOCUMENTS] * 2
    assert sorted(sum(parts, [])) == sorted(source)


def decode(rows):
    return BYTES.decode(torch.cat([rows[i]["input_ids"] for i in range(len(rows))]).tolist(), skip_special_tokens=True)


@pytest.mark.parametrize(
    ("own", "held"),
    [
        ({"val_documents": 40}, [*(("many", 0, i) for i in range(30)), *(("many", 1, i) for i in range(10))]),
        ({"val_files": "few/*.jsonl"}, [("few", file, i) for file in range(FILES) for i in range(DOCUMENTS)]),
        ({"val_files": "few/*.jsonl", "val_documents": 5}, [("few", 0, i) for i in range(5)]),
        ({"val_split": "validation"}, [("many", 3, i) for i in range(DOCUMENTS)]),
    ],
)
def test_validation_documents_are_those_named_and_not_trained_on(folder, monkeypatch, own, held):
    monkeypatch.chdir(folder)
    domain = {**sources(folder, "many")["files"], "streamed": True, **own}
    if "val_split" in own:
        (folder / "many-parquet" / "3.parquet").rename(folder / "many-parquet" / "validation.parquet")
        for file in range(3):
            (folder / "many-parquet" / f"{file}.parquet").rename(folder / "many-parquet" / f"train-{file}.parquet")
        domain = {"dataset": str(folder / "many-parquet"), "streamed": True, **own}
    data = ready({"many": domain}, folder, val_fraction=0.05)
    assert decode(data.rows["val"]["many"]) == "".join(text(*which) for which in held)
    stream = data.rows["train"]["many"]
    assert stream.held_out == {document_hash(text(*which)) for which in held}
    trained = "".join(BYTES.decode(row["input_ids"].tolist(), skip_special_tokens=True) for row in stream)
    files = 3 if "val_split" in own else FILES
    expected = [("many", file, i) for file in range(files) for i in range(DOCUMENTS) if ("many", file, i) not in held]
    assert trained == "".join(text(*which) for which in expected)


def test_validation_loaders_have_the_names_of_the_domains_they_are_of(folder):
    domains = {
        "none": {**sources(folder, "many")["files"], "streamed": True, "val_documents": 0},
        "few": {**sources(folder, "few")["files"], "streamed": True, "val_documents": 3},
        "cached": sources(folder, "many")["files"],
    }
    data = ready(domains, folder, val_fraction=0.05)
    assert data.domain_names == ["few", "cached"]
    assert len(data.val_dataloader()) == 2
    assert data.proportions() == pytest.approx([1 / 3] * 3)
    loader = data.train_dataloader()
    counts = Counter(domain for _ in loader for domain in loader.last.domain.tolist())
    assert max(abs(a - b) for a, b in pairwise(counts.values())) <= 4, "in a part of a window"


def test_a_part_without_a_document_to_train_on_is_told(folder):
    data = ready({"many": {**sources(folder, "many")["files"], "streamed": True, "val_documents": DOCUMENTS}}, folder)
    with pytest.raises(ValueError, match=r"a part of its stream \(1 file.* holds no text but.*Lower `val_documents` \(30\), or use few"):
        list(data.rows["train"]["many"].shard(FILES, 0))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"val_documents": 500}, r"no text but validation documents\. Lower `val_documents` \(500\)\.$"),
        (
            {"val_files": "few/*.jsonl"},
            r"no text but validation .*\. Name files in `val_files` \(few/\*\.jsonl\) that .* `files`\.$",
        ),
        (
            {"val_files": "few/*.jsonl", "val_documents": 200},
            r".*\. Name files in `val_files` \(few/\*\.jsonl\) that .* `files`\.$",
        ),
    ],
)
def test_a_stream_of_nothing_but_validation_documents_names_the_setting_that_makes_it_so(folder, monkeypatch, own, message):
    monkeypatch.chdir(folder)
    data = ready({"few": {"files": "few/*.jsonl", "streamed": True, **own}}, folder)
    with pytest.raises(ValueError, match=rf"Domain 'few': its stream holds {message}"):
        list(data.rows["train"]["few"])


def test_a_split_that_holds_all_training_documents_is_named(folder):
    for kind in ("train", "validation"):
        (folder / "few-parquet" / f"{kind}.parquet").write_bytes((folder / "few-parquet" / "0.parquet").read_bytes())
    for file in range(FILES):
        (folder / "few-parquet" / f"{file}.parquet").unlink()
    data = ready({"few": {"dataset": str(folder / "few-parquet"), "streamed": True, "val_split": "validation"}}, folder)
    with pytest.raises(ValueError, match=r"its stream holds no text but .* Name a split in `val_split` \(validation\) that holds other"):
        list(data.rows["train"]["few"])


def test_a_part_without_any_text_is_told(folder):
    (folder / "few" / "0.jsonl").write_text('{"text": " "}\n')
    data = ready({"few": {"files": f"{folder}/few/*.jsonl", "streamed": True}}, folder)
    with pytest.raises(ValueError, match=r"a part of its stream \(1 file.* holds no text\. Use fewer workers \(`num_workers`\)"):
        list(data.rows["train"]["few"].shard(FILES, 0))


@pytest.mark.parametrize(
    ("domain", "arguments", "message"),
    [
        ({"streamed": True}, {"steps_per_epoch": None}, "'many' is streamed, so its length is not known: set `steps_per_epoch`"),
        ({"streamed": True}, {"val_fraction": 0.1}, r"`val_fraction` 0.1\) cannot be held out: give .*`val_documents`"),
        ({"streamed": True}, {"test_fraction": 0.1}, r"`test_fraction` 0.1\) cannot be held out: set `test_fraction` to 0"),
        ({"val_documents": 3}, {}, "`val_documents`, which is for a streamed domain: set streamed=True"),
        ({"streamed": True, "val_documents": -1}, {}, "val_documents=-1"),
        ({"shuffle_buffer": 9}, {}, "`shuffle_buffer`, which is for a streamed domain: rows of others are shuffled as a whole"),
        ({"streamed": True, "shuffle_buffer": -1}, {}, "shuffle_buffer=-1: it must be a number of documents"),
        ({"streamed": True, "val_split": "validation"}, {}, "`val_split` names a split of `dataset`"),
    ],
)
def test_what_a_stream_cannot_do_is_refused_with_the_way_out(folder, domain, arguments, message):
    with pytest.raises(ValueError, match=message):
        ready({"many": {**sources(folder, "many")["files"], **domain}}, folder, **arguments)


def test_the_command_line_trains_on_streams(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    llama = {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    data = {"tokenizer": "bytes", "block_size": 32, "batch_size": 2, "steps_per_epoch": 3}
    data["domains"] = {
        "many": {"files": "many/*.jsonl", "streamed": True, "val_documents": 4, "proportion": 0.75},
        "few": {"dataset": str(folder / "few-parquet"), "streamed": True, "val_files": "few/0.jsonl", "proportion": 0.25},
    }
    config = {
        "trainer": {"accelerator": "cpu", "max_steps": 3, "logger": False, "enable_progress_bar": False},
        "model": {"class_path": "CausalLM", "init_args": {"model": llama}},
        "data": {"class_path": "MixtureDataModule", "init_args": data},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "-c", "config.yaml"])
    checkpoint = next(folder.glob("**/*.ckpt"))
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 3
    capsys.readouterr()
    main(["validate", "-c", "config.yaml", f"--ckpt_path={checkpoint}"])
    printed = capsys.readouterr().out
    assert "val_perplexity/many" in printed
    assert "val_perplexity/few" in printed
