"""What HostAdamW holds for each parameter, and how it enters and leaves a state dictionary."""

import warnings
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_megatrain.optim import moments as codes
from lightning_megatrain.optim.masters import flat, join, split

Moments = Literal["fp32", "bf16", "int8"]
State = dict[str, Any]


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

    state: State = {"step": torch.zeros((), dtype=torch.float32)}
    if moments == "int8":
        scales = codes.block_count(parameter.numel())
        state |= {"exp_avg_codes": zeros(torch.int8), "exp_avg_scales": torch.zeros(scales)}
        state |= {"exp_avg_sq_codes": zeros(torch.uint8), "exp_avg_sq_scales": torch.zeros(scales)}
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


def full_moments(state: State) -> tuple[Tensor, Tensor]:
    """Both moments in FP32."""
    m, v, m_scale, v_scale = moment_tensors(state)
    if m_scale is None or v_scale is None:
        return m.to(torch.float32), v.to(torch.float32)
    m_full, v_full = torch.empty_like(m, dtype=torch.float32), torch.empty_like(v, dtype=torch.float32)
    flat(m_full).copy_(codes.decode_m(flat(m), m_scale))
    flat(v_full).copy_(codes.decode_v(flat(v), v_scale))
    return m_full, v_full


def with_full_moments(state: State) -> State:
    """The state with FP32 moments under torch's names."""
    if "exp_avg" not in state and "exp_avg_codes" not in state:
        return state
    rest = {k: v for k, v in state.items() if not k.startswith("exp_avg")}
    m, v = full_moments(state)
    return {**rest, "exp_avg": m, "exp_avg_sq": v}


def exported(parameter: Tensor, state: State, masters: bool = True) -> State:
    """The state as it is saved: "master_low" becomes "master", the exact FP32 value, or is left out."""
    if "master_low" not in state:
        return state
    saved = {k: v for k, v in state.items() if k != "master_low"}
    return {**saved, "master": join(parameter.detach(), state["master_low"])} if masters else saved


@torch.no_grad()
def imported(parameter: Tensor, own: State, saved: State) -> None:
    """Copy a saved state into a parameter's own, whatever the form of each, and its exact value into the parameter.

    Args:
        parameter: written where `saved` has a "master" that rounds to it.
        own: what `new` made; written.
        saved: a state of HostAdamW, torch's AdamW or torch's Adam.

    Raises:
        ValueError: if shapes differ.
    """
    own["step"].fill_(float(saved["step"]))
    shape = moment_tensors(saved)[0].shape
    if shape != parameter.shape:
        raise ValueError(f"the loaded state is of a parameter of shape {tuple(shape)}, this one has {tuple(parameter.shape)}")
    _import_moments(own, saved)
    if "max_exp_avg_sq" in own and "max_exp_avg_sq" in saved:
        own["max_exp_avg_sq"].copy_(saved["max_exp_avg_sq"])
    if "master" in saved:
        _import_master(parameter, own, torch.empty_like(parameter, dtype=torch.float32).copy_(saved["master"]))


def _import_moments(own: State, saved: State) -> None:
    mine, theirs = moment_tensors(own), moment_tensors(saved)
    if mine[0].dtype == theirs[0].dtype and mine[0].stride() == theirs[0].stride():
        for to, value in zip(mine, theirs, strict=True):
            if to is not None and value is not None:
                to.copy_(value)
        return
    m, v = (torch.empty_like(mine[0], dtype=torch.float32).copy_(x) for x in full_moments(saved))
    if "exp_avg_codes" not in own:
        own["exp_avg"].copy_(m)
        own["exp_avg_sq"].copy_(v)
        return
    middle = torch.tensor(1 << (codes.NOISE_BITS - 1), dtype=torch.int32).expand(m.numel())  # in place of noise: to the nearest
    for name, value, encode in (("exp_avg", m, codes.encode_m), ("exp_avg_sq", v, codes.encode_v)):
        code, scale = encode(flat(value), middle)
        flat(own[f"{name}_codes"]).copy_(code)
        own[f"{name}_scales"].copy_(scale)


def _import_master(parameter: Tensor, own: State, master: Tensor) -> None:
    high, low = split(master)
    held = parameter.to(torch.bfloat16)
    exact = parameter.to(torch.float32) == master
    rounded = (parameter == held) & ((held == high) | (held == master.to(torch.bfloat16)))
    if not bool((exact | rounded | master.isnan()).all()):
        warnings.warn(
            "the FP32 masters in the loaded optimizer state do not round to the model's weights: the weights are kept and their masters "
            "start from them. Load the model's weights before the optimizer's state.",
            stacklevel=2,
        )
        if "master_low" in own:
            own["master_low"].zero_()
        return
    if "master_low" in own:
        parameter.copy_(high)
        own["master_low"].copy_(low)
    elif parameter.dtype == torch.float32:
        parameter.copy_(master)
