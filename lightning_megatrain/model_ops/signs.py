"""Random signs that are computed, never stored.

The sign at (row, column) is a bit of a hash of a key, the row and the column, so any block of a matrix of any size can be made anywhere,
alone, and is the same on every device and in every run.
"""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

_BITS = 64  # signs in one hash


def key_of(*parts: object) -> int:
    """Returns a 63-bit key of what tells one matrix from another, such as the seed, a parameter's name and a side."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def rademacher(key: int, rows: Tensor, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns rows of a matrix of independent signs.

    Args:
        key: which matrix; see `key_of`.
        rows: (n,) int64, which rows, in any order.
        columns: the matrix's width.
        dtype: of the result. (default: `torch.float32`)

    Returns:
        (n, columns), each entry -1 or +1, on the device of `rows`. Costs about a nanosecond an entry on one core.
    """
    words = -(-columns // _BITS)
    counters = rows.view(-1, 1) * words + torch.arange(words, device=rows.device)
    hashes = _splitmix64(counters, key)
    signs = F.embedding(hashes.view(torch.uint8).to(torch.int32), _byte_signs(rows.device, dtype))  # (n, 8 x words, 8)
    return signs.reshape(len(rows), words * _BITS)[:, :columns]


@lru_cache(maxsize=8)
def _byte_signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns the eight signs of each byte, (256, 8)."""
    with torch.inference_mode(False):
        bits = torch.arange(256).view(-1, 1) >> torch.arange(8) & 1
        return (1 - 2 * bits).to(device, dtype)


def _splitmix64(counters: Tensor, key: int) -> Tensor:
    """Returns the generator SplitMix64 (Steele, Lea and Flood, 2014) at each counter; int64 arithmetic wraps as its unsigned one does."""
    z = (counters + 1) * -0x61C8864680B583EB + key  # 0x9E3779B97F4A7C15
    z = (z ^ _shift_right(z, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    z = (z ^ _shift_right(z, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, places: int) -> Tensor:
    return (z >> places) & ((1 << (64 - places)) - 1)
