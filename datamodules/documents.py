"""Documents read from files and Hugging Face data sets, one string each, never all at once."""

from __future__ import annotations

import copy
import csv
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_megatrain.datamodules.text_domains import Domain, find_files

_READ_BYTES = 1 << 20


class DocumentSource:
    """The documents of one domain, iterated any number of times in the same order.

    Empty documents are left out. Bytes that are not UTF-8 become replacement characters.

    Args:
        name: The domain's name, for messages.
        domain: Where its documents are. A hub data set is fetched here, unless it is streamed.
    """

    def __init__(self, name: str, domain: Domain) -> None:
        self.name = name
        self.field = domain.field
        self.files = find_files(name, domain) if domain.files is not None else []
        self.dataset = _load_dataset(name, domain) if domain.dataset is not None else None

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
            content = hashlib.blake2b(path.suffix.encode(), digest_size=16)
            with path.open("rb") as file:
                while chunk := file.read(_READ_BYTES):
                    content.update(chunk)
            digest.update(content.digest())
        return digest.hexdigest()

    def _from_dataset(self) -> Iterator[str]:
        assert self.dataset is not None
        for row in self.dataset:
            yield self._text(row, f"data set of domain {self.name!r}")

    def _from_file(self, path: Path) -> Iterator[str]:
        match path.suffix.lower():
            case ".jsonl" | ".ndjson":
                yield from self._from_jsonl(path)
            case ".json":
                yield from self._from_json(path)
            case ".csv":
                yield from self._from_csv(path)
            case ".parquet":
                yield from self._from_parquet(path)
            case _:
                yield path.read_text(encoding="utf-8", errors="replace")

    def _from_jsonl(self, path: Path) -> Iterator[str]:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield self._text(self._parse(line, f"{path}, line {number}"), f"{path}, line {number}")

    def _from_json(self, path: Path) -> Iterator[str]:
        records = self._parse(path.read_text(encoding="utf-8", errors="replace"), str(path))
        for number, record in enumerate(records if isinstance(records, list) else [records], start=1):
            yield self._text(record, f"{path}, record {number}")

    def _from_csv(self, path: Path) -> Iterator[str]:
        csv.field_size_limit(sys.maxsize)  # the module's own limit of 128 KiB is shorter than many documents
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            for number, row in enumerate(csv.DictReader(file), start=1):
                yield self._text(row, f"{path}, row {number}")

    def _from_parquet(self, path: Path) -> Iterator[str]:
        import pyarrow.parquet as pq  # datasets depends on it

        with pq.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if self.field not in names:
                raise ValueError(f"Domain {self.name!r}: {path} has no column {self.field!r}. It has: {', '.join(names)}. Set `field`.")
            for batch in table.iter_batches(columns=[self.field]):
                for value in batch.column(0).to_pylist():
                    yield self._text({self.field: value}, str(path))

    def _parse(self, text: str, where: str) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"Domain {self.name!r}: {where} is not JSON ({error}).") from error

    def _text(self, record: Any, where: str) -> str:
        if isinstance(record, str):
            return record
        if not isinstance(record, dict) or self.field not in record:
            keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"Domain {self.name!r}: {where} has no field {self.field!r}. It has: {keys}. Set `field`.")
        text = record[self.field]
        if text is None:
            return ""
        if not isinstance(text, str):
            raise TypeError(f"Domain {self.name!r}: field {self.field!r} of {where} is {type(text).__name__}, not text.")
        return text


def _load_dataset(name: str, domain: Domain) -> Any:
    import datasets

    assert domain.dataset is not None
    folder = Path(domain.dataset).expanduser()
    if folder.is_dir() and any((folder / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
        loaded = datasets.load_from_disk(str(folder))
        if isinstance(loaded, datasets.DatasetDict):
            if domain.split not in loaded:
                raise ValueError(f"Domain {name!r}: {folder} has no split {domain.split!r}. It has: {', '.join(loaded)}.")
            loaded = loaded[domain.split]
        if domain.streamed:
            loaded = loaded.to_iterable_dataset(num_shards=min(len(loaded), len(loaded.cache_files)) or 1)
    else:
        loaded = datasets.load_dataset(domain.dataset, domain.subset, split=domain.split, streaming=domain.streamed)
    if loaded.column_names is None:
        return loaded  # a stream that does not know its columns before it is read
    if domain.field not in loaded.column_names:
        raise ValueError(
            f"Domain {name!r}: {domain.dataset} has no column {domain.field!r}. It has: {', '.join(loaded.column_names)}. Set `field`."
        )
    return loaded.select_columns([domain.field])


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
