"""A tensor of device "emu"."""

import copy
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tests.emulated.device import DEVICE
from tests.emulated.memory import Block, poison_

_DEVICE = torch.device("emu", 0)


class EmulatedTensor(Tensor):
    """A wrapper without numbers of its own: `raw` is the device memory as a CPU tensor, `block` the allocation it lies in."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    raw: Tensor
    block: Block

    @staticmethod
    def __new__(cls, raw: Tensor, block: Block) -> "EmulatedTensor":
        tensor = Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, layout=raw.layout, device=_DEVICE
        )
        tensor.raw, tensor.block = raw, block
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from tests.emulated.dispatch import dispatch

        return dispatch(func, args, kwargs or {})

    def become(self, raw: Tensor, block: Block) -> None:
        """Takes other memory or another shape in place, as `set_`, `resize_` and an assignment to `.data` do."""
        Tensor.data.__set__(self, EmulatedTensor(raw, block))
        self.raw, self.block = raw, block

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, new: Tensor) -> None:
        if not isinstance(new, EmulatedTensor):
            raise RuntimeError("incompatible tensor type: .data of an emu tensor was assigned a tensor of another device")
        self.become(new.raw, new.block)

    @override
    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    @override
    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    @override
    def __repr__(self, **kwargs: Any) -> str:
        text = repr(self.detach().cpu()).removesuffix(")")
        return f"{text}, device='emu:0'{', requires_grad=True' if self.requires_grad else ''})"

    @override
    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    @override
    def numpy(self, **kwargs: Any) -> Any:
        raise TypeError("can't convert emu:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.")

    @override
    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else str(self), spec)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol at the moment")
        new = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = new
        new.grad = copy.deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            if name not in ("raw", "block"):
                setattr(new, name, copy.deepcopy(value, memo))
        return new

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.detach().cpu(), self.requires_grad)


def _restored(host: Tensor, requires_grad: bool) -> Tensor:
    return host.to("emu").requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_restored])


def allocate(size: Any, stride: Any, dtype: torch.dtype, written_by_next: bool = False) -> EmulatedTensor:
    """Returns uninitialized device memory.

    Its former owner in the compute lane may still be writing it up to the point where it is allocated, so another lane that writes it
    without waiting for that point loses what it wrote. `written_by_next` says the compute lane's next item overwrites all of it anyway.
    """
    raw = torch.empty_strided(size, stride, dtype=dtype)
    block = Block(raw, DEVICE.compute, DEVICE.memory)
    poison_(block.memory, dtype)
    if not written_by_next:
        memory = block.memory
        DEVICE.compute.add(lambda: poison_(memory, dtype))
    return EmulatedTensor(raw, block)
