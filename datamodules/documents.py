"""Documents read from files and Hugging Face data sets, one string each, never all at once."""

from __future__ import annotations

import copy
import csv
import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_megatrain.datamodules.text_datasets import naming_dataset, open_dataset
from lightning_megatrain.datamodules.text_domains import Domain, find_files
from lightning_megatrain.datamodules.text_files import kind_of, naming, open_file, open_text, refuse_nul
from lightning_megatrain.datamodules.text_records import open_parquet, parquet_value, parse, text_of

_READ_BYTES = 1 << 20


class DocumentSource:
    """The documents of one domain, iterated any number of times in the same order.

    Empty documents are left out. A file's text is UTF-8: other bytes are refused, as they would become tokens that nobody wrote.

    Args:
        name: The domain's name, for messages.
        domain: Where its documents are. A hub data set is fetched here, unless it is streamed.

    Raises:
        ValueError: (when read) A record is broken or has no such field, or bytes are not UTF-8. Names the domain, the file and the place.
        TypeError: (when read) A field is not text.
        OSError: (when read) A file cannot be read or is corrupt.
    """

    def __init__(self, name: str, domain: Domain) -> None:
        self.name = name
        self.domain = domain
        self.field = domain.field
        self.files = find_files(name, domain) if domain.files is not None else []
        self.dataset = open_dataset(name, domain) if domain.dataset is not None else None

    def __iter__(self) -> Iterator[str]:
        documents = self._from_dataset() if self.dataset is not None else (text for path in self.files for text in self._from_file(path))
        return (text for text in documents if text.strip())

    @property
    def num_shards(self) -> int:
        """In how many parts the documents can be read: files, or shards of a streamed data set."""
        return len(self.files) if self.dataset is None else int(getattr(self.dataset, "num_shards", 1))

    def shard(self, num_shards: int, index: int) -> DocumentSource:
        """The documents of one of `num_shards` parts."""
        part = copy.copy(self)
        part.files = self.files[index::num_shards]
        part.dataset = None if self.dataset is None else self.dataset.shard(num_shards=num_shards, index=index)
        return part

    def is_empty(self) -> bool:
        """Whether there is not one document with text in it. Reads no further than the first."""
        return next(iter(self), None) is None

    def fingerprint(self) -> str:
        """A hash of the contents: file names and times do not count, the order of the files does."""
        digest = hashlib.blake2b(self.field.encode(), digest_size=16)
        if self.dataset is not None:
            digest.update(self.dataset._fingerprint.encode())
        for path in self.files:
            content = hashlib.blake2b(kind_of(path).encode(), digest_size=16)
            with naming(self.name, path), open_file(path, "rb") as file:
                while chunk := file.read(_READ_BYTES):
                    content.update(chunk)
            digest.update(content.digest())
        return digest.hexdigest()

    def _from_dataset(self) -> Iterator[str]:
        assert self.dataset is not None
        with naming_dataset(self.name, self.domain):
            for row in self.dataset:
                yield self._text(row, f"data set {self.domain.dataset}")

    def _from_file(self, path: Path) -> Iterator[str]:
        with naming(self.name, path):
            match kind_of(path):
                case ".jsonl" | ".ndjson":
                    yield from self._from_jsonl(path)
                case ".json":
                    yield from self._from_json(path)
                case ".csv":
                    yield from self._from_csv(path)
                case ".parquet":
                    yield from self._from_parquet(path)
                case _:
                    with open_text(path) as file:
                        yield refuse_nul(self.name, file.read(), str(path))

    def _from_jsonl(self, path: Path) -> Iterator[str]:
        with open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield self._text(parse(self.name, line, f"{path}, line {number}"), f"{path}, line {number}")

    def _from_json(self, path: Path) -> Iterator[str]:
        with open_text(path) as file:
            records = parse(self.name, file.read(), str(path))
        for number, record in enumerate(records if isinstance(records, list) else [records], start=1):
            yield self._text(record, f"{path}, record {number}")

    def _from_csv(self, path: Path) -> Iterator[str]:
        csv.field_size_limit(sys.maxsize)  # the module's own limit of 128 KiB is shorter than many documents
        with open_text(path, newline="") as file:
            lines = (refuse_nul(self.name, line, f"{path}, line {number}") for number, line in enumerate(file, start=1))
            rows = csv.DictReader(lines, strict=True)  # else the text behind a quote that is never closed would be one document
            try:
                for number, row in enumerate(rows, start=1):
                    if any(row.get(None, ())):
                        raise csv.Error(f"it has more columns than the {len(rows.fieldnames or ())} of the header: quote text with commas")
                    yield self._text(row, f"{path}, row {number}")
            except csv.Error as error:
                where = f"{path}, the row that ends in line {rows.reader.line_num}"
                raise ValueError(f"Domain {self.name!r}: {where}, is not CSV: {error}.") from error

    def _from_parquet(self, path: Path) -> Iterator[str]:
        with open_parquet(self.name, path, self.field) as table:
            number = 0
            for batch in table.iter_batches(columns=[self.field]):
                for value in batch.column(0):
                    number += 1
                    yield self._text({self.field: parquet_value(self.name, value, f"{path}, row {number}")}, f"{path}, row {number}")

    def _text(self, record: Any, where: str) -> str:
        return text_of(self.name, record, self.field, where)


def document_hash(text: str) -> int:
    """A 63-bit hash of a document's text, the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1


def batched(items: Iterable[str], max_items: int = 512, max_characters: int = 1 << 22) -> Iterator[list[str]]:
    """Yield lists of at most `max_items` texts and, but for one long text, at most `max_characters` characters."""
    batch: list[str] = []
    characters = 0
    for item in items:
        if batch and (len(batch) >= max_items or characters + len(item) > max_characters):
            yield batch
            batch, characters = [], 0
        batch.append(item)
        characters += len(item)
    if batch:
        yield batch
