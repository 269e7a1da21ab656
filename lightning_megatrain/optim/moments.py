"""How Adam's two moments are stored: FP32, BF16, or one byte with a scale for every 256 elements.

The same arithmetic as host_adamw.c, in torch. Values smaller than FP32 are rounded stochastically, to the one or the other neighbour so
that the mean is right: an average that decays by 0.1 % a step could not move at all under rounding to nearest.
"""

import torch
from torch import Tensor

BLOCK = 256
HEADROOM = 1.015869140625  # just over (128/127)^2 and (256/255)^4: the largest value of a block must not exceed the largest code
LEAST_M, LEAST_V = 2.0**-100, 2.0**-90


def random_bits(seed: int, begin: int, end: int) -> Tensor:
    """Hash the element numbers `begin` to `end` into 32 random bits each (int32); any order of work draws the same."""
    x = torch.arange(begin, end).to(torch.int32) ^ torch.tensor(seed).to(torch.int32)
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
    """Encode the first moment: `m = scale (c / 128)^2` with the sign of `c`.

    Args:
        m: FP32 (n,).
        noise: int32 (n,), uniform in [0, 65536).

    Returns:
        int8 codes (n,) and FP32 scales (blocks,), powers of two; NaN for a block that is not finite.
    """
    blocks = _blocks(m)  # (blocks, 256)
    scale = _scales(blocks, LEAST_M)
    y = blocks.abs() * (2.0**14 / scale)[:, None]
    q = sqrt(y).to(torch.int32).to(torch.float32)
    u = _blocks(noise.to(torch.float32) * 2.0**-16)
    code = (q.to(torch.int32) + (q * q + u * (q + q + 1.0) < y)).clamp_max(127)
    code = torch.where(blocks.view(torch.int32) < 0, -code, code)
    code = torch.where(scale.isfinite()[:, None], code, 1)
    return code.to(torch.int8).view(-1)[: m.numel()], scale


def encode_v(v: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Encode the second moment: `v = scale (c / 256)^4`, so its root reaches down to 1/65025 of the block's largest.

    Args:
        v: FP32 (n,), not negative.
        noise: int32 (n,), uniform in [0, 65536).

    Returns:
        uint8 codes (n,), never zero where `v` is not, and FP32 scales (blocks,), powers of two; NaN for a block that is not finite.
    """
    blocks = _blocks(v)
    scale = _scales(blocks, LEAST_V)
    y = blocks * (2.0**32 / scale)[:, None]
    q = sqrt(sqrt(y)).to(torch.int32).to(torch.float32)
    lower, upper = (q * q) * (q * q), ((q + 1.0) * (q + 1.0)) * ((q + 1.0) * (q + 1.0))
    u = _blocks(noise.to(torch.float32) * 2.0**-16)
    code = (q.to(torch.int32) + (lower + u * (upper - lower) < y)).clamp_max(255)
    code = torch.maximum(code, (blocks > 0).to(torch.int32))
    code = torch.where(scale.isfinite()[:, None], code, 1)
    return code.to(torch.uint8).view(-1)[: v.numel()], scale


def decode_m(code: Tensor, scale: Tensor) -> Tensor:
    """FP32 first moments (n,) of int8 codes (n,) and scales (blocks,)."""
    c = code.to(torch.float32)
    return c * c.abs() * _per_element(scale * 2.0**-14, code.numel())


def decode_v(code: Tensor, scale: Tensor) -> Tensor:
    """FP32 second moments (n,) of uint8 codes (n,) and scales (blocks,)."""
    square = code.to(torch.float32).square()
    return square * square * _per_element(scale * 2.0**-32, code.numel())


def block_count(elements: int) -> int:
    """The number of scales that `elements` values share."""
    return -(-elements // BLOCK)


def _blocks(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def _per_element(scale: Tensor, elements: int) -> Tensor:
    return scale.repeat_interleave(BLOCK)[:elements]


def _scales(blocks: Tensor, least: float) -> Tensor:
    # As integers NaN > inf > finite, so that none is lost in the maximum.
    most = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(1).view(torch.float32)
    bits = (most * HEADROOM).view(torch.int32) & 0x7FFFFFFF
    scale = ((bits.clamp_max(0x7F000000) + 0x7FFFFF) & 0x7F800000).view(torch.float32).clamp_min(least)
    return torch.where(bits >= 0x7F000000, torch.nan, scale)
