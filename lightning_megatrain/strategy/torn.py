"""Weights of two different steps, after a backward that updated and failed half-way: they are good for nothing until others are loaded."""

from torch import nn

_MARK = "_versions_when_torn"


def mark_torn(module: nn.Module) -> None:
    """Remembers that the module's weights, as they are now, are of two steps."""
    module.__dict__[_MARK] = [parameter._version for parameter in module.parameters()]


def refuse_torn(module: nn.Module) -> None:
    """Raises RuntimeError if the module's weights are of two steps; loading others, which writes every parameter, mends it."""
    if module.__dict__.get(_MARK) == [parameter._version for parameter in module.parameters()]:
        raise RuntimeError(
            "A step failed in its backward after some weights had been updated (transient_gradients=True), so this module's weights are of "
            "two different steps. Load a checkpoint first: fit(ckpt_path=...), validate(ckpt_path=...), or module.load_state_dict()."
        )
