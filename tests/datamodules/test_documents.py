import csv
import json
from pathlib import Path

import datasets
import pytest

from lightning_megatrain.datamodules.documents import DocumentSource, batched, document_hash
from lightning_megatrain.datamodules.text_domains import Domain

TEXTS = ["first document", "second, with a comma and\na line", "dritte: äöü"]


def write(folder: Path, kind: str) -> Path:
    path = folder / f"data.{kind}"
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif kind == "csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["id", "text"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_every_record_of_a_table_is_a_document(tmp_path, kind):
    source = DocumentSource("d", Domain(files=str(write(tmp_path, kind))))
    assert list(source) == TEXTS
    assert list(source) == TEXTS, "a source can be read again"


def test_any_other_file_is_one_document_and_globs_go_into_folders(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one.py").write_text("x = 1\n")
    (tmp_path / "a" / "b" / "two.py").write_text("y = 2\n")
    (tmp_path / "a" / "other.rst").write_text("no")
    assert sorted(DocumentSource("d", Domain(files=f"{tmp_path}/a/**/*.py"))) == ["x = 1\n", "y = 2\n"]


def test_a_file_matched_twice_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("once")
    assert list(DocumentSource("d", Domain(files=[f"{tmp_path}/*.txt", f"{tmp_path}/a.*"]))) == ["once"]


def test_a_file_with_brackets_in_its_name_is_found(tmp_path):
    (tmp_path / "a[1].txt").write_text("here")
    assert list(DocumentSource("d", Domain(files=f"{tmp_path}/a[1].txt"))) == ["here"]


def test_documents_without_text_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": null}\n{"text": "  "}\n{"text": "full"}\n')
    source = DocumentSource("d", Domain(files=f"{tmp_path}/a.jsonl"))
    assert list(source) == ["full"]
    assert not source.is_empty()


def test_a_data_set_saved_to_disk_is_a_source(tmp_path):
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"body": TEXTS})}).save_to_disk(tmp_path / "set")
    assert list(DocumentSource("d", Domain(dataset=str(tmp_path / "set"), field="body"))) == TEXTS
    with pytest.raises(ValueError, match=r"Domain 'd'.*no split 'dev'.*train"):
        DocumentSource("d", Domain(dataset=str(tmp_path / "set"), field="body", split="dev"))
    with pytest.raises(ValueError, match=r"Domain 'd'.*no column 'text'.*body"):
        DocumentSource("d", Domain(dataset=str(tmp_path / "set")))


def test_a_folder_of_data_files_is_a_source_through_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (tmp_path / "set").mkdir()
    write(tmp_path / "set", "parquet")
    assert list(DocumentSource("d", Domain(dataset=str(tmp_path / "set")))) == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "good"}\n{"text": \n', r"Domain 'd'.*a\.jsonl, line 2 is not JSON"),
        ("a.json", "[1", r"Domain 'd'.*a\.json is not JSON"),
        ("a.jsonl", '{"body": "x"}\n', r"Domain 'd'.*line 1 has no field 'text'.*body.*Set `field`"),
        ("a.csv", "body\nx\n", r"Domain 'd'.*row 1 has no field 'text'.*body"),
    ],
)
def test_a_broken_record_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        list(DocumentSource("d", Domain(files=f"{tmp_path}/{name}")))


def test_a_field_that_is_no_text_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(TypeError, match="field 'text' of .* is int, not text"):
        list(DocumentSource("d", Domain(files=f"{tmp_path}/a.jsonl")))


def test_the_fingerprint_follows_the_content_not_the_place(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.txt").write_text("same")
    first, second = (DocumentSource("d", Domain(files=f"{tmp_path}/{folder}/*.txt")) for folder in ("a", "b"))
    assert first.fingerprint() == second.fingerprint()
    (tmp_path / "b" / "b.txt").write_text("Same")
    assert first.fingerprint() != second.fingerprint()


def test_batches_stay_under_both_limits_but_for_one_long_text():
    texts = ["a" * 4, "b" * 4, "c" * 100, "d", "e", "f"]
    assert list(batched(texts, max_items=2, max_characters=8)) == [texts[:2], [texts[2]], texts[3:5], [texts[5]]]


def test_the_document_hash_is_the_same_on_every_machine():
    assert document_hash("abc") == 7808549525826226860
    assert 0 <= document_hash("\ud800") < 2**63, "a lone surrogate is text too"
