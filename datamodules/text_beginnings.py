"""The beginnings of files of text, looked at before hours go by until a file is read."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from lightning_megatrain.datamodules.text_datasets import parquet_files
from lightning_megatrain.datamodules.text_domains import Domain, find_files
from lightning_megatrain.datamodules.text_files import kind_of, naming, open_file, open_text, refuse_nul
from lightning_megatrain.datamodules.text_records import open_parquet, parse, text_of

_CHARACTERS = 1 << 16  # of a beginning


def check_files(name: str, domain: Domain) -> None:
    """Refuse a domain with a file that its beginning shows to be wrong, with the message that reading it would give.

    Cheap for thousands of files: reads the footer of a parquet file, or its first bytes if it is compressed as a whole, and at most 65,536
    characters of any other. Of a data set only the parquet files of a local folder are looked at; nothing remote is opened.

    Args:
        name: The domain's name, for messages.
        domain: Where its files are.

    Raises:
        ValueError: A header or first record has no such field or is broken, or bytes of a beginning are not UTF-8.
        TypeError: The field is not text.
        OSError: A file is not there, cannot be read, or is not what its ending says.
    """
    for path in find_files(name, domain) if domain.dataset is None else parquet_files(name, domain):
        with naming(name, path):
            if kind_of(path) == ".parquet":
                _check_parquet(name, path, domain)
            else:
                _check_text(name, path, domain.field)


def _check_parquet(name: str, path: Path, domain: Domain) -> None:
    import pyarrow as pa

    if path.suffix.lower() != ".parquet":  # compressed as a whole: the footer is behind all of it
        with open_file(path, "rb") as file:
            if file.read(4) != b"PAR1":
                raise OSError("what is compressed in it does not begin as parquet does")
        return
    with open_parquet(name, path, domain.field) as table:
        kind = table.schema_arrow.field(domain.field).type
    no_text = (pa.types.is_integer, pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary)
    if domain.dataset is None and any(is_kind(kind) for is_kind in no_text):  # `datasets` casts columns
        raise TypeError(f"Domain {name!r}: column {domain.field!r} of {path} holds {kind}, not text. Set `field` to one that does.")


def _check_text(name: str, path: Path, field: str) -> None:
    kind = kind_of(path)
    with open_text(path, newline="" if kind == ".csv" else None) as file:
        text = file.read(_CHARACTERS)
    whole = len(text) < _CHARACTERS
    match kind:
        case ".jsonl" | ".ndjson":
            _check_jsonl(name, path, field, text, whole)
        case ".json":
            _check_json(name, path, field, text, whole)
        case ".csv":
            _check_csv(name, path, field, text)
        case _:
            refuse_nul(name, text, str(path))


def _check_jsonl(name: str, path: Path, field: str, text: str, whole: bool) -> None:
    for number, line in enumerate(io.StringIO(text), start=1):
        if line.strip():
            where, kind, is_longer = f"{path}, line {number}", line.lstrip()[0], not whole and not line.endswith("\n")
            if not is_longer or kind not in '{"':
                text_of(name, [] if is_longer and kind == "[" else parse(name, line, where), field, where)
            return


def _check_json(name: str, path: Path, field: str, text: str, whole: bool) -> None:
    begun = text.lstrip()
    if whole or begun[:1] not in ("[", "{", '"'):
        records = parse(name, text, str(path))
        for record in records[:1] if isinstance(records, list) else [records]:
            text_of(name, record, field, f"{path}, record 1")
        return
    try:  # a list that goes on behind its beginning has its first record there
        record, end = json.JSONDecoder().raw_decode(begun.removeprefix("[").lstrip())
    except json.JSONDecodeError:  # unless that goes on too
        return
    if begun[0] != "[" and begun[end:].strip():
        parse(name, text, str(path))  # refuses a second value, as in a file of lines
    text_of(name, record, field, f"{path}, record 1")


def _check_csv(name: str, path: Path, field: str, text: str) -> None:
    for number, line in enumerate(io.StringIO(text), start=1):
        refuse_nul(name, line, f"{path}, line {number}")
    try:
        names = csv.DictReader(io.StringIO(text, newline=""), strict=True).fieldnames
    except csv.Error as error:
        raise ValueError(f"Domain {name!r}: the header of {path} is not CSV: {error}.") from error
    if names is not None:
        text_of(name, dict.fromkeys(names, ""), field, f"{path}, row 1")
