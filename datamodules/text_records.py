"""One record of a file of text: out of its JSON or its parquet, and the text in it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_megatrain.datamodules.text_files import open_file, refuse_nul


def parse(name: str, text: str, where: str) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: It is no JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        refuse_nul(name, text, where)
        raise ValueError(f"Domain {name!r}: {where} is not JSON ({error}).") from error


def text_of(name: str, record: Any, field: str, where: str) -> str:
    """Return the text of a record: a mapping with that field, or a string. None is no text.

    Raises:
        ValueError: There is no such field, or the text cannot be written in UTF-8.
        TypeError: The field is not text.
    """
    if isinstance(record, str):
        record = {field: record}
    if not isinstance(record, dict) or field not in record:
        keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"Domain {name!r}: {where} has no field {field!r}. It has: {keys}. Set `field`.")
    text = record[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise TypeError(f"Domain {name!r}: field {field!r} of {where} is {type(text).__name__}, not text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write what no tokenizer takes
        half = f"\\u{ord(text[error.start]):x}, half of a character (a surrogate) without its other half"
        raise ValueError(f"Domain {name!r}: field {field!r} of {where} has {half}. Write the text anew, or leave it out.") from error
    return text


@contextlib.contextmanager
def open_parquet(name: str, path: Path, field: str) -> Iterator[Any]:
    """Open a parquet file that has a column of that name. Reads its footer alone, where it is not compressed as a whole.

    Raises:
        ValueError: It has no such column.
        OSError: (also when read) It is no parquet, truncated or corrupt; `naming` tells which file.
    """
    import pyarrow as pa  # datasets depends on it
    import pyarrow.parquet as pq

    try:
        with open_file(path, "rb") as file, pq.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise ValueError(f"Domain {name!r}: {path} has no column {field!r}. It has: {', '.join(names)}. Set `field`.")
            yield table
    except pa.ArrowException as error:
        raise OSError(str(error)) from error


def parquet_value(name: str, value: Any, where: str) -> Any:
    """Return a value of a column as Python has it.

    Raises:
        ValueError: Its bytes are not UTF-8.
    """
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise ValueError(f"Domain {name!r}: {where} is not UTF-8 ({error}). Write the file anew with text in UTF-8.") from error
