"""Documents read from files and Hugging Face data sets, one string each, never all at once."""

from __future__ import annotations

import contextlib
import copy
import csv
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_megatrain.datamodules.text_domains import Domain, find_files
from lightning_megatrain.datamodules.text_files import kind_of, naming, open_file, open_text, refuse_nul

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
            content = hashlib.blake2b(kind_of(path).encode(), digest_size=16)
            with naming(self.name, path), open_file(path, "rb") as file:
                while chunk := file.read(_READ_BYTES):
                    content.update(chunk)
            digest.update(content.digest())
        return digest.hexdigest()

    def _from_dataset(self) -> Iterator[str]:
        assert self.dataset is not None
        with _naming_dataset(self.name, self.domain):
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
                    yield self._text(self._parse(line, f"{path}, line {number}"), f"{path}, line {number}")

    def _from_json(self, path: Path) -> Iterator[str]:
        with open_text(path) as file:
            records = self._parse(file.read(), str(path))
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
        import pyarrow as pa  # datasets depends on it
        import pyarrow.parquet as pq

        try:
            with open_file(path, "rb") as file, pq.ParquetFile(file) as table:
                names = table.schema_arrow.names
                if self.field not in names:
                    raise ValueError(f"Domain {self.name!r}: {path} has no column {self.field!r}. It has: {', '.join(names)}. Set `field`.")
                number = 0
                for batch in table.iter_batches(columns=[self.field]):
                    for value in batch.column(0):
                        number += 1
                        yield self._text({self.field: self._value(value, f"{path}, row {number}")}, f"{path}, row {number}")
        except pa.ArrowException as error:
            raise OSError(str(error)) from error  # which `naming` completes

    def _value(self, value: Any, where: str) -> Any:
        try:
            return value.as_py()
        except UnicodeDecodeError as error:
            raise ValueError(f"Domain {self.name!r}: {where} is not UTF-8 ({error}). Write the file anew with text in UTF-8.") from error

    def _parse(self, text: str, where: str) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            refuse_nul(self.name, text, where)
            raise ValueError(f"Domain {self.name!r}: {where} is not JSON ({error}).") from error

    def _text(self, record: Any, where: str) -> str:
        if isinstance(record, str):
            record = {self.field: record}
        if not isinstance(record, dict) or self.field not in record:
            keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"Domain {self.name!r}: {where} has no field {self.field!r}. It has: {keys}. Set `field`.")
        text = record[self.field]
        if text is None:
            return ""
        if not isinstance(text, str):
            raise TypeError(f"Domain {self.name!r}: field {self.field!r} of {where} is {type(text).__name__}, not text.")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can write what no tokenizer takes
            half = f"\\u{ord(text[error.start]):x}, half of a character (a surrogate) without its other half"
            raise ValueError(
                f"Domain {self.name!r}: field {self.field!r} of {where} has {half}. Write the text anew, or leave it out."
            ) from error
        return text


@contextlib.contextmanager
def _naming_dataset(name: str, domain: Domain) -> Iterator[None]:
    """Name the domain and the data set in what is raised when its files cannot be read."""
    import datasets
    import pyarrow as pa

    try:
        yield
    except (OSError, UnicodeDecodeError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
        cause = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise OSError(f"Domain {name!r}: data set {domain.dataset} cannot be read ({cause}).") from error


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
        with _naming_dataset(name, domain):
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
