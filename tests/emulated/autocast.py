"""`torch.autocast("emu")`, with the CPU's rules so that its numbers are the CPU's."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LOWER_PRECISION = {
    "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "bmm", "mm", "linalg_vecdot", "baddbmm", "addmm",
    "_addmm_activation", "addbmm", "linear", "_convolution.deprecated", "matmul", "conv_tbc", "mkldnn_rnn_layer", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "prelu", "scaled_dot_product_attention", "_native_multi_head_attention",
}  # fmt: skip
WIDEST = {"stack", "cat", "index_copy"}

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
# By the id of a weight: a weak reference to it, and its cast. Kept until the outermost autocast ends, as torch keeps its own.
_casts: dict[int, tuple[Any, Tensor]] = {}
_clear_cache_of_torch = torch.clear_autocast_cache


def _clear_cache() -> None:
    _casts.clear()
    _clear_cache_of_torch()


torch.clear_autocast_cache = _clear_cache


def _eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "emu" and value.is_floating_point() and value.dtype != torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    if not _eligible(value) or value.dtype == dtype:
        return value
    keep = (
        dtype == torch.get_autocast_dtype("emu") and value.dtype == torch.float32 and value.requires_grad and value.is_leaf
        and not value._is_view() and torch.is_autocast_cache_enabled()
    )  # fmt: skip
    if not keep:
        return value.to(dtype)
    known = _casts.get(id(value))
    if known is None or known[0]() is not value:
        known = _casts[id(value)] = (weakref.ref(value), value.to(dtype))
    return known[1]


def _widest(values: list[Any]) -> torch.dtype:
    dtypes = {leaf.dtype for value in values for leaf in (value if isinstance(value, (list, tuple)) else [value]) if _eligible(leaf)}
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("emu")


def _kernel(op: Any, rule: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if rule == "lower":
                dtype = torch.get_autocast_dtype("emu")
            else:
                dtype = torch.float32 if rule == "fp32" else _widest([*args, *kwargs.values()])
            return op(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})

    return run


_rest = torch.library.Library("_", "IMPL")
_rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_aten = torch.library.Library("aten", "IMPL")
for _qualified in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"):
    _name = _qualified.removeprefix("aten::")
    _base, _, _overload = _name.partition(".")
    _op = getattr(getattr(torch.ops.aten, _base), _overload or "default")
    _aten.impl(_name, _kernel(_op, "lower" if _name in LOWER_PRECISION else "widest" if _name in WIDEST else "fp32"), "AutocastPrivateUse1")
