"""Tokenizers by name: a hub id, a local folder, or the byte-level one that needs no files."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

_BYTE_OFFSET = 3  # of ByT5: ids 0 to 2 are padding, end and unknown


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Args:
        name: A hub id, a local folder, or `"bytes"`: UTF-8 bytes as they are, 259 ids without the 125 spare ones of ByT5.

    Raises:
        ValueError: Nothing of that name can be loaded.
    """
    if name == "bytes":
        return ByT5Tokenizer(extra_ids=0)
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f'No tokenizer could be loaded from {name!r}: give a hub id, a local folder, or "bytes" for the byte-level one. ({error})'
        ) from error


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[npt.NDArray[np.int64]]:
    """The ids of each text, with the tokenizer's special tokens, and its end token where it has one."""
    end = tokenizer.eos_token_id
    if isinstance(tokenizer, ByT5Tokenizer):
        # The same ids 100 times faster; the words "</s>" in a text stay words.
        return [
            np.append(np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64) + _BYTE_OFFSET, end) for text in texts
        ]
    encoded = tokenizer(texts, verbose=False)["input_ids"]  # verbose warns of documents longer than the model
    return [np.asarray(ids if end is None or (ids and ids[-1] == end) else [*ids, end], dtype=np.int64) for ids in encoded]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what decides how text becomes ids: the class, the vocabulary, the special tokens, the fast tokenizer's whole state."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        type(tokenizer).__name__,
        json.dumps(sorted(tokenizer.get_vocab().items())),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        backend.to_str() if backend is not None else "",
    ]
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
