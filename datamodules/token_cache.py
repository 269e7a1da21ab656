"""Tokens on disk: each domain is tokenised once, split by document, and read through a memory map ever after.

A folder is on the disk before it has its name, so a kill or a power cut leaves the whole of it or none. What happens to it later is found
when it is opened, as far as that is cheap: any change of `meta.json` and of the starts of documents, of the length of the tokens, and of
the tokens in 64 blocks of 64 KiB, the first and last among them (all of a file up to 4 MiB). Not found is what the disk changes between
these blocks: that would take reading everything. What is damaged is made again, with a warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from lightning_megatrain.datamodules.documents import DocumentSource, batched, document_hash
from lightning_megatrain.datamodules.tokenizers import encode, tokenizer_fingerprint

_FORMAT = 3  # of the tokens and of how text is read
_BLOCK, _BLOCKS = 1 << 16, 64  # bytes of a block, and how many of a file of tokens are looked at
SPLITS = ("train", "val", "test")


class _DamagedError(Exception):
    """Says which file of a folder is not what was written."""


@dataclasses.dataclass(frozen=True)
class TokenizedDocuments:
    """The documents of one split of one domain.

    Args:
        tokens: All ids end to end, (number of tokens,), uint16 or uint32, memory-mapped.
        starts: Where each document begins, and the end of the last, (number of documents + 1,), int64.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.starts) - 1


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/lightning_megatrain`, or `~/.cache/lightning_megatrain`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_megatrain"


def cache_key(source: DocumentSource, tokenizer: PreTrainedTokenizerBase, fractions: tuple[float, float]) -> str:
    """What the tokens depend on, hashed: contents, tokenizer, split. Neither names of files nor the block size count."""
    parts = [_FORMAT, source.fingerprint(), tokenizer_fingerprint(tokenizer), fractions]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def tokenize(source: DocumentSource, tokenizer: PreTrainedTokenizerBase, fractions: tuple[float, float], folder: Path) -> None:
    """Tokenise a domain into `folder`, unless it is there. A kill at any moment leaves the whole folder or none.

    A folder that is damaged is removed, with a warning, and made again.

    Every document gets the tokenizer's special tokens, and its end token where it has one.

    Args:
        source: The documents. They are read twice: once to deal them out, once to tokenise them.
        tokenizer: Gives the ids.
        fractions: The shares of validation and test documents. Documents are ordered by a hash of their text and the first
            go to validation, the next to test: a split that does not depend on their order, and never has one
            text on both sides. A fraction above zero gets one document at least.
        folder: Where to; its parent is created.

    Raises:
        ValueError: There are too few different documents for the splits asked for, or a damaged folder cannot be removed.
    """
    if folder.exists():
        try:
            _check(folder, SPLITS)
            return
        except _DamagedError as damage:
            _remove_damaged(folder, source.name, str(damage))
    limits = _split_limits(source, fractions)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    building = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    building.mkdir()
    try:
        _write(source, tokenizer, limits, building)
        # Another process may have built the same folder meanwhile: then its copy stays and ours goes.
        with contextlib.suppress(OSError):
            building.rename(folder)
        _to_disk(folder.parent)
        if not (folder / "meta.json").is_file():
            raise OSError(f"{building} could not be renamed to {folder}. Set `cache_dir` to a folder on one writable file system.")
    finally:
        shutil.rmtree(building, ignore_errors=True)


def open_split(folder: Path, split: str) -> TokenizedDocuments:
    """Map one split of a tokenised domain. Costs no memory until it is read, and the reading of its starts and of 4 MiB of its tokens.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: It is damaged.
    """
    if not folder.exists():
        raise FileNotFoundError(f"There is no token cache {folder}: call prepare_data() before setup(), on every machine.")
    try:
        meta = _check(folder, (split,))
    except _DamagedError as damage:
        raise ValueError(f"The token cache is damaged: {folder / str(damage)}. Delete {folder} and run again.") from damage
    starts = np.load(folder / f"{split}.starts.npy", mmap_mode="r")
    file, dtype = folder / f"{split}.tokens", np.dtype(meta["dtype"])
    # An empty file cannot be mapped.
    tokens = np.memmap(file, dtype=dtype, mode="r") if starts[-1] else np.empty(0, dtype)
    return TokenizedDocuments(tokens, starts)


def _split_limits(source: DocumentSource, fractions: tuple[float, float]) -> tuple[int, int]:
    """The hashes up to which a document is validation, and up to which it is test."""
    hashes = np.unique(np.fromiter((document_hash(text) for text in source), dtype=np.int64))
    counts = [max(1, round(share * len(hashes))) if share else 0 for share in fractions]
    if sum(counts) >= len(hashes):
        asked = "` and `".join(name for name, share in zip(("val_fraction", "test_fraction"), fractions, strict=True) if share)
        raise ValueError(
            f"Domain {source.name!r} has {len(hashes)} different documents, too few for {counts[0]} of validation, {counts[1]} of test "
            f"and one of training. Give it more documents (one long text file is one document), or set `{asked}` to 0."
        )
    ends = np.cumsum(counts)
    last = [int(hashes[end - 1]) if end else -1 for end in ends]
    return last[0], last[1]


def _write(source: DocumentSource, tokenizer: PreTrainedTokenizerBase, limits: tuple[int, int], folder: Path) -> None:
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    lengths: dict[str, list[int]] = {split: [] for split in SPLITS}
    with contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {split: stack.enter_context((folder / f"{split}.tokens").open("wb")) for split in SPLITS}
        progress = stack.enter_context(tqdm(desc=f"Tokenising {source.name}", unit=" characters", unit_scale=True))
        for texts in batched(source):
            for text, ids in zip(texts, encode(tokenizer, texts), strict=True):
                hashed = document_hash(text)
                split = "val" if hashed <= limits[0] else "test" if hashed <= limits[1] else "train"
                files[split].write(ids.astype(dtype).tobytes())
                lengths[split].append(len(ids))
            progress.update(sum(map(len, texts)))
    for split in SPLITS:
        np.save(folder / f"{split}.starts.npy", np.concatenate([[0], np.cumsum(lengths[split], dtype=np.int64)]).astype(np.int64))
    counts = {split: {"documents": len(lengths[split]), "tokens": sum(lengths[split])} for split in SPLITS}
    described = {file.name: _described(file) for file in sorted(folder.iterdir())}
    meta: dict[str, Any] = {"format": _FORMAT, "dtype": np.dtype(dtype).name, **counts, "files": described}
    (folder / "meta.json").write_text(json.dumps({**meta, "checksum": _checksum([json.dumps(meta).encode()])}))
    for file in (*folder.iterdir(), folder):
        _to_disk(file)


def _check(folder: Path, splits: Iterable[str]) -> dict[str, Any]:
    """Return what `meta.json` says.

    Raises:
        _DamagedError: A file is missing, or is not what was written.
    """
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
        whole = meta.pop("checksum") == _checksum([json.dumps(meta).encode()])
    except FileNotFoundError as error:
        raise _DamagedError("meta.json is missing") from error
    except (ValueError, LookupError, TypeError, AttributeError):  # no text, no JSON, or not this JSON
        whole = False
    if not whole:
        raise _DamagedError("meta.json is not what was written")
    for name in [split + ending for split in splits for ending in (".tokens", ".starts.npy")]:
        written = meta["files"][name]
        try:
            found = _described(folder / name)
        except FileNotFoundError as error:
            raise _DamagedError(f"{name} is missing") from error
        if found["bytes"] != written["bytes"]:
            raise _DamagedError(f"{name} holds {found['bytes']} bytes instead of {written['bytes']}")
        if found != written:
            raise _DamagedError(f"{name} is not what was written")
    return meta


def _described(file: Path) -> dict[str, Any]:
    """Return a file's length and the checksum of its contents; of a large file of tokens, that of some blocks."""
    size = file.stat().st_size
    places: Iterable[int] = range(0, size, _BLOCK)
    if file.suffix == ".tokens" and len(range(0, size, _BLOCK)) > _BLOCKS:
        places = [i * (size - _BLOCK) // (_BLOCKS - 1) for i in range(_BLOCKS)]
    with file.open("rb") as opened:
        return {"bytes": size, "checksum": _checksum(_read(opened, place) for place in places)}


def _read(file: BinaryIO, place: int) -> bytes:
    file.seek(place)
    return file.read(_BLOCK)


def _checksum(blocks: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def _to_disk(path: Path) -> None:
    """Wait until a file or a folder's list of names is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some file systems do not know this of folders
            raise
    finally:
        os.close(handle)


def _remove_damaged(folder: Path, domain: str, damage: str) -> None:
    rank_zero_warn(
        f"The token cache of domain {domain!r} is damaged: {folder / damage}. It is removed and made again; if this happens more than "
        "once, look at the disk."
    )
    aside = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            folder.rename(aside)
            shutil.rmtree(aside)
    except OSError as error:
        raise ValueError(f"The token cache {folder} is damaged and cannot be removed ({error}). Delete {folder} and run again.") from error


def _remove_abandoned(folder: Path) -> None:
    """Delete what builders of this folder left behind that no longer run."""
    for leftover in folder.parent.glob(f"{folder.name}.*.tmp"):
        pid = int(leftover.name.rsplit(".", 2)[1])
        try:
            os.kill(pid, 0)
            running = pid != os.getpid()
        except ProcessLookupError:
            running = False
        except PermissionError:
            running = True
        if not running:
            shutil.rmtree(leftover, ignore_errors=True)
