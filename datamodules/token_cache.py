"""Tokens on disk: each domain is tokenised once, split by document, and read through a memory map ever after."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from lightning_megatrain.datamodules.documents import DocumentSource, batched, document_hash
from lightning_megatrain.datamodules.tokenizers import encode, tokenizer_fingerprint

_FORMAT = 2  # of the tokens and of how text is read
SPLITS = ("train", "val", "test")


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

    Every document gets the tokenizer's special tokens, and its end token where it has one.

    Args:
        source: The documents. They are read twice: once to deal them out, once to tokenise them.
        tokenizer: Gives the ids.
        fractions: The shares of validation and test documents. Documents are ordered by a hash of their text and the first
            go to validation, the next to test: a split that does not depend on their order, and never has one
            text on both sides. A fraction above zero gets one document at least.
        folder: Where to; its parent is created.

    Raises:
        ValueError: There are too few different documents for the splits asked for.
    """
    if (folder / "meta.json").is_file():
        return
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
        if not (folder / "meta.json").is_file():
            raise OSError(f"{building} could not be renamed to {folder}. Set `cache_dir` to a folder on one writable file system.")
    finally:
        shutil.rmtree(building, ignore_errors=True)


def open_split(folder: Path, split: str) -> TokenizedDocuments:
    """Map one split of a tokenised domain. Costs no memory until it is read."""
    meta = json.loads((folder / "meta.json").read_text())
    starts = np.load(folder / f"{split}.starts.npy", mmap_mode="r")
    file = folder / f"{split}.tokens"
    dtype = np.dtype(meta["dtype"])
    if file.stat().st_size != starts[-1] * dtype.itemsize:
        raise ValueError(
            f"{file} holds {file.stat().st_size} bytes instead of {starts[-1] * dtype.itemsize}: delete {folder} and run again."
        )
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
    (folder / "meta.json").write_text(json.dumps({"format": _FORMAT, "dtype": np.dtype(dtype).name, **counts}))


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
