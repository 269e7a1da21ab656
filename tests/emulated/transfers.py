"""Operators with a rule of their own: copies over the bus, and changes of a tensor's own shape."""

from typing import Any

import torch
from torch import Tensor

from tests.emulated.device import DEVICE
from tests.emulated.dispatch import HANDLERS, Call, aten
from tests.emulated.memory import poison_
from tests.emulated.tensor import EmulatedTensor, allocate


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _to_device(func: Any, source: Tensor, non_blocking: bool, options: dict[str, Any]) -> Tensor:
    staged = func(source, **options)
    read = source.detach() if non_blocking else staged
    DEVICE.memory.to_device_bytes += _bytes(source)
    made = allocate(staged.size(), staged.stride(), staged.dtype, written_by_next=True)
    destination = made.raw
    DEVICE.compute.add(lambda: destination.copy_(read))
    return made


def to_copy(func: Any, source: Tensor, *, device: Any = None, non_blocking: bool = False, pin_memory: Any = None, **options: Any) -> Tensor:
    """`tensor.to(...)`: a host source is read, and a host destination written, now or, if `non_blocking`, when the compute lane gets there.

    On a GPU that is so for page-locked memory; here all memory is treated as such, being the harder case.
    """
    target = torch.device(device).type if device is not None else source.device.type
    if "meta" in (target, source.device.type) or (target != "emu" and not isinstance(source, EmulatedTensor)):
        return func(getattr(source, "raw", source), device=device, **options)
    if not isinstance(source, EmulatedTensor):
        return _to_device(func, source, non_blocking, options)
    if target == "emu":
        return Call(func, (source,), options).run()
    DEVICE.memory.to_host_bytes += _bytes(source)
    raw = source.raw
    if not non_blocking:
        DEVICE.compute.flush()
        return func(raw, **options)
    result = torch.empty_like(raw, dtype=options.get("dtype"), memory_format=options.get("memory_format") or torch.preserve_format)
    poison_(result.untyped_storage(), result.dtype)
    DEVICE.compute.add(lambda: result.copy_(raw))
    return result


def copy_(func: Any, destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`destination.copy_(source)` in the compute lane."""
    if isinstance(destination, EmulatedTensor):
        if isinstance(source, EmulatedTensor):
            return Call(aten.copy_.default, (destination, source), {}).run()
        to, read = destination.raw, source.detach() if non_blocking else source.clone()
        DEVICE.memory.to_device_bytes += _bytes(source)
        DEVICE.compute.add(lambda: to.copy_(read))
        return destination
    if not isinstance(source, EmulatedTensor):
        return destination.copy_(source)
    raw = source.raw
    DEVICE.memory.to_host_bytes += _bytes(source)
    DEVICE.compute.add(lambda: destination.copy_(raw))
    if not non_blocking:
        DEVICE.compute.flush()
    return destination


def copy_from(func: Any, source: Tensor, destination: Tensor, non_blocking: bool = False) -> Tensor:
    return copy_(func, destination, source, non_blocking)


def set_(func: Any, tensor: EmulatedTensor, source: Any = None, *layout: Any) -> Tensor:
    """`tensor.set_(...)`: takes the memory of another emu tensor."""
    if source is None:
        source = allocate((0,), (1,), tensor.dtype)
    if not isinstance(source, EmulatedTensor):
        raise RuntimeError("set_ on an emu tensor needs another emu tensor")
    raw = source.raw.detach() if not layout else source.raw.as_strided(layout[1], layout[2], layout[0])
    tensor.become(raw, source.block)
    return tensor


def resize_(func: Any, tensor: EmulatedTensor, size: Any, *, memory_format: Any = None) -> Tensor:
    """`tensor.resize_(size)`: in place where it fits, else in new memory that begins with the old numbers."""
    contiguous = torch.empty(size, dtype=tensor.dtype, device="meta")
    if contiguous.numel() * tensor.element_size() + tensor.raw.storage_offset() * tensor.element_size() <= tensor.block.nbytes:
        tensor.become(tensor.raw.as_strided(contiguous.size(), contiguous.stride()), tensor.block)
        return tensor
    new, old = allocate(contiguous.size(), contiguous.stride(), tensor.dtype), tensor.raw
    begin = new.raw.view(-1)[: old.numel()]
    DEVICE.compute.add(lambda: begin.copy_(old.reshape(-1)))
    tensor.become(new.raw, new.block)
    return tensor


def view_in_place(func: Any, tensor: EmulatedTensor, *args: Any) -> Tensor:
    """`t_`, `squeeze_` and their like: another shape for the same memory."""
    raw = tensor.raw.detach()
    func(raw, *args)
    tensor.become(raw, tensor.block)
    return tensor


def on_shapes(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Asks the CPU kernel what depends on shapes and dtypes alone."""
    call = Call(func, args, kwargs)
    return func(*call.args, **call.kwargs)


HANDLERS.update(
    {
        "aten::_to_copy": to_copy,
        "aten::copy_": copy_,
        "aten::_copy_from": copy_from,
        "aten::_copy_from_and_resize": copy_from,
        "aten::set_": set_,
        "aten::resize_": resize_,
        "aten::_fused_sdp_choice": on_shapes,
        "aten::is_pinned": lambda func, tensor, device=None: False,
        "aten::record_stream": lambda func, tensor, stream: None,
        **{
            f"aten::{name}_": view_in_place
            for name in ("t", "transpose", "swapdims", "swapaxes", "squeeze", "unsqueeze", "as_strided", "detach")
        },
    }
)
