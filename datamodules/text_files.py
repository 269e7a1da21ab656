"""Files of text: how one is opened, and what is said of one that cannot be read."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_PACKED = (".zst", ".zstd", ".lz4", ".br", ".z", ".lzma", ".zip", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz")


def kind_of(path: Path) -> str:
    """What a file holds, by its ending without that of a compression: `".jsonl"` of `a.jsonl.gz`."""
    return Path(path.stem if path.suffix.lower() in _OPEN else path).suffix.lower()


def refuse_packed(name: str, path: Path) -> None:
    """Refuse a file whose ending says that it is an archive, or compressed in a way that is not read.

    Raises:
        ValueError: Names the domain, the file and the way out.
    """
    packed = next((ending for ending in (kind_of(path), path.suffix.lower()) if ending in _PACKED), None)
    if packed:
        ways = ", ".join(_OPEN)
        raise ValueError(f"Domain {name!r}: {path} is an archive, or compressed as {packed}: unpack it, or compress it as {ways}.")


def open_file(path: Path, mode: str, **options: Any) -> Any:
    """Open a file, through gzip, bzip2 or xz where its ending says so."""
    return _OPEN.get(path.suffix.lower(), open)(path, mode, **options)


@contextlib.contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[Any]:
    """Open a file of UTF-8 text, with or without a byte order mark.

    Raises:
        UnicodeDecodeError: (when read) It is something else. :func:`naming` tells where.
    """
    with open_file(path, "rt", encoding="utf-8-sig", newline=newline) as file:
        yield file


@contextlib.contextmanager
def naming(name: str, path: Path) -> Iterator[None]:
    """Name the domain and the file in what is raised when a file cannot be read.

    Raises:
        OSError: The file is not there or not readable, truncated or corrupt.
        ValueError: Its bytes are not UTF-8.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"Domain {name!r}: {path}, {_not_utf8(path, error)}") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise OSError(f"Domain {name!r}: {path} cannot be read ({error}). Mend the file, or leave it out.") from error


def refuse_nul(name: str, text: str, where: str) -> str:
    """Return the text as it is.

    Raises:
        ValueError: It holds a NUL, which files of text do not.
    """
    if "\0" in text:
        raise ValueError(
            f"Domain {name!r}: {where} holds a NUL byte, so it is not UTF-8 text. If it is UTF-16, convert it with "
            "`iconv -f UTF-16 -t UTF-8 OLD > NEW`; if it is no text, leave it out."
        )
    return text


def _not_utf8(path: Path, error: UnicodeDecodeError) -> str:
    """Where the first wrong byte is: the decoder counts from the start of its own buffer, so the file is read again."""
    place, value, start = "a byte", error.object[error.start], b""
    with open_file(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            start = start or line[:2]
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as first:
                place, value = f"line {number}, byte {first.start + 1}", line[first.start]
                break
    encoding = "UTF-16" if start in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
    return (
        f"{place} (0x{value:02x}) is not UTF-8. Convert the file with `iconv -f {encoding} -t UTF-8 OLD > NEW`, where {encoding} is the "
        "encoding that it has; if it is no text, leave it out."
    )
