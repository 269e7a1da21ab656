"""Brings every operator on "emu" tensors to `dispatch`, by the road the CPU takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp.decompositions import gru_impl, lstm_impl

from tests.emulated.dispatch import COMPOSITE, aten, dispatch


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Takes the fused kernel wherever the CPU would; torch itself takes the plain formula on devices it does not know."""
    shapes = (query, key, value, attn_mask, dropout_p, is_causal)
    fused = dispatch(aten._fused_sdp_choice.default, shapes, {"scale": scale, "enable_gqa": enable_gqa}) == 1
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    if fused and not (attn_mask is not None and attn_mask.requires_grad):
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[
            0
        ]
    return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[
        0
    ]


_everything = torch.library.Library("_", "IMPL")
_everything.fallback(lambda op, *args, **kwargs: dispatch(op, args, kwargs), "PrivateUse1")


def _register(library: torch.library.Library, op: Any) -> None:
    name = op._schema.name + (f".{op._overloadname}" if op._overloadname != "default" else "")
    library.impl(name, lambda *args, **kwargs: dispatch(op, args, kwargs), "PrivateUse1")


_aten = torch.library.Library("aten", "IMPL")
# torch.tensor(..., device="emu") reaches these from C++, where the fallback is not found
for _op in (aten.empty.memory_format, aten.empty_strided.default, aten._copy_from.default, aten._to_copy.default):
    _register(_aten, _op)
# Made of other operators on devices torch does not know; on the CPU with a kernel and a backward formula of their own, as silu_backward
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
for _name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
    if _name.startswith("aten::") and _has_kernel(_name, "CompositeImplicitAutograd"):
        _base, _, _overload = _name.removeprefix("aten::").partition(".")
        _register(_aten, getattr(getattr(aten, _base), _overload or "default"))
COMPOSITES: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": attention,
    "lstm.input": lstm_impl,  # torch's own road for unknown devices ends at a fused cell that the CPU lacks
    "gru.input": gru_impl,
}
for _name, _composite in COMPOSITES.items():
    _aten.impl(_name, _composite, "AutogradPrivateUse1")
    COMPOSITE[f"aten::{_name}"] = _composite


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    """Host memory is as good locked as not."""
    return tensor.clone()


if not torch.cuda.is_available():
    _aten.impl("_pin_memory", _pin_memory, "CPU")
