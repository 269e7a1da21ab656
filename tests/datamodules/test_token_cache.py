import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from lightning_megatrain.datamodules import token_cache
from lightning_megatrain.datamodules.documents import DocumentSource
from lightning_megatrain.datamodules.text_domains import Domain
from lightning_megatrain.datamodules.token_cache import SPLITS, cache_key, open_split, tokenize
from lightning_megatrain.datamodules.tokenizers import encode, load_tokenizer, tokenizer_fingerprint

BYTES = load_tokenizer("bytes")


def make_source(folder: Path, texts: list[str], name: str = "d") -> DocumentSource:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return DocumentSource(name, Domain(files=str(path)))


def decode(folder: Path, split: str) -> list[str]:
    documents = open_split(folder, split)
    return [
        BYTES.decode(documents.tokens[begin:end].tolist(), skip_special_tokens=True)
        for begin, end in zip(documents.starts[:-1], documents.starts[1:], strict=True)
    ]


def test_every_document_comes_back_from_exactly_one_split(tmp_path):
    texts = [f"document {i} " + "x" * (i % 7) for i in range(50)]
    tokenize(make_source(tmp_path, texts), BYTES, (0.1, 0.2), tmp_path / "cache")
    found = {split: decode(tmp_path / "cache", split) for split in SPLITS}
    assert sorted(sum(found.values(), [])) == sorted(texts)
    assert [len(found[split]) for split in SPLITS] == [35, 5, 10]


def test_each_document_ends_with_the_end_token(tmp_path):
    tokenize(make_source(tmp_path, ["ab", "cde"]), BYTES, (0.0, 0.0), tmp_path / "cache")
    documents = open_split(tmp_path / "cache", "train")
    assert documents.tokens.dtype == np.uint16
    assert documents.tokens.tolist() == [100, 101, 1, 102, 103, 104, 1]
    assert documents.starts.tolist() == [0, 3, 7]
    assert len(documents) == 2


def test_one_text_is_never_on_both_sides_of_the_split(tmp_path):
    texts = [f"text {i % 5}" for i in range(40)]
    tokenize(make_source(tmp_path, texts), BYTES, (0.2, 0.2), tmp_path / "cache")
    sides = [set(decode(tmp_path / "cache", split)) for split in SPLITS]
    assert [len(side) for side in sides] == [3, 1, 1]
    assert len(set.union(*sides)) == 5


def test_the_split_does_not_depend_on_the_order_of_documents(tmp_path):
    texts = [f"text {i}" for i in range(30)]
    tokenize(make_source(tmp_path, texts), BYTES, (0.3, 0.0), tmp_path / "a")
    tokenize(make_source(tmp_path, texts[::-1], "e"), BYTES, (0.3, 0.0), tmp_path / "b")
    assert set(decode(tmp_path / "a", "val")) == set(decode(tmp_path / "b", "val"))


def test_too_few_documents_for_the_split_are_refused_by_domain_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="Domain 'd' has 1 different documents, too few for 1 of validation"):
        tokenize(make_source(tmp_path, ["same", "same"]), BYTES, (0.1, 0.0), tmp_path / "cache" / "x")
    assert not (tmp_path / "cache").exists()


def test_a_cached_domain_is_not_tokenised_again(tmp_path, monkeypatch):
    source = make_source(tmp_path, ["a", "b"])
    tokenize(source, BYTES, (0.0, 0.0), tmp_path / "cache")
    monkeypatch.setattr(token_cache, "encode", lambda *_: pytest.fail("tokenised twice"))
    tokenize(source, BYTES, (0.0, 0.0), tmp_path / "cache")


def test_an_error_halfway_leaves_nothing(tmp_path, monkeypatch):
    calls = []

    def fail_later(tokenizer, texts):
        calls.append(texts)
        if len(calls) > 1:
            raise RuntimeError("disk full")
        return encode(tokenizer, texts)

    monkeypatch.setattr(token_cache, "encode", fail_later)
    with pytest.raises(RuntimeError, match="disk full"):
        tokenize(make_source(tmp_path, [f"text {i}" for i in range(1000)]), BYTES, (0.0, 0.0), tmp_path / "cache" / "x")
    assert list((tmp_path / "cache").iterdir()) == []


