"""In which form the host keeps FP32 weights: as they are, or in two halves of which the upper one is sent to the device."""

from collections.abc import Sequence
from typing import Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_megatrain.optim import HostAdamW, bytes_per_parameter
from lightning_megatrain.optim.split_masters import SplitMasters
from lightning_megatrain.strategy.host_memory import available_bytes

Masters = Literal["fp32", "split", "auto"]
_SPARE = 0.9
"""The share of the free memory that "auto" takes: the rest is for data and Python."""


def split_masters(
    masters: Masters, optimizers: Sequence[Optimizer], trainer: Trainer, computes_in_bf16: bool, working_copy: bool
) -> SplitMasters | None:
    """Splits the optimizers' FP32 weights where that is asked for, or where they would not fit otherwise.

    Args:
        masters: "split"; "auto" for the form that needs no halves if its bytes fit into the free host memory, else for halves; "fp32".
        optimizers: The module's.
        trainer: The Trainer.
        computes_in_bf16: Whether the device computes in BF16, so that the upper half is what it needs.
        working_copy: Whether a BF16 copy would be kept beside FP32 weights.

    Raises:
        MisconfigurationException: "split" is asked for and something is in its way; it says what.
    """
    adamws = [optimizer for optimizer in optimizers if isinstance(optimizer, HostAdamW)]
    obstacle = _obstacle(optimizers, len(adamws), trainer, computes_in_bf16)
    if obstacle is not None:
        if masters == "split":
            raise MisconfigurationException(f"masters='split' {obstacle}, or set MegaTrainStrategy(masters='fp32').")
        return None
    if masters == "auto" and _fits(adamws, working_copy):
        return None
    return SplitMasters(adamws)


def _obstacle(optimizers: Sequence[Optimizer], adamws: int, trainer: Trainer, computes_in_bf16: bool) -> str | None:
    """What is in the way of two halves, as the end of a sentence up to its way out."""
    if not optimizers or adamws < len(optimizers):
        name = next((type(o).__name__ for o in optimizers if not isinstance(o, HostAdamW)), "no optimizer")
        return (
            f"needs lightning_megatrain.optim.HostAdamW, which keeps the lower halves of the weights, and configure_optimizers() returned "
            f"{name}. Return HostAdamW"
        )
    if not computes_in_bf16:
        return (
            "saves nothing where the device computes in FP32: both halves would travel. Use Trainer(precision='bf16-mixed') or 'bf16-true'"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            return f"would let {type(callback).__name__} average BF16 parameters, which are the upper halves alone. Take the callback out"
        if isinstance(callback, ModelPruning):
            return f"would let {type(callback).__name__} replace parameters, whose lower halves would be lost. Take the callback out"
    return None


def _fits(optimizers: Sequence[HostAdamW], working_copy: bool) -> bool:
    """Whether FP32 weights, moments, working copies and gradients fit; says what was found."""
    number = sum(p.numel() for o in optimizers for group in o.param_groups for p in group["params"])
    moments = optimizers[0].moments
    whole = bytes_per_parameter("fp32", moments, working_copy=working_copy) + 4
    halves = bytes_per_parameter("split", moments) + 4
    free = available_bytes()
    taken = 4  # the weights are there already
    fits = number * (whole - taken) <= _SPARE * free
    chosen = f"FP32, {whole:.0f} bytes a parameter" if fits else f"split, {halves:.0f} bytes a parameter (FP32: {whole:.0f})"
    rank_zero_info(
        f"Masters: {chosen}, gradients included; {number:,} parameters need {number * (whole - taken) / 1e9:.1f} GB more in FP32 and "
        f"{free / 1e9:.1f} GB of host memory are free."
    )
    return fits
