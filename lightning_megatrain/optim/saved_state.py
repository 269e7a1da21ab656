"""How what HostAdamW holds enters and leaves a state dictionary, and passes from one form to another."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_megatrain.optim import moments as codes
from lightning_megatrain.optim.checks import check_group
from lightning_megatrain.optim.masters import flat, join, split
from lightning_megatrain.optim.state import Moments, State, full_moments, lies_like, moment_tensors, moments_form, new


def with_full_moments(held: State) -> State:
    """The state with FP32 moments under torch's names."""
    if "exp_avg" not in held and "exp_avg_codes" not in held:
        return held
    rest = {k: v for k, v in held.items() if not k.startswith("exp_avg")}
    m, v = full_moments(held)
    return {**rest, "exp_avg": m, "exp_avg_sq": v}


def exported(parameter: Tensor, held: State, masters: bool = True) -> State:
    """The state as it is saved: "master_low" becomes "master", the exact FP32 value, or is left out."""
    if "master_low" not in held:
        return held
    saved = {k: v for k, v in held.items() if k != "master_low"}
    return {**saved, "master": join(parameter.detach(), held["master_low"])} if masters else saved


def check_saved(parameter: Tensor, saved: State) -> None:
    """Raise ValueError for a state that is not of AdamW's kind, or of a parameter of another shape."""
    if "step" not in saved or not ("exp_avg" in saved or "exp_avg_codes" in saved):
        raise ValueError(
            f"the loaded state has {sorted(map(str, saved))}: it is of no AdamW or Adam, whose have step, exp_avg and exp_avg_sq"
        )
    shape = moment_tensors(saved)[0].shape
    if shape != parameter.shape:
        raise ValueError(f"the loaded state is of a parameter of shape {tuple(shape)}, this one has {tuple(parameter.shape)}")


def taken_in(parameter: Tensor, own: State, saved: State, moments: Moments, *, low: bool, exact: Tensor | None) -> State:
    """A parameter's state with the values of a saved one: its own, or a new one where it has none that fits.

    Args:
        parameter: as for `imported`.
        own: its state until now.
        saved: a state that `check_saved` has passed.
        moments: in what form a new state holds its moments.
        low: whether a new state has "master_low".
        exact: the low half until now.
    """
    if not own or not lies_like(own, parameter):
        own = new(parameter, moments, amsgrad=False, low=low)
        if exact is not None:
            own["master_low"].copy_(exact)
    imported(parameter, own, saved)
    return own


@torch.no_grad()
def imported(parameter: Tensor, own: State, saved: State) -> None:
    """Copy a saved state into a parameter's own, whatever the form of each, and its exact value into the parameter.

    Args:
        parameter: written where `saved` has a "master" that rounds to it.
        own: what `new` made; written.
        saved: a state that `check_saved` has passed.
    """
    own["step"].fill_(float(saved["step"]))
    _import_moments(own, saved)
    if "max_exp_avg_sq" in saved:
        if "max_exp_avg_sq" not in own:
            own["max_exp_avg_sq"] = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
        own["max_exp_avg_sq"].copy_(saved["max_exp_avg_sq"])
    else:
        own.pop("max_exp_avg_sq", None)
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
    middle = torch.tensor(1 << (codes.NOISE_BITS - 1), dtype=torch.int32, device="cpu").expand(m.numel())  # no noise: to the nearest
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


@torch.inference_mode(False)  # what is made here outlives it
def fitting(parameter: Tensor, held: State, moments: Moments, group: Mapping[str, Any], *, low: bool) -> State:
    """The state as a parameter wants it now, whose dtype, layout or options someone may have changed.

    Args:
        parameter: the parameter.
        held: its state until now, changed where necessary and returned if the parameter lies in memory as it did; empty for a new one.
        moments: in what form a new state holds its moments.
        group: with "amsgrad", whether to hold "max_exp_avg_sq", which is never dropped.
        low: whether to hold "master_low".

    Raises:
        ValueError: the parameter has another shape than it had, or AMSGrad has no exact moments.
        TypeError: somebody else put other tensors into the state.
    """
    form, amsgrad = moments_form(held) if held else moments, group["amsgrad"]
    if amsgrad and form != "fp32":
        check_group(group, form)
    if not held:
        return new(parameter, moments, amsgrad=amsgrad, low=low)
    if not lies_like(held, parameter):
        held = _laid_like(parameter, held)
    if not isinstance(held["step"], torch.FloatTensor) or held["step"].numel() != 1:
        held["step"] = torch.tensor(float(held["step"]), dtype=torch.float32, device="cpu")
    if amsgrad and "max_exp_avg_sq" not in held:
        held["max_exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
    if low and "master_low" not in held:  # the parameter was FP32 until now
        held["master_low"] = torch.zeros_like(parameter, dtype=torch.int16, requires_grad=False)
    elif not low:
        held.pop("master_low", None)
    return held


@torch.no_grad()
def _laid_like(parameter: Tensor, held: State) -> State:
    """The same state in another layout; 8-bit moments are coded anew, as their blocks are others."""
    low = held.get("master_low")
    own = new(parameter, moments_form(held), amsgrad="max_exp_avg_sq" in held, low=low is not None)
    imported(parameter, own, held)
    if low is not None:
        own["master_low"].copy_(low)
    return {**held, **own}
