"""What a layer may not do, since backward runs it again: found in its forward and refused by name."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_megatrain.engine.checksum import checksum, checksums
from lightning_megatrain.engine.host import HostLayer


def node() -> Node:
    """A node of the graph made now; what is made later has a higher sequence number."""
    made = torch.ones((), requires_grad=True).clone().grad_fn
    assert made is not None
    return made


def nothing_saved(layer: HostLayer) -> Callable[[None], Tensor]:
    """What happens when backward reaches into the graph of a layer's forward, of which nothing was kept."""

    def refuse(_: None) -> Tensor:
        raise RuntimeError(
            f"Backward reached into streamed layer {layer.name!r} by a way around it: a tensor that requires grad left it hidden in an "
            "object, or something in it called backward() during its forward. Return tensors themselves, in tuples, lists, mappings or "
            f"dataclasses, or keep the layer on the device with resident=[{layer.name!r}]."
        )

    return refuse


@contextmanager
def unwritten(layer: HostLayer, weights: Sequence[Tensor], by_value: bool) -> Iterator[None]:
    """Refuses a layer that writes its own weights, which would be lost with the slot, or made twice; through `.data` only values tell."""
    tracked = [weight for weight in weights if not weight.is_inference()]
    before = [(weight._version, checksum(weight) if by_value else None) for weight in tracked]
    yield
    for weight, (version, bits) in zip(tracked, before, strict=True):
        if weight._version != version or (bits is not None and not torch.equal(checksum(weight), bits)):
            raise RuntimeError(
                f"Streamed layer {layer.name!r} wrote one of its own parameters in its forward. Backward "
                "runs the layer again and would write it a second time. Make it a buffer, or keep the layer on the device with "
                f"resident=[{layer.name!r}]."
            )


def refuse_written(layer: HostLayer, inputs: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Refuses a layer that changed one of its input tensors in place; `versions` are those of before."""
    for index, (tensor, version) in enumerate(zip(inputs, versions, strict=True)):
        if tensor._version != version:
            raise RuntimeError(written_in_place(layer, f"its input tensor {index}"))


def written_in_place(layer: HostLayer, what: str) -> str:
    """Says that a layer changed `what` in place, and what to do about it."""
    return (
        f"Streamed layer {layer.name!r} changed {what} in place. Backward runs the layer again and needs the input as it was. Make that "
        f"operation out of place, or keep the layer on the device with resident=[{layer.name!r}]."
    )


def refuse_captured(layer: HostLayer, outputs: Sequence[Tensor], leaves: Sequence[Tensor], start: int) -> None:
    """Looks through the layer's graph for tensors that require grad and did not come in as arguments or parameters."""
    known = {id(leaf) for leaf in leaves}
    pending: list[Node] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen: set[Node] = set()
    while pending:
        reached = pending.pop()
        if reached in seen:
            continue
        seen.add(reached)
        variable = getattr(reached, "variable", None)
        foreign = id(variable) not in known if variable is not None else start < 0 or reached._sequence_nr() < start
        if foreign:
            what = f"a leaf of shape {tuple(variable.shape)}" if variable is not None else f"the result of {reached.name()}"
            raise RuntimeError(
                f"Streamed layer {layer.name!r} used a tensor that requires grad but is neither one of its arguments nor one of its own "
                f"parameters ({what}). Its gradient would be lost. Pass the tensor as an argument, or keep the layer on the device with "
                f"resident=[{layer.name!r}]."
            )
        pending += [following for following, _ in reached.next_functions if following is not None]


def refuse_otherwise_computed(layer: HostLayer, bits: Sequence[Tensor], again: Sequence[Tensor], exact: bool) -> None:
    """Refuses a layer whose second run, in backward, returned other values than its first.

    Args:
        layer: The layer.
        bits: Checksums of what its forward returned.
        again: What it returned in backward.
        exact: Whether kernels repeat bit for bit, as on the CPU. Where they need not, it is a warning.
    """
    if all(torch.equal(a, b) for a, b in zip(bits, checksums(again), strict=True)):
        return
    text = (
        f"Streamed layer {layer.name!r} returned other values when backward ran it again: it depends on something that changed in between, "
        "such as a counter it keeps, random numbers from a generator of its own or from torch's while another thread draws too, or it uses "
        "a kernel that does not repeat itself. Its gradients are those of the second run. Make its state a buffer, give other threads a "
        f"torch.Generator of their own, or keep the layer on the device with resident=[{layer.name!r}]."
    )
    if exact:
        raise RuntimeError(text)
    warnings.warn(text, stacklevel=2)


@contextmanager
def reentrant_checkpoints_named(layer: HostLayer) -> Iterator[None]:
    """Names the layer where torch only says that checkpointing does not work here."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise RuntimeError(
            f"Streamed layer {layer.name!r} uses torch.utils.checkpoint(use_reentrant=True) inside, which cannot run within another "
            "recompute. Pass use_reentrant=False, or take the checkpoint off: streamed layers are recomputed anyway."
        ) from error
