"""Files of text are looked at before the first is read in earnest: what their beginnings show is refused as reading would refuse it."""

import gzip
import io
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_megatrain.datamodules import Domain, MixtureDataModule
from lightning_megatrain.datamodules.documents import DocumentSource
from lightning_megatrain.datamodules.text_beginnings import check_files
from lightning_megatrain.datamodules.text_domains import as_domains

LONG = "a" * 70_000  # longer than a beginning
ROW = json.dumps({"text": LONG})


def parquet(tmp_path, table):
    pq.write_table(pa.table(table), tmp_path / "table")
    return (tmp_path / "table").read_bytes()


def refusal(act):
    with pytest.raises((ValueError, TypeError, OSError)) as refused:
        act()
    return type(refused.value), str(refused.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'\n{"body": "x"}\n'),
        ("a.jsonl", b'{"text": 3}\n'),
        ("a.jsonl", b'["x"]\n'),
        ("a.jsonl", b"[" + b'"x", ' * 30_000 + b'"x"]'),
        ("a.ndjson", b'{"text": \n'),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-16")),
        ("a.jsonl", b'{"text": "Z\xfcrich"}\n'),
        ("a.jsonl.gz", b'{"text": "x"}\n'),
        ("a.jsonl.gz", gzip.compress(b'{"body": "x"}\n')),
        ("a.json", b""),
        ("a.json", b'[{"body": "x"}]'),
        ("a.json", b'[{"body": "x"}, ' + ROW.encode() + b"]"),
        ("a.json", b"text " * 20_000),
        ("a.json", b'{"text": "x"}\n' * 2),
        ("a.csv", b"body,id\nx,1\n"),
        ("a.csv", b"te\0xt\nx\n"),
        ("a.parquet", b"no parquet at all"),
        ("a.parquet", b""),
        ("a.txt", b"\0" * 100),
        ("a.txt", b"caf\xe9"),
        ("a", gzip.compress(b"text")),
    ],
)
def test_what_a_beginning_shows_is_refused_as_reading_the_file_would(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    domain = Domain(files=f"{tmp_path}/a*")
    found = refusal(lambda: check_files("d", domain))
    assert found == refusal(lambda: list(DocumentSource("d", domain)))
    assert found[1].startswith("Domain 'd': ")
    assert str(tmp_path / name) in found[1]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"body": ["x"]}, r"a\.parquet has no column 'text'\. It has: body\. Set `field`"),
        ({"text": [1]}, r"column 'text' of .*a\.parquet holds int64, not text"),
        ({"text": [b"x"]}, r"column 'text' of .*a\.parquet holds binary, not text"),
        ({"text": [["x"]]}, r"column 'text' of .*a\.parquet holds list<.*>, not text"),
    ],
)
def test_a_parquet_file_is_refused_by_its_columns(tmp_path, table, message):
    (tmp_path / "a.parquet").write_bytes(parquet(tmp_path, table))
    with pytest.raises((ValueError, TypeError), match=rf"^Domain 'd': .*{message}"):
        check_files("d", Domain(files=f"{tmp_path}/a.parquet"))


def test_a_parquet_file_cut_short_or_compressed_wrongly_is_refused(tmp_path):
    whole = parquet(tmp_path, {"text": ["x"] * 9})
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress(b"no parquet"))
    for name in ("a.parquet", "b.parquet.gz"):
        with pytest.raises(OSError, match=rf"Domain 'd': .*{name} cannot be read \(.+\)\. Mend the file"):
            check_files("d", Domain(files=f"{tmp_path}/{name}"))
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress(whole))
    check_files("d", Domain(files=f"{tmp_path}/b.parquet.gz"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", ""),
        ("a.jsonl", "\n\n"),
        ("a.jsonl", f"\n{ROW}\n{ROW}\n"),
        ("a.jsonl", json.dumps(LONG)),
        ("a.jsonl", '{"text": null}\n'),
        ("a.jsonl", '{"text": "x"}\n' * 9000),
        ("a.json", "[]"),
        ("a.json", '["x"]'),
        ("a.json", f" [{ROW}, {ROW}]"),
        ("a.json", "[" + '{"text": "x"},\n' * 9000 + '"x"]'),
        ("a.json", ROW),
        ("a.csv", ""),
        ("a.csv", "id,text\n"),
        ("a.csv", f'text\n"{LONG}\n"\n'),
        ("a.md", "ä" * 70_000),
        ("a.md", ""),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_what_can_be_read_is_let_through(tmp_path, name, content, packed):
    (tmp_path / f"{name}.gz" if packed else tmp_path / name).write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    domain = Domain(files=f"{tmp_path}/a*")
    list(DocumentSource("d", domain))
    check_files("d", domain)


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "null", "dictionary"])
def test_every_kind_of_text_column_is_let_through(tmp_path, kind):
    values = pa.array([None, None] if kind == "null" else ["x", None])
    values = values.dictionary_encode() if kind == "dictionary" else values.cast(getattr(pa, kind)())
    (tmp_path / "a.parquet").write_bytes(parquet(tmp_path, {"text": values}))
    domain = Domain(files=f"{tmp_path}/a.parquet")
    assert list(DocumentSource("d", domain)) == ([] if kind == "null" else ["x"])
    check_files("d", domain)


