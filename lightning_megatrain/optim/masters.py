"""Exact FP32 weights held as BF16 and the 16 bits that BF16 drops."""

import torch
from torch import Tensor


def flat(tensor: Tensor) -> Tensor:
    """View a dense tensor's elements in the order they lie in memory.

    Args:
        tensor: any dense tensor, of any strides (channels-last, transposed).

    Returns:
        A 1-D view of the same memory, without gradient.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split FP32 values into BF16 and the low halves that make them exact again.

    `fp32 bits = (bf16 bits << 16) + low`, so the BF16 half is the value rounded to nearest, ties away from zero: under 12 bytes a parameter
    (2 + 2 and two FP32 moments) this is the weight the device computes with and an FP32 master at once.

    Args:
        value: FP32, dense, any shape. NaNs lose their payload; everything else survives, signed zeros and denormals included.

    Returns:
        The BF16 and the int16 half, each of `value`'s shape and strides.

    Raises:
        TypeError: if `value` is not FP32.
    """
    if value.dtype != torch.float32:
        raise TypeError(f"split takes an FP32 tensor, not {value.dtype}; convert it with .float()")
    bits = flat(torch.where(value.isnan(), torch.nan, value)).view(torch.int32)
    high, low = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
    flat(low).copy_(bits)  # the integer cast keeps the low bits
    flat(high).view(torch.int16).copy_((bits + 0x8000) >> 16)
    return high, low


def join(high: Tensor, low: Tensor) -> Tensor:
    """Put the two halves of `split` together.

    Args:
        high: BF16, dense.
        low: int16, of `high`'s shape and strides.

    Returns:
        The FP32 values, exactly those that were split. Where `high` was set to zero since (a pruning mask), zero.

    Raises:
        TypeError: if the halves are not BF16 and int16.
    """
    if high.dtype != torch.bfloat16 or low.dtype != torch.int16:
        raise TypeError(f"join takes a BF16 and an int16 tensor, not {high.dtype} and {low.dtype}")
    value = torch.empty_like(high, dtype=torch.float32)
    low_bits = flat(low).to(torch.int32)
    # Zero minus something would read as NaN; split never makes that, a zero written beside a stale low half does.
    low_bits = torch.where(flat(high) == 0, low_bits.clamp_min(0), low_bits)
    torch.add(flat(high).view(torch.int16).to(torch.int32) << 16, low_bits, out=flat(value).view(torch.int32))
    return value