def _tokenize_slowly(folder: str) -> None:
    def slow(tokenizer, texts):
        time.sleep(60 if (Path(folder) / "started").exists() else 0)
        (Path(folder) / "started").touch()
        return encode(tokenizer, texts)

    token_cache.encode = slow
    tokenize(DocumentSource("d", Domain(files=f"{folder}/d.jsonl")), BYTES, (0.0, 0.0), Path(folder) / "cache" / "x")


def test_a_kill_halfway_leaves_no_cache_and_the_next_run_cleans_up(tmp_path):
    source = make_source(tmp_path, [f"text {i}" for i in range(1000)])
    process = multiprocessing.get_context("fork").Process(target=_tokenize_slowly, args=(str(tmp_path),))
    process.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.05)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "cache" / "x").exists()
    assert len(list((tmp_path / "cache").glob("x.*.tmp"))) == 1
    tokenize(source, BYTES, (0.0, 0.0), tmp_path / "cache" / "x")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["x"]
    assert len(open_split(tmp_path / "cache" / "x", "train")) == 1000


FILES = ["meta.json", *(split + ending for split in SPLITS for ending in (".tokens", ".starts.npy"))]
DAMAGES = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "one byte less": lambda content: content[:-1],
    "zeros": lambda content: bytes(len(content)),
    "longer": lambda content: content + b"\1\0",
    "a bit of the last byte": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
}


def damage(file: Path, kind: str) -> bool:
    """Change a file; returns whether that is another content."""
    content = file.read_bytes()
    damaged = DAMAGES[kind](content) if content or kind in ("missing", "longer") else content
    file.unlink()
    if damaged is not None:
        file.write_bytes(damaged)
    return damaged != content


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_cache_is_told_and_made_again(tmp_path, kind, file):
    source, cache = make_source(tmp_path, [f"text {i}" for i in range(20)]), tmp_path / "cache"
    tokenize(source, BYTES, (0.1, 0.1), cache)
    whole = {path.name: path.read_bytes() for path in cache.iterdir()}
    assert sorted(whole) == sorted(FILES)
    assert damage(cache / file, kind)
    split = file.split(".")[0].replace("meta", "val")
    told = rf"{re.escape(str(cache / file))} (is missing|is not what was written|holds \d+ bytes instead of \d+)"
    with pytest.raises(ValueError, match=rf"cache is damaged: {told}\. Delete {re.escape(str(cache))} and run again"):
        open_split(cache, split)
    with pytest.warns(UserWarning, match=rf"domain 'd' is damaged: {told}\. It is removed and made again") as warned:
        tokenize(source, BYTES, (0.1, 0.1), cache)
    assert len(warned) == 1
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "d.jsonl"]


def test_no_bit_of_a_small_cache_can_change_unseen(tmp_path):
    cache = tmp_path / "cache"
    tokenize(make_source(tmp_path, ["ab", "c"]), BYTES, (0.0, 0.0), cache)
    for file in cache.iterdir():
        whole = file.read_bytes()
        for place in range(len(whole)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            with pytest.raises(ValueError, match=f"{file.name} is not what was written"):
                _ = [open_split(cache, split) for split in SPLITS]
        file.write_bytes(whole)
    assert open_split(cache, "train").starts.tolist() == [0, 3, 5]


def test_of_a_large_file_of_tokens_blocks_are_looked_at_the_first_and_last_among_them(tmp_path, monkeypatch):
    """Seven files' worth of blocks, of which three are looked at: what a power cut leaves unwritten is at the end."""
    monkeypatch.setattr(token_cache, "_BLOCK", 8)
    monkeypatch.setattr(token_cache, "_BLOCKS", 3)
    cache = tmp_path / "cache"
    tokenize(make_source(tmp_path, ["a" * 27]), BYTES, (0.0, 0.0), cache)
    whole = (cache / "train.tokens").read_bytes()
    assert len(whole) == 2 * 28
    seen = []
    for place in range(len(whole)):
        (cache / "train.tokens").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            open_split(cache, "train")
        except ValueError:
            seen.append(place)
    assert seen == [*range(8), *range(24, 32), *range(48, 56)]


def test_a_folder_without_meta_is_no_cache_and_is_made_again(tmp_path):
    cache = tmp_path / "cache"
    (cache / "sub").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"meta\.json is missing\. It is removed and made again"):
        tokenize(make_source(tmp_path, ["a"]), BYTES, (0.0, 0.0), cache)
    assert decode(cache, "train") == ["a"]


