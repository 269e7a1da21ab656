"""What HostAdamW holds for each parameter."""

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_megatrain.optim import moments as codes
from lightning_megatrain.optim.checks import describe, same_layout
from lightning_megatrain.optim.masters import flat

Moments = Literal["fp32", "bf16", "int8"]
State = dict[str, Any]
_ONE_AN_ELEMENT = ("exp_avg", "exp_avg_sq", "exp_avg_codes", "exp_avg_sq_codes", "max_exp_avg_sq", "master_low")


def bytes_per_parameter(masters: str = "fp32", moments: Moments = "fp32", *, working_copy: bool = False, amsgrad: bool = False) -> float:
    """Host bytes a parameter of weight, moments and working copy; gradients and 4 bytes a tensor (its step) come on top.

    Args:
        masters: "fp32" (an FP32 weight), "split" (BF16 and 16 bits more) or "none" (BF16).
        moments: "fp32", "bf16", or "int8".
        working_copy: whether a BF16 copy of an FP32 weight is kept.
        amsgrad: whether the largest second moment is kept.
    """
    weight = {"fp32": 4, "split": 2 + 2, "none": 2}[masters]
    pair = {"fp32": 4 + 4, "bf16": 2 + 2, "int8": 1 + 1 + 2 * 4 / codes.BLOCK}[moments]
    return weight + pair + 2 * working_copy + 4 * amsgrad


def new(parameter: Tensor, moments: Moments, *, amsgrad: bool, low: bool) -> State:
    """Make a parameter's state at step zero.

    Args:
        parameter: the parameter, whose strides the state takes.
        moments: the moments' storage.
        amsgrad: whether to hold "max_exp_avg_sq".
        low: whether to hold "master_low", the int16 low halves of FP32 masters.
    """

    def zeros(dtype: torch.dtype) -> Tensor:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)

    def zero_numbers(*shape: int) -> Tensor:  # whatever torch's defaults are
        return torch.zeros(shape, dtype=torch.float32, device="cpu")

    state: State = {"step": zero_numbers()}
    if moments == "int8":
        scales = codes.block_count(parameter.numel())
        state |= {"exp_avg_codes": zeros(torch.int8), "exp_avg_scales": zero_numbers(scales)}
        state |= {"exp_avg_sq_codes": zeros(torch.uint8), "exp_avg_sq_scales": zero_numbers(scales)}
    else:
        dtype = torch.float32 if moments == "fp32" else torch.bfloat16
        state |= {"exp_avg": zeros(dtype), "exp_avg_sq": zeros(dtype)}
    if amsgrad:
        state["max_exp_avg_sq"] = zeros(torch.float32)
    if low:
        state["master_low"] = zeros(torch.int16)
    return state


def moment_tensors(state: State) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """First moment, second moment, and their scales if they are 8-bit codes."""
    if "exp_avg_codes" in state:
        return state["exp_avg_codes"], state["exp_avg_sq_codes"], state["exp_avg_scales"], state["exp_avg_sq_scales"]
    return state["exp_avg"], state["exp_avg_sq"], None, None


def moment_names(state: State) -> tuple[str, str]:
    """Under what names a state holds its moments."""
    return ("exp_avg_codes", "exp_avg_sq_codes") if "exp_avg_codes" in state else ("exp_avg", "exp_avg_sq")


def full_moments(state: State) -> tuple[Tensor, Tensor]:
    """Both moments in FP32."""
    m, v, m_scale, v_scale = moment_tensors(state)
    if m_scale is None or v_scale is None:
        return m.to(torch.float32), v.to(torch.float32)
    m_full, v_full = torch.empty_like(m, dtype=torch.float32), torch.empty_like(v, dtype=torch.float32)
    flat(m_full).copy_(codes.decode_m(flat(m), m_scale))
    flat(v_full).copy_(codes.decode_v(flat(v), v_scale))
    return m_full, v_full


_FORMS: dict[tuple[torch.dtype, torch.dtype], Moments] = {
    (torch.float32, torch.float32): "fp32",
    (torch.bfloat16, torch.bfloat16): "bf16",
    (torch.int8, torch.uint8): "int8",
}


def moments_form(state: State) -> Moments:
    """In what form a state holds its moments.

    Raises:
        TypeError: somebody else put other tensors there, or took some away.
    """
    names = moment_names(state)
    lacking = [n for n in ("step", *names, *(f"{n[:-5]}scales" for n in names if n.endswith("codes"))) if state.get(n) is None]
    if lacking:
        raise TypeError(
            f"the state of a parameter has {sorted(map(str, state))} and lacks {lacking}; load a state with load_state_dict(), or delete "
            "optimizer.state[parameter] to begin it again"
        )
    m, v, _, _ = moment_tensors(state)
    if (m.dtype, v.dtype) not in _FORMS or not (m.is_cpu and v.is_cpu):
        raise TypeError(f"moments {describe(m)} and {describe(v)} are in no form of HostAdamW's; load a state with load_state_dict()")
    return _FORMS[m.dtype, v.dtype]


def lies_like(state: State, parameter: Tensor) -> bool:
    """Whether each element's state lies in memory where the element lies; not so once somebody gave the parameter another layout.

    Raises:
        ValueError: the parameter has another shape than it had.
    """
    shape = parameter.shape
    for tensor in (state[name] for name in _ONE_AN_ELEMENT if name in state):
        if tensor.shape != shape:
            raise ValueError(
                f"a parameter of shape {tuple(tensor.shape)} has become {tuple(shape)} since its last step. Make a new "
                "optimizer, or delete optimizer.state[parameter] to begin it again"
            )
        if not same_layout(tensor, parameter):
            return False
    return True
