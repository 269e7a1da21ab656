"""AdamW written once more, in float64, with the rounding that a single-precision step may have."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

EPSILON = 2.0**-24  # half a unit in the last place, relative: what one FP32 operation may lose


@dataclass
class Step:
    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    allowed: Tensor
    """How far an FP32 weight may lie from `weight`."""


def adamw_step(weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], grad_scale: float = 1.0) -> Step:
    """One step from FP32 values and the state before it; Loshchilov & Hutter's algorithm 2, or Adam with an L2 penalty."""
    p, g, m, v = (x.detach().double() for x in (weight, gradient, state["exp_avg"], state["exp_avg_sq"]))
    t, (beta1, beta2) = int(state["step"]) + 1, group["betas"]
    g = g * grad_scale * (-1 if group["maximize"] else 1)
    g_terms = g.abs()
    if not group["decoupled_weight_decay"]:
        g, g_terms = g + group["weight_decay"] * p, g_terms + group["weight_decay"] * p.abs()
    decay = group["lr"] * group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
    m_new = beta1 * m + (1 - beta1) * g
    v_new = beta2 * v + (1 - beta2) * g * g
    denominator = (v_new / (1 - beta2**t)).sqrt() + group["eps"]
    size = group["lr"] / (1 - beta1**t)
    weight_new = p * (1 - decay) - size * m_new / denominator
    # Sums may cancel, so their error is relative to their terms: at most 4 operations each for m and g, then 8 for root, division and
    # product, in any order and with any contraction; g enters v squared. The weight adds its own product and difference.
    update_terms = size * (m.abs() + 2 * g_terms) / denominator
    allowed = EPSILON * (3 * p.abs() + 3 * weight_new.abs() + 16 * update_terms) + 1e-44
    return Step(weight_new, m_new, v_new, allowed)
