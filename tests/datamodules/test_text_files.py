"""Files of text: compressed ones are read, and one that cannot be read is named with its domain, its place and a cure."""

import bz2
import gzip
import json
import lzma
import os
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_megatrain.datamodules.documents import DocumentSource
from lightning_megatrain.datamodules.text_domains import Domain, as_domains
from lightning_megatrain.datamodules.token_cache import tokenize
from lightning_megatrain.datamodules.tokenizers import load_tokenizer

TEXTS = ["first document", "second, with a comma and\na line", "dritte: äöü"]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def source(path, **more):
    return DocumentSource("d", Domain(files=str(path), **more))


def parquet(path, texts=TEXTS, kind=pa.string()):
    pq.write_table(pa.table({"text": pa.array(texts, kind)}), path)
    return path.read_bytes()


@pytest.mark.parametrize("ending", PACK)
def test_a_compressed_file_is_the_file_in_it(tmp_path, ending):
    plain = {"a.jsonl": JSONL.encode(), "b.txt": "ö\n".encode(), "c.parquet": parquet(tmp_path / "c.parquet")}
    for name, content in plain.items():
        (tmp_path / name).write_bytes(content)
        packed = tmp_path / f"{name}.{ending}"
        packed.write_bytes(PACK[ending](content))
        assert list(source(packed)) == list(source(tmp_path / name))
        assert source(packed).fingerprint() == source(tmp_path / name).fingerprint(), "one entry of the token cache"


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", JSONL), ("a.json", json.dumps(TEXTS)), ("a.txt", "ö"), ("a.csv", "text\nö\n")])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, name, content):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert list(source(tmp_path / name)) in (TEXTS, ["ö"])


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv", "unknown"])
def test_bytes_that_are_not_utf8_are_refused_with_their_place(tmp_path, kind):
    good = '{"text": "good"}\n' * 9000  # further than a decoder's buffer
    (tmp_path / f"a.{kind}").write_bytes(good.encode() + '{"text": "Zürich"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"Domain 'd'.*a\.{kind}, line 9001, byte 12 \(0xfc\) is not UTF-8\. .*`iconv -f LATIN1 -t UTF-8"):
        list(source(tmp_path / f"a.{kind}", field='{"text": "good"}' if kind == "csv" else "text"))


def test_a_compressed_file_that_is_not_utf8_has_its_place_too(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n{"text": "\xe9"}\n'))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz, line 2, byte 11 \(0xe9\)"):
        list(source(tmp_path / "a.jsonl.gz"))


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])  # with and without a byte order mark
def test_utf16_is_refused_by_its_name(tmp_path, kind, encoding):
    (tmp_path / f"a.{kind}").write_bytes('{"text": "hi there"}\n'.encode(encoding))
    with pytest.raises(ValueError, match=rf"Domain 'd'.*a\.{kind}.*not UTF-8.*iconv -f UTF-16 -t UTF-8"):
        list(source(tmp_path / f"a.{kind}"))


@pytest.mark.parametrize(
    "content",
    [b"\0" * 100, pickle.dumps({"a": 1}), gzip.compress(b"text"), b"\x89PNG\r\n\x1a\n\0"],
    ids=["zeros", "pickle", "gzip", "png"],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, content):
    (tmp_path / "a.unknown").write_bytes(content)
    with pytest.raises(ValueError, match=r"Domain 'd'.*a\.unknown.*not UTF-8.*if it is no text, leave it out"):
        list(source(tmp_path / "a.unknown"))


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.zip", "a.tar.gz", "a.tgz", "A.7Z"])
def test_archives_are_refused_before_anything_is_read(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(ValueError, match=rf"Domain 'd': .*{name} is an archive, or compressed as \.\w+: unpack it, or .*\.gz"):
        as_domains({"d": {"files": f"{tmp_path}/*"}})


def half(content):
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("a.parquet", half),
        ("a.parquet", lambda content: content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :]),
        ("a.parquet", lambda _: b""),
        ("a.parquet", lambda _: b"no parquet at all"),
        *((f"a.jsonl.{ending}", lambda content, ending=ending: half(PACK[ending](content))) for ending in PACK),
        *((f"a.jsonl.{ending}", lambda content: content) for ending in PACK),
        ("a.jsonl.gz", lambda content: gzip.compress(content)[:12] + b"\xff" * 40),
    ],
)
def test_a_corrupt_file_is_named(tmp_path, name, damage):
    content = parquet(tmp_path / "whole", [f"text {i} " * 50 for i in range(400)]) if "parquet" in name else JSONL.encode() * 99
    (tmp_path / name).write_bytes(damage(content))
    with pytest.raises(OSError, match=rf"(?s)Domain 'd': .*{name} cannot be read \(.+\)\. Mend the file"):
        list(source(tmp_path / name))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('text\n"one"\n"never closed\nthree\nfour\n', r"the row that ends in line 5, is not CSV: unexpected end of data"),
        (
            "text\none\ntwo,\nhello, world\n",
            r"the row that ends in line 4, is not CSV: it has more columns than the 1 of the",
        ),
    ],
)
def test_csv_that_is_none_is_named(tmp_path, content, message):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ValueError, match=rf"Domain 'd': .*a\.csv, {message}"):
        list(source(tmp_path / "a.csv"))


def test_parquet_text_that_is_not_utf8_is_named_with_its_row(tmp_path):
    wrong = pa.array([b"good", b"Z\xfcrich"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": wrong}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"Domain 'd': .*a\.parquet, row 2 is not UTF-8"):
        list(source(tmp_path / "a.parquet"))
    parquet(tmp_path / "b.parquet", [b"x"], pa.binary())
    with pytest.raises(TypeError, match=r"Domain 'd': field 'text' of .*b\.parquet, row 1 is bytes, not text"):
        list(source(tmp_path / "b.parquet"))


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", '{"text": "ab\\ud83d"}'), ("a.json", '["ab\\ud83d"]')])
def test_half_a_character_is_named(tmp_path, name, content):
    (tmp_path / name).write_text(content.replace("\\ud83d", "\\ud83d\\ude00"))
    assert list(source(tmp_path / name)) == ["ab\N{GRINNING FACE}"]
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"Domain 'd': field 'text' of .*{name}, \w+ 1 has \\ud83d, half of a character"):
        list(source(tmp_path / name))


@pytest.mark.parametrize("read", [list, DocumentSource.fingerprint])
def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch, read):
    (tmp_path / "a.txt").write_text("x")
    found = source(tmp_path / "a.txt")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", str(tmp_path / "a.txt"))

    if os.geteuid():
        (tmp_path / "a.txt").chmod(0)
    else:  # root may read everything
        monkeypatch.setattr("lightning_megatrain.datamodules.text_files.open", refuse, raising=False)
    with pytest.raises(OSError, match=r"Domain 'd': .*a\.txt cannot be read \(.*Permission denied"):
        read(found)


def test_no_tokens_are_kept_of_a_domain_with_a_wrong_file(tmp_path):
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"b\.txt, line 1, byte 4 \(0xe9\)"):
        tokenize(source(tmp_path / "*.txt"), load_tokenizer("bytes"), (0.0, 0.0), tmp_path / "cache" / "key")
    assert not (tmp_path / "cache" / "key").exists()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_data_set_with_a_corrupt_file_is_named(tmp_path, monkeypatch, streamed):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.parquet").write_bytes(half(parquet(tmp_path / "whole")))
    with pytest.raises(OSError, match=r"Domain 'd': data set .*set cannot be read \("):
        list(DocumentSource("d", Domain(dataset=str(tmp_path / "set"), streamed=streamed)))
