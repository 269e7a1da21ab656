"""What the engine may be given, checked before any time or memory is spent."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_megatrain.engine import hugging_face
from lightning_megatrain.engine.layers import Layers
from lightning_megatrain.engine.sizes import parse_size


def check_options(
    *,
    layers: Sequence[str] | None,
    resident: Sequence[str] | None,
    slots: int,
    staging_buffers: int,
    stream_casts: bool,
    saved_inputs: int | str,
    device_memory: int | str | None,
    working_copies: bool,
) -> None:
    """Refuses what is no value of an option of `Engine`.

    Raises:
        TypeError: A value is of the wrong kind.
        ValueError: A value is out of range; it says what is possible.
    """
    _check_names("layers", layers)
    _check_names("resident", resident)
    if layers is not None and not layers:
        raise ValueError("layers=[] names nothing to stream. Name classes or paths, or leave it out for the layers that are found.")
    _check_number("slots", slots, 2, "at least 2 are needed, one for the layer that runs and one for the layer that comes next")
    _check_number("staging_buffers", staging_buffers, 1, "at least 1 is needed to bring gradients to the host")
    check_flag("stream_casts", stream_casts)
    check_flag("working_copies", working_copies)
    saved_inputs_budget(saved_inputs)
    device_memory_budget(device_memory)


def refuse_lazy(module: nn.Module) -> None:
    """Raises ValueError for a parameter that has no shape yet."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"Parameter {name!r} of a lazy module has no shape yet, so it cannot be laid out in memory. Run the module once on an "
                "example before training, for instance at the end of the LightningModule's __init__ or configure_model()."
            )


def check_module(module: nn.Module, found: Layers) -> None:
    """Raises ValueError for parameters outside of host memory, and for layers that are recomputed already."""
    elsewhere = {name: p.device for name, p in module.named_parameters() if p.device.type != "cpu"}
    if elsewhere:
        name, device = next(iter(elsewhere.items()))
        raise ValueError(
            f"{len(elsewhere)} parameters are not in host memory, the first of them {name!r} on {device}. Build the model on the CPU: "
            "parameters stay there and are streamed to the device."
        )
    checkpointed = [
        name
        for name in hugging_face.checkpointed_modules(module)
        if any(name == layer or name.startswith(layer + ".") for layer in found.streamed)
    ]
    if checkpointed:
        raise ValueError(
            f"Activation checkpointing is switched on in {checkpointed[0]!r} and {len(checkpointed) - 1} other modules, and streamed "
            "layers are recomputed already: each would run a third time. Call model.gradient_checkpointing_disable()."
        )


def saved_inputs_budget(option: int | str) -> int | None:
    """Bytes of saved inputs that may stay on the device; None for any number."""
    if isinstance(option, str) and option in ("device", "host"):
        return {"device": None, "host": 0}[option]
    return parse_size(option, "saved_inputs", words=("device", "host"))


def device_memory_budget(option: int | str | None) -> int | None:
    """Bytes of the device that training may use; None where no number was given."""
    return None if option is None or option == "auto" else parse_size(option, "device_memory", words=("auto",))


def check_flag(option: str, value: Any) -> None:
    """Refuses what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{option}={value!r}: it must be True or False, not {type(value).__name__}.")


def check_choice(option: str, value: Any, choices: Sequence[str]) -> None:
    """Refuses what is none of `choices`."""
    possible = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
    if not isinstance(value, str):
        raise TypeError(f"{option}={value!r}: it must be {possible}, not {type(value).__name__}.")
    if value not in choices:
        raise ValueError(f"{option}={value!r}: it must be {possible}.")


def _check_number(option: str, value: Any, least: int, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{option}={value!r}: it must be a whole number such as {option}={least}, not {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{option}={value}: {why}. Pass {option}={least}.")


def _check_names(option: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, str):
        raise TypeError(f"{option}={value!r} is one name, and a list of names is wanted: {option}=[{value!r}].")
    if not isinstance(value, Sequence):
        raise TypeError(f"{option}={value!r}: it must be a list of class names or path patterns, not {type(value).__name__}.")
    for name in value:
        if isinstance(name, type):
            raise TypeError(f"{option} holds the class {name.__name__} itself, and names are wanted: {option}=[{name.__name__!r}].")
        if not isinstance(name, str):
            raise TypeError(f"{option} holds {name!r}: it must be a class name or a path pattern, not {type(name).__name__}.")
