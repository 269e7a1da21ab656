"""One Adam update in torch: what host_adamw.c computes, operation by operation, bit for bit.

It runs where the kernel could not be built, and is the specification the kernel is tested against.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatrain.optim import moments
from lightning_megatrain.optim.masters import join, split

PIECE = 1 << 18  # elements at a time, so that temporaries stay in the cache


@dataclass(slots=True)
class Update:
    """One tensor's share of a step. Tensors are 1-D views in memory order, all of the parameter's length n.

    Attributes:
        param: FP32 or BF16 (n,); written.
        grad: FP32 or BF16 (n,).
        exp_avg: FP32, BF16 or int8 (n,); written.
        exp_avg_sq: FP32, BF16 or uint8 (n,); written.
        low: int16 (n,), the low half of each FP32 weight, where `param` is the BF16 half; written.
        exp_avg_scale: FP32 (blocks,) of 8-bit moments; written.
        exp_avg_sq_scale: likewise.
        max_exp_avg_sq: FP32 (n,), AMSGrad; written.
        working_copy: BF16 (n,), set to the new weights rounded to nearest even; written.
        grad_scale: multiplies the gradient; negative to maximize.
        l2: weight decay added to the gradient (Adam).
        keep: factor on the weight, `1 - lr * weight_decay` (AdamW).
        step_size: `lr / (1 - beta1^t)`.
        one_minus_beta1: all of these are rounded to FP32 once.
        beta2: likewise.
        one_minus_beta2: likewise.
        inv_sqrt_correction2: `(1 - beta2^t)^-1/2`.
        eps: added to the root.
        seed: 32 bits, of this step's stochastic rounding.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    low: Tensor | None = None
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None
    max_exp_avg_sq: Tensor | None = None
    working_copy: Tensor | None = None
    grad_scale: float = 1.0
    l2: float = 0.0
    keep: float = 1.0
    step_size: float = 0.0
    one_minus_beta1: float = 0.0
    beta2: float = 0.0
    one_minus_beta2: float = 0.0
    inv_sqrt_correction2: float = 1.0
    eps: float = 0.0
    seed: int = 0


@torch.no_grad()
def run(updates: list[Update]) -> None:
    """Apply the updates, piece by piece, with torch's operators and threads."""
    for update in updates:
        for begin in range(0, update.param.numel(), PIECE):
            _step_piece(update, begin, min(begin + PIECE, update.param.numel()))


def _step_piece(u: Update, begin: int, end: int) -> None:
    here = slice(begin, end)
    blocks = slice(begin // moments.BLOCK, moments.block_count(end))
    g = u.grad[here].to(torch.float32) * u.grad_scale
    p = u.param[here].to(torch.float32) if u.low is None else join(u.param[here], u.low[here])
    m, v = _decode(u, here, blocks)
    if u.l2 != 0.0:
        g = g + p * u.l2
    m = m + (g - m) * u.one_minus_beta1
    v = v * u.beta2 + g * g * u.one_minus_beta2
    root = v
    if u.max_exp_avg_sq is not None:
        most = u.max_exp_avg_sq[here]
        root = most.copy_(torch.where(v <= most, most, v))
    p = p * u.keep - (m / (moments.sqrt(root) * u.inv_sqrt_correction2 + u.eps)) * u.step_size
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
    low, high = noise & 0xFFFF, (noise >> 16) & 0xFFFF
    if u.exp_avg_scale is None or u.exp_avg_sq_scale is None:
        u.exp_avg[here], u.exp_avg_sq[here] = moments.encode_bf16(m, low), moments.encode_bf16(v, high)
        return
    u.exp_avg[here], u.exp_avg_scale[blocks] = moments.encode_m(m, low)
    u.exp_avg_sq[here], u.exp_avg_sq_scale[blocks] = moments.encode_v(v, high)
