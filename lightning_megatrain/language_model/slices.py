"""A function of each token by itself, run over slices of tokens and once more in backward.

Shapes: N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

Function = Callable[[Tensor, slice, Sequence[Tensor]], Tensor]


def over_slices(function: Function, tokens: int, hidden: Tensor, weights: Sequence[Tensor], casts: Sequence[bool], name: str) -> Tensor:
    """Return `function` of all tokens, having kept `hidden` alone.

    Backward runs `function` again, slice by slice, as the forward's autocast had it. Gradients of weights are summed over slices in FP32
    and rounded once.

    Args:
        function: Gets a slice of `hidden`, which slice it is, and the weights; returns one row for each token. It draws no random numbers
            and uses nothing else that requires grad.
        tokens: Tokens of a slice.
        hidden: (N, ...).
        weights: What `function` computes with and gradients are wanted of.
        casts: Which of them autocast would cast, which is done once for all slices.
        name: The setting that a double backward, which is refused, is told to leave out.
    """
    out: Tensor = _OverSlices.apply(function, tokens, list(casts), name, hidden, *weights)
    return out


class _OverSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Function, tokens: int, casts: list[bool], name: str, hidden: Tensor, *weights: Tensor) -> Tensor:
        kind = hidden.device.type
        ctx.function, ctx.tokens, ctx.casts, ctx.name = function, tokens, casts, name
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.save_for_backward(hidden, *weights)
        cast = _cast(weights, casts, *ctx.autocast)
        hidden = hidden.detach()  # its views would say that they require grad, which hooks on modules would believe
        out: Tensor | None = None
        for part in _slices(len(hidden), tokens):
            result = function(hidden[part], part, cast)
            if out is None:
                out = result.new_empty(len(hidden), *result.shape[1:])
            out[part] = result
            del result
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Double backward (create_graph=True) went through what was computed over slices of tokens, whose gradient cannot be "
                f"differentiated again. Set {ctx.name}=None."
            )
        hidden, *weights = ctx.saved_tensors
        kind, dtype, enabled = ctx.autocast
        nodes = [node for node, _ in ctx.next_functions]  # of the tensors alone
        hidden_wanted, *wanted = [r and _will_run(node) for r, node in zip(ctx.needs_input_grad[4:], nodes, strict=True)]
        leaves = [t.detach().requires_grad_(w) for t, w in zip(_cast(weights, ctx.casts, *ctx.autocast), wanted, strict=True)]
        sums = [torch.zeros_like(leaf, dtype=torch.float32) if leaf.requires_grad else None for leaf in leaves]
        of_hidden = torch.empty_like(hidden) if hidden_wanted else None
        for part in _slices(len(hidden), ctx.tokens):
            own = hidden[part].detach().requires_grad_(hidden_wanted)
            with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
                out = ctx.function(own, part, leaves)
            found = list(torch.autograd.grad(out, [leaf for leaf in (own, *leaves) if leaf.requires_grad], gradient[part]))
            del out
            if of_hidden is not None:
                of_hidden[part] = found.pop(0)
            for total in sums:
                if total is not None:
                    total += found.pop(0)
        # Rounded once, to the dtype that the function saw, as the gradient of the whole is.
        rounded = [total if total is None else total.to(leaf.dtype) for total, leaf in zip(sums, leaves, strict=True)]
        return None, None, None, None, of_hidden, *rounded


def _will_run(node: Node) -> bool:
    """Whether this backward goes on to an input; that of gradient features leaves weights out."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad has no answer for what it returns
        return True


def _slices(length: int, tokens: int) -> list[slice]:
    return [slice(start, start + tokens) for start in range(0, length, tokens)]


def _cast(weights: Sequence[Tensor], casts: Sequence[bool], kind: str, dtype: torch.dtype, enabled: bool) -> list[Tensor]:
    return [weight.to(dtype) if cast and enabled else weight for weight, cast in zip(weights, casts, strict=True)]
