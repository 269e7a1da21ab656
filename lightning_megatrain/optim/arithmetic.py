"""One Adam update in torch: what host_adamw.c computes, operation by operation, bit for bit.

It runs where the kernel could not be built, and is the specification the kernel is tested against.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatrain.optim import moments
from lightning_megatrain.optim.masters import join, split
from lightning_megatrain.optim.scalars import Scalars

PIECE = 1 << 18  # elements at a time, so that temporaries stay in the cache


@dataclass(slots=True)
class Update:
    """One tensor's share of a step. All tensors are of one dimension and n elements, in the order of memory.

    Attributes:
        param: FP32 or BF16; written.
        grad: FP32 or BF16.
        scalars: the step's numbers.
        seed: 32 bits, of this step's stochastic rounding.
        exp_avg: FP32, BF16 or int8; written.
        exp_avg_sq: FP32, BF16 or uint8; written.
        exp_avg_scale: FP32 (blocks,) of 8-bit moments; written.
        exp_avg_sq_scale: likewise.
        low: int16, the low half of each FP32 weight, where `param` is the BF16 half; written.
        max_exp_avg_sq: FP32, AMSGrad; written.
        working_copy: BF16, set to the new weights rounded to nearest even; written.
    """

    param: Tensor
    grad: Tensor
    scalars: Scalars
    seed: int
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None
    low: Tensor | None = None
    max_exp_avg_sq: Tensor | None = None
    working_copy: Tensor | None = None


@torch.no_grad()
def run(updates: list[Update]) -> None:
    """Apply the updates, piece by piece, with torch's operators and threads."""
    for update in updates:
        for begin in range(0, update.param.numel(), PIECE):
            _step_piece(update, begin, min(begin + PIECE, update.param.numel()))


def _step_piece(u: Update, begin: int, end: int) -> None:
    here = slice(begin, end)
    blocks = slice(begin // moments.BLOCK, moments.block_count(end))
    k = u.scalars
    g = u.grad[here].to(torch.float32) * k.grad_scale
    p = u.param[here].to(torch.float32) if u.low is None else join(u.param[here], u.low[here])
    m, v = _decode(u, here, blocks)
    if k.l2 != 0.0:
        g = g + p * k.l2
    m = m + (g - m) * k.one_minus_beta1
    v = v * k.beta2 + g * g * k.one_minus_beta2
    root = v
    if u.max_exp_avg_sq is not None:
        most = u.max_exp_avg_sq[here]
        root = most.copy_(torch.where(v <= most, most, v))
    p = p * k.keep - (m / (moments.sqrt(root) * k.inv_sqrt_correction2 + k.eps)) * k.step_size
    if u.low is None:
        u.param[here] = p.to(u.param.dtype)
    else:
        u.param[here], u.low[here] = split(p)
    if u.working_copy is not None:
        u.working_copy[here] = p
    _encode(u, here, blocks, m, v)


def _decode(u: Update, here: slice, blocks: slice) -> tuple[Tensor, Tensor]:
    if u.exp_avg_scale is None or u.exp_avg_sq_scale is None:
        return u.exp_avg[here].to(torch.float32), u.exp_avg_sq[here].to(torch.float32)
    return moments.decode_m(u.exp_avg[here], u.exp_avg_scale[blocks]), moments.decode_v(u.exp_avg_sq[here], u.exp_avg_sq_scale[blocks])


def _encode(u: Update, here: slice, blocks: slice, m: Tensor, v: Tensor) -> None:
    if u.exp_avg.dtype == torch.float32:
        u.exp_avg[here], u.exp_avg_sq[here] = m, v
        return
    noise = moments.random_bits(u.seed, here.start, here.stop)
    if u.exp_avg_scale is None or u.exp_avg_sq_scale is None:
        u.exp_avg[here] = moments.encode_bf16(m, noise & 0xFFFF)
        u.exp_avg_sq[here] = moments.encode_bf16(v, (noise >> 16) & 0xFFFF)
        return
    u.exp_avg[here], u.exp_avg_scale[blocks] = moments.encode_m(m, noise & 0xFFFFF)
    u.exp_avg_sq[here], u.exp_avg_sq_scale[blocks] = moments.encode_v(v, (noise >> 12) & 0xFFFFF)