class Counted(io.FileIO):
    """A file that counts the bytes that are read of it."""

    read_bytes = 0

    def readinto(self, buffer):
        read = super().readinto(buffer)
        Counted.read_bytes += read
        return read

    def read(self, size=-1):
        data = super().read(size)
        Counted.read_bytes += len(data)
        return data

    def readall(self):
        data = super().readall()
        Counted.read_bytes += len(data)
        return data


def counted(path, mode, encoding=None, newline=None):
    raw = io.BufferedReader(Counted(path, "r"))
    return raw if "b" in mode else io.TextIOWrapper(raw, encoding=encoding, newline=newline)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet"])
def test_only_the_beginning_of_a_file_is_read(tmp_path, monkeypatch, name):
    texts = [f"{number} {LONG}" for number in range(60)]
    content = {
        "a.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts),
        "a.json": json.dumps(texts),
        "a.csv": "text\n" + "\n".join(texts),
        "a.txt": "\n".join(texts),
    }
    if name == "a.parquet":
        pq.write_table(pa.table({"text": texts}), tmp_path / name, compression="none", use_dictionary=False)
    else:
        (tmp_path / name).write_text(content[name])
    size = (tmp_path / name).stat().st_size
    assert size > 4 << 20
    monkeypatch.setattr("lightning_megatrain.datamodules.text_files.open", counted, raising=False)
    Counted.read_bytes = 0
    check_files("d", Domain(files=f"{tmp_path}/{name}"))
    assert 0 < Counted.read_bytes <= (1 << 16) + (1 << 14), "a beginning, and what a buffer holds more"
    Counted.read_bytes = 0
    list(DocumentSource("d", Domain(files=f"{tmp_path}/{name}")))
    assert Counted.read_bytes >= size


def module(folder, domains):
    return MixtureDataModule(
        domains, "bytes", block_size=32, packing="packed", val_fraction=0, steps_per_epoch=1, cache_dir=str(folder / "cache")
    )


@pytest.mark.parametrize("wrong", ["files", "val_files"])
def test_a_wrong_file_of_any_domain_is_told_before_anything_is_tokenised(tmp_path, wrong):
    (tmp_path / "good.txt").write_text("good")
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "x"}\n')
    domains = {"cached": {"files": f"{tmp_path}/good.txt"}, "web": {"files": f"{tmp_path}/good.txt", "streamed": True}}
    domains["web"][wrong] = f"{tmp_path}/?.jsonl"
    module(tmp_path, domains).prepare_data()
    (tmp_path / "cache").rename(tmp_path / "kept")
    (tmp_path / "2.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(ValueError, match=r"Domain 'web': .*2\.jsonl, line 1 has no field 'text'\. It has: body\. Set `field`"):
        module(tmp_path, domains).prepare_data()
    assert not (tmp_path / "cache").exists()


def test_a_file_that_is_gone_or_a_link_to_none_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    data = module(tmp_path, {"d": {"files": [f"{tmp_path}/a.txt"], "streamed": True}})
    (tmp_path / "a.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"Domain 'd': no file matches .*a\.txt"):
        data.prepare_data()
    (tmp_path / "b.txt").write_text("x")
    (tmp_path / "c.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(FileNotFoundError, match=r"Domain 'd': .*c\.txt is a link to .*gone\.txt, which is not there"):
        as_domains({"d": {"files": f"{tmp_path}/*.txt"}})


@pytest.mark.parametrize("streamed", [False, True])
def test_the_parquet_files_of_a_local_data_set_are_looked_at(tmp_path, monkeypatch, streamed):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (tmp_path / "set").mkdir()
    for number, table in enumerate([{"text": ["x"]}, {"text": [1]}]):  # `datasets` makes both text
        (tmp_path / "set" / f"{number}.parquet").write_bytes(parquet(tmp_path, table))
    domain = Domain(dataset=str(tmp_path / "set"), streamed=streamed)
    check_files("d", domain)
    assert list(DocumentSource("d", domain)) == ["x", "1"]
    (tmp_path / "set" / "2.parquet").write_bytes(parquet(tmp_path, {"body": ["x"]}))
    with pytest.raises(ValueError, match=r"Domain 'd': .*2\.parquet has no column 'text'\. It has: body"):
        check_files("d", domain)
    (tmp_path / "set" / "2.parquet").write_bytes(b"no parquet")
    with pytest.raises(OSError, match=r"Domain 'd': .*2\.parquet cannot be read"):
        check_files("d", domain)


def test_a_remote_data_set_is_not_opened(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("opened")

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    for dataset in ("owner/name", "hf://datasets/owner/name", "s3://bucket/name", "https://example.org/name"):
        check_files("d", Domain(dataset=dataset, streamed=True))
