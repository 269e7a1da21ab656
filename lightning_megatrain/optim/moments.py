"""How Adam's two moments are stored: FP32, BF16, or one byte with a scale for every 256 elements.

The same arithmetic as host_adamw.c, in torch. Values smaller than FP32 are rounded stochastically, to the one or the other neighbour so
that the mean is right: an average that decays by 0.1 % a step could not move at all under rounding to nearest.
"""

import torch
from torch import Tensor

BLOCK = 256
HEADROOM = 1.0703125  # the largest of a block must not round up past the largest code, 61439 (m) or 15 / 16 * 2^32 (v) units
LEAST = 2.0**-90
UNIT_M, UNIT_V = 2.0**-16, 2.0**-32
NOISE_BITS = 20  # of an 8-bit moment
ONE = 0x3F800000  # the bits of 1.0


def random_bits(seed: int, begin: int, end: int) -> Tensor:
    """Draw 32 random bits (int32) for each of the elements `begin` to `end`; any order of work draws the same.

    They are `place[i % BLOCK] ^ block[i // BLOCK]`, both hashes of the seed: cheap, and any two elements' bits are independent of each
    other, which is all that the mean and the variance of what is rounded need.
    """
    index = torch.arange(begin, end, device="cpu")
    place = _hash(seed, torch.arange(BLOCK, device="cpu"))[index % BLOCK]
    first = begin // BLOCK
    key = int(_hash(seed, torch.tensor([BLOCK], device="cpu")))
    block = _hash(key, torch.arange(first, block_count(end), device="cpu"))[index // BLOCK - first]
    return place ^ block


def _hash(seed: int, index: Tensor) -> Tensor:
    x = index.to(torch.int32) ^ torch.tensor(seed, device="cpu").to(torch.int32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x = (x ^ _logical_shift(x, shift)) * factor
    return x ^ _logical_shift(x, 16)


def _logical_shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (32 - by)) - 1)


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded FP32 root. torch's own may be off by one in the last bit; a double-precision root, rounded, is not."""
    return x.to(torch.float64).sqrt().to(torch.float32)


def encode_bf16(value: Tensor, noise: Tensor) -> Tensor:
    """Round FP32 (n,) to BF16, up or down by chance.

    Args:
        value: FP32 (n,).
        noise: int32 (n,), uniform in [0, 65536).
    """
    bits = (value.view(torch.int32) + noise) >> 16
    return torch.where(value.isnan(), 0x7FC0, bits).to(torch.int16).view(torch.bfloat16)


def encode_m(m: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Encode the first moment: sign, four bits of exponent and three of mantissa of `1 + |m| / unit`, `unit = scale / 2^16`.

    Args:
        m: FP32 (n,).
        noise: int32 (n,), uniform in [0, 2^20).

    Returns:
        int8 codes (n,) and FP32 scales (blocks,), powers of two; NaN for a block that is not finite.
    """
    blocks = _blocks(m)  # (blocks, 256)
    scale = _scales(blocks)
    x = blocks * (1.0 / (scale * UNIT_M))[:, None]
    drawn = (x + _one_signed(x)).view(torch.int32) + (_blocks(noise) - ONE)
    code = (drawn >> 20 & 0x7F) | (drawn >> 24 & 0x80)
    code = torch.where(scale.isfinite()[:, None], code, 1)
    return code.to(torch.uint8).view(torch.int8).view(-1)[: m.numel()], scale


def encode_v(v: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Encode the second moment: five bits of exponent and three of mantissa of `1 + v / unit`, `unit = scale / 2^32`.

    Args:
        v: FP32 (n,), not negative.
        noise: int32 (n,), uniform in [0, 2^20).

    Returns:
        uint8 codes (n,), never zero, and FP32 scales (blocks,), powers of two; NaN for a block that is not finite.
    """
    blocks = _blocks(v)
    scale = _scales(blocks)
    drawn = (blocks * (1.0 / (scale * UNIT_V))[:, None] + 1.0).view(torch.int32) + (_blocks(noise) - ONE)
    code = drawn.clamp_min(1 << 20) >> 20
    code = torch.where(scale.isfinite()[:, None], code, 1)
    return code.to(torch.uint8).view(-1)[: v.numel()], scale


def decode_m(code: Tensor, scale: Tensor) -> Tensor:
    """FP32 first moments (n,) of int8 codes (n,) and scales (blocks,)."""
    return _decode((code.to(torch.int32) << 4) & 0x87F0, scale * UNIT_M)


def decode_v(code: Tensor, scale: Tensor) -> Tensor:
    """FP32 second moments (n,) of uint8 codes (n,) and scales (blocks,)."""
    return _decode(code.to(torch.int32) << 4, scale * UNIT_V)


def _decode(upper: Tensor, unit: Tensor) -> Tensor:
    expanded = ((upper + (ONE >> 16)) << 16).view(torch.float32)
    return (expanded - _one_signed(expanded)) * unit.repeat_interleave(BLOCK)[: upper.numel()]


def _one_signed(x: Tensor) -> Tensor:
    return torch.ones_like(x).copysign(x)


def block_count(elements: int) -> int:
    """The number of scales that `elements` values share."""
    return -(-elements // BLOCK)


def _blocks(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def _scales(blocks: Tensor) -> Tensor:
    # As integers NaN > inf > finite, so that none is lost in the maximum.
    most = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(1).view(torch.float32)
    bits = (most * HEADROOM).view(torch.int32) & 0x7FFFFFFF
    scale = ((bits.clamp_max(0x7F000000) + 0x7FFFFF) & 0x7F800000).view(torch.float32).clamp_min(LEAST)
    return torch.where(bits >= 0x7F000000, torch.nan, scale)
