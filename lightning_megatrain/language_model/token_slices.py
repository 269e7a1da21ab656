"""MLPs and norms run over slices of tokens: what they make on the way never exists for all tokens at once.

Shapes: N tokens (of all rows), H and O sizes of a token before and after.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import MethodType

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from lightning_megatrain.engine.placement import placed, places_of
from lightning_megatrain.language_model.slices import over_slices

_LINEAR = (nn.Linear, Conv1D)


def slice_tokens(model: nn.Module, tokens: int) -> None:
    """Make the norms of a Hugging Face model and the MLPs of its decoder layers work on `tokens` tokens at a time.

    Each keeps its input alone and runs once more, slice by slice, in the backward that follows: in that of the recompute, where layers are
    streamed. Results are those of the whole; gradients of weights are summed over slices, in FP32.

    Args:
        model: Changed in place: the modules get another `forward`. Their names and parameters stay.
        tokens: Tokens of a slice, over all rows.

    Raises:
        ValueError: A layer has no MLP that is known to treat each token by itself: a mixture of experts, a module of another make, or
            one with dropout, whose draws would differ.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
    if not layers:
        raise ValueError(f"token_slice={tokens}: {type(model).__name__} has no Hugging Face decoder layers. Leave token_slice out.")
    for name, layer in layers.items():
        mlps = [child for child in layer.children() if type(child).__name__.endswith("MLP")]
        if len(mlps) != 1:
            children = ", ".join(type(child).__name__ for child in layer.children())
            raise ValueError(
                f"token_slice={tokens}: layer {name!r} ({type(layer).__name__}) has {len(mlps)} dense MLPs among its parts ({children}), "
                "and only those are known to treat each token by itself. Experts, and MLPs that are no module of their own, run whole: "
                "leave token_slice out."
            )
        if reason := _unfit(mlps[0]):
            raise ValueError(f"token_slice={tokens}: the {type(mlps[0]).__name__} of layer {name!r} {reason}, or leave token_slice out.")
        _patch(mlps[0], tokens)
    for module in filter(_is_norm, model.modules()):
        _patch(module, tokens)


def _unfit(mlp: nn.Module) -> str | None:
    """What keeps an MLP from being sliced, if anything does, and what to do about it."""
    if len(_required(mlp)) != 1:
        return f"takes {', '.join(_required(mlp))}, not the hidden states alone: use a model whose MLP does"
    for module in mlp.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return f"has dropout {module.p}, which would draw other numbers: set it to 0 in the config (or in `lora`)"
        if next(module.parameters(recurse=False), None) is not None and not isinstance(module, _LINEAR):
            return f"holds a {type(module).__name__}, which may mix tokens: use a model without"
    return None


def _is_norm(module: nn.Module) -> bool:
    name, shapes = type(module).__name__, [p.dim() for p in module.parameters()]
    return name.endswith(("RMSNorm", "LayerNorm")) and shapes in ([1], [1, 1]) and len(_required(module)) == 1


def _required(module: nn.Module) -> list[str]:
    arguments = inspect.signature(type(module).forward).parameters.values()
    return [a.name for a in arguments if a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD][1:]


def _patch(module: nn.Module, tokens: int) -> None:
    """Puts a bound method in the place of the module's forward: `deepcopy` binds it to the copy."""
    plain: Callable[..., Tensor] = type(module).forward

    @functools.wraps(plain)
    def forward(self: nn.Module, hidden: Tensor) -> Tensor:
        if hidden.shape[:-1].numel() <= tokens:
            return plain(self, hidden)
        places = places_of(self.modules())
        owners = {weight: child for child in self.modules() for weight in child._parameters.values()}

        def run(part_of_hidden: Tensor, _: slice, weights: Sequence[Tensor]) -> Tensor:
            with placed(list(places.values()), weights):
                return plain(self, part_of_hidden.unsqueeze(0)).squeeze(0)

        casts = [isinstance(owners[weight], _LINEAR) for weight in places]
        out = over_slices(run, tokens, hidden.flatten(0, -2), list(places), casts, "token_slice")
        return out.view(*hidden.shape[:-1], -1)

    forward.__name__ = "forward"  # a bound method is pickled by its name, and becomes the class's own again
    module.forward = MethodType(forward, module)
    module.token_slice = tokens  # type: ignore[assignment]