def test_everything_is_on_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    """A power cut must not leave a folder of zeros that looks whole."""
    written, fsync, cache = [], os.fsync, tmp_path / "cache"

    def note(handle):
        written.append((Path(os.readlink(f"/proc/self/fd/{handle}")).name, cache.exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    tokenize(make_source(tmp_path, ["a"]), BYTES, (0.0, 0.0), cache)
    assert sorted(name for name, named in written if not named) == sorted([*FILES, f"cache.{os.getpid()}.tmp"])
    assert [name for name, named in written if named] == [tmp_path.name]


def test_a_damaged_cache_that_cannot_be_removed_is_told_with_the_way_out(tmp_path, monkeypatch):
    source, cache = make_source(tmp_path, ["a"]), tmp_path / "cache"
    tokenize(source, BYTES, (0.0, 0.0), cache)
    (cache / "meta.json").write_text("")

    def refuse(*_):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(ValueError, match=r"cannot be removed \(read-only file system\)\. Delete .*cache and run again"),
    ):
        tokenize(source, BYTES, (0.0, 0.0), cache)


def test_a_file_that_may_not_be_read_is_not_taken_for_damaged(tmp_path, monkeypatch):
    source, cache = make_source(tmp_path, ["a"]), tmp_path / "cache"
    tokenize(source, BYTES, (0.0, 0.0), cache)

    def refuse(*_):
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(PermissionError, match="not yours"):
        tokenize(source, BYTES, (0.0, 0.0), cache)
    assert (cache / "meta.json").exists()


def test_a_cache_that_was_never_made_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no token cache .*nothing: call prepare_data"):
        open_split(tmp_path / "nothing", "train")


def test_the_key_follows_content_tokenizer_and_split(tmp_path):
    one, other = make_source(tmp_path, ["a", "b"]), make_source(tmp_path, ["a", "c"], "e")
    keys = {
        cache_key(one, BYTES, (0.1, 0.0)),
        cache_key(other, BYTES, (0.1, 0.0)),
        cache_key(one, BYTES, (0.2, 0.0)),
        cache_key(one, type(BYTES)(extra_ids=1), (0.1, 0.0)),
    }
    assert len(keys) == 4
    assert cache_key(make_source(tmp_path, ["a", "b"], "renamed"), load_tokenizer("bytes"), (0.1, 0.0)) in keys


def test_the_fast_byte_encoding_equals_the_tokenizers_own():
    texts = ["héllo\nwörld", "a", "日本語 \t x", "\x00\x7f"]
    for text, ids in zip(texts, encode(BYTES, texts), strict=True):
        assert ids.tolist() == BYTES(text)["input_ids"]


def test_a_tokenizer_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match='No tokenizer could be loaded from .*nothing.*"bytes"'):
        load_tokenizer(str(tmp_path / "nothing"))


def test_a_saved_tokenizer_has_the_fingerprint_of_the_one_it_was(tmp_path):
    BYTES.save_pretrained(tmp_path / "tokenizer")
    assert tokenizer_fingerprint(load_tokenizer(str(tmp_path / "tokenizer"))) == tokenizer_fingerprint(BYTES)
