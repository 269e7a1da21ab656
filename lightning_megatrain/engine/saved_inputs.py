"""Inputs that layers keep for backward: on the device, in host memory, or a share of each.

Order on an accelerator, each step with the reason that the code states:

* A copy to the host runs on the *gradients* lane, which is idle in forward, and waits until compute has made the input. Before the layer
  that runs beside it returns, compute waits for the copy. So everything after is in compute's order: the caller may write the input, and
  the allocator may hand out its memory.
* A copy back runs on the *weights* lane, beside the weights of the same layer, into memory that compute must first be done with; compute
  waits for it. That it finds its copy to the host done follows from the two before, and that a buffer is free to be filled again, too.
* The host waits for both lanes before it gives up a buffer.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_megatrain.engine.accounting import Accounting, Holding
from lightning_megatrain.engine.host import is_dense
from lightning_megatrain.engine.host_buffers import HostBuffers
from lightning_megatrain.engine.lanes import Event, Lanes
from lightning_megatrain.engine.pinning import LockedMemory
from lightning_megatrain.engine.sources import in_memory_order


class _Saved:
    """One tensor that backward needs, on the device or in host memory, for every call that was given it."""

    def __init__(self, inputs: "SavedInputs", tensor: Tensor, movable: bool, holding: Holding | None) -> None:
        self.inputs, self.movable, self.holding = inputs, movable, holding
        self.on_device: Tensor | None = tensor.detach()
        self.version = tensor._version
        if movable:
            self.shape, self.stride, self.dtype, self.nbytes = tensor.shape, tensor.stride(), tensor.dtype, tensor.nbytes
            self.memory = StorageWeakRef(tensor.untyped_storage())  # while this lives, its address is no other's
        self.buffer: Tensor | None = None
        self.back: Event | None = None
        """The end of a copy back that compute has not waited for."""
        self.newest_call = self.calls_to_come = 0

    def __del__(self) -> None:
        buffer = getattr(self, "buffer", None)
        if buffer is not None:
            self.inputs.given_up(buffer, self.on_device, self.back)

    def flat(self, memory: Tensor) -> Tensor:
        """As many elements of `memory` as the tensor has, in the order in which they lie."""
        return memory[: self.nbytes].view(self.dtype)


class SavedCall:
    """What one call of a layer keeps for backward. Autograd owns it, through the tensors it saved, and frees it when it frees those."""

    def __init__(self, inputs: "SavedInputs", number: int, layer: str, saved: Sequence[_Saved], before: "ref[SavedCall] | None") -> None:
        self.inputs, self.number, self.layer, self.before = inputs, number, layer, before
        self._by_index = saved
        self.saved = list(dict.fromkeys(saved))
        """Each once: two arguments may be one tensor, as a tensor and its detached self are."""
        for one in self.saved:
            one.newest_call = number
            one.calls_to_come += 1
        self.done = False
        """Whether a backward has used it; a second one may follow."""

    def tensor(self, index: int) -> Tensor:
        """The tensor, on the device.

        Raises:
            RuntimeError: It was written in place after the layer ran, while it was on the device.
        """
        saved = self._by_index[index]
        if saved.on_device is None:
            self.inputs.bring_back([saved])
            self.inputs.accounting.inputs_waited_for += 1
        assert saved.on_device is not None
        if saved.back is not None:
            self.inputs.lanes.compute.wait(saved.back, "saved inputs back")
            saved.back = None
        if saved.buffer is None and saved.on_device._version != saved.version:
            raise RuntimeError(
                f"Input tensor {index} of streamed layer {self.layer!r} was modified by an inplace operation after the layer ran: it is at "
                f"version {saved.on_device._version} and was at version {saved.version}. Backward runs the layer again and needs it as it "
                "was. Make that operation out of place."
            )
        return saved.on_device

    def ahead(self) -> None:
        """Sends for what the call before this one saved; its backward comes next."""
        call = None if self.before is None else self.before()
        if call is not None and call.done <= self.done:
            self.inputs.bring_back([saved for saved in call.saved if saved.on_device is None])

    def used(self) -> None:
        """Says that this call's backward is done. What can be brought back again, by a second backward, leaves the device."""
        self.done = True
        for saved in self.saved:
            saved.calls_to_come -= 1
            if saved.calls_to_come <= 0 and saved.buffer is not None:
                saved.on_device = saved.holding = None


class SavedInputs:
    """Moves saved inputs to host memory, the oldest first, until those on the device fit a budget; they are needed last in backward.

    Those of the newest call always stay: backward begins with them. So a mask or an encoder's output, which every call is given, never
    moves; and a tensor given to several calls moves at most once. What does not lie in memory without gaps stays too: kernels choose by
    strides, and its memory is not its own.

    Args:
        lanes: The lanes.
        memory: Gives page-locked host memory.
        accounting: Counts.
        budget: Bytes that may stay on the device, beside the newest call's; None moves nothing.
    """

    def __init__(self, lanes: Lanes, memory: LockedMemory, accounting: Accounting, budget: int | None) -> None:
        self.lanes, self.accounting, self._budget = lanes, accounting, budget
        self.moves = budget is not None and not lanes.in_host_memory
        self._buffers = HostBuffers(memory, self._settle)
        self._known: WeakValueDictionary[Any, _Saved] = WeakValueDictionary()
        self._on_device: deque[ref[SavedCall]] = deque()
        self._last: ref[SavedCall] | None = None
        self._numbers = itertools.count()
        self._given_up: deque[tuple[Tensor, Tensor | None, Event | None]] = deque()
        self._last_copies: dict[str, Event] = {}

    @property
    def host_bytes(self) -> int:
        """Host bytes of all buffers, in use and free."""
        return self._buffers.nbytes

    @property
    def unlocked_bytes(self) -> int:
        """Host bytes of those that the system refused to page-lock."""
        return self._buffers.unlocked_bytes

    @contextmanager
    def saving(self, layer: str, tensors: Sequence[Tensor], counted: int) -> Iterator[SavedCall]:
        """Lets autograd save `tensors` here, and moves older ones while the layer runs.

        Args:
            layer: The layer's name.
            tensors: All that is saved inside, in order.
            counted: How many of them, from the first, are the call's inputs; those after are held by others anyway.
        """
        number = next(self._numbers)
        saved = [self._save(tensor, index < counted) for index, tensor in enumerate(tensors)]
        call = SavedCall(self, number, layer, saved, self._last)
        leaving = self._over_budget()
        self._last = ref(call)
        self._on_device.append(self._last)
        copied = self._send(leaving)
        order = itertools.count()
        try:
            with saved_tensors_hooks(lambda tensor: (call, next(order)), lambda packed: packed[0].tensor(packed[1])):
                yield call
        finally:
            if copied is not None:
                self.lanes.compute.wait(copied, "saved inputs copied")
            for one in leaving:
                assert one.on_device is not None
                assert one.buffer is not None
                if one.on_device._version == one.version:
                    one.on_device = one.holding = None
                else:  # written while it was copied; backward will refuse it
                    self.given_up(one.buffer, None, None)
                    one.buffer = None

    def bring_back(self, saved: Sequence[_Saved]) -> None:
        """Queues copies to the device."""
        if not saved:
            return
        with torch.inference_mode(False):
            memory = [self.lanes.allocate(one.nbytes) for one in saved]
        self.lanes.weights.wait(self.lanes.compute.record(), "room for saved inputs")
        for one, flat in zip(saved, memory, strict=True):
            assert one.buffer is not None
            flat = one.flat(flat)
            self.lanes.weights.copy(flat, one.flat(one.buffer))
            one.on_device = flat.as_strided(one.shape, one.stride)
            one.holding = self.accounting.hold("saved inputs", [flat])
            self.accounting.bytes_to_device += one.nbytes
        back = self._last_copies["back"] = self.lanes.weights.record()
        for one in saved:
            one.back = back

    def given_up(self, buffer: Tensor, on_device: Tensor | None, back: Event | None) -> None:
        """Takes back a buffer. Destructors call it, at any moment and in any thread, so it only appends."""
        self._given_up.append((buffer, on_device if back is not None else None, back))

    def collect(self) -> None:
        """Makes buffers that were given up free for the next copy, and frees what was brought back for nothing."""
        while self._given_up:
            buffer, _, back = self._given_up.popleft()
            if back is not None:
                self.lanes.compute.wait(back, "saved inputs back")
            self._buffers.give(buffer)

    def close(self) -> None:
        """Gives up the free buffers."""
        self.collect()
        self._buffers.close()

    def _save(self, tensor: Tensor, counted: bool) -> _Saved:
        movable = counted and self._movable(tensor)
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype) if movable else None
        saved = self._known.get((key, tensor._version)) if movable else None
        if saved is None:
            holding = self.accounting.hold("saved inputs", [tensor]) if counted else None
            saved = _Saved(self, tensor, movable, holding)
            if movable:
                self._known[key, tensor._version] = saved
        return saved

    def _movable(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.device.type != self.lanes.device.type or tensor.numel() == 0:
            return False
        plain = type(tensor) is Tensor or type(tensor) is type(self.lanes.allocate(0))
        as_it_lies = not tensor.is_conj() and not tensor.is_neg()  # else a conjugate or a negative is still to be taken
        return plain and as_it_lies and is_dense(tensor)

    def _over_budget(self) -> list[_Saved]:
        """The oldest inputs on the device that the newest call does not need, until the others fit."""
        assert self._budget is not None
        over = self.accounting.device_bytes["saved inputs"] - self._budget
        leaving: list[_Saved] = []
        while self._on_device:
            call = self._on_device[0]()
            if call is not None and over <= 0:
                break
            self._on_device.popleft()
            if call is None:
                continue
            for saved in call.saved:
                on_device = saved.on_device if saved.movable and saved.buffer is None and saved.newest_call == call.number else None
                if on_device is not None and on_device._version == saved.version:
                    leaving.append(saved)
                    over -= saved.nbytes
        return leaving

    def _send(self, leaving: Sequence[_Saved]) -> Event | None:
        if not leaving:
            return None
        self.collect()
        buffers = [self._buffers.take(saved.nbytes) for saved in leaving]
        self.lanes.gradients.wait(self.lanes.compute.record(), "saved inputs computed")
        for saved, buffer in zip(leaving, buffers, strict=True):
            assert saved.on_device is not None
            saved.buffer = buffer
            self.lanes.gradients.copy(saved.flat(saved.buffer), in_memory_order(saved.on_device))
            self.accounting.bytes_to_host += saved.nbytes
        copied = self._last_copies["out"] = self.lanes.gradients.record()
        return copied

    def _settle(self) -> None:
        """Waits until no lane reads or writes a buffer."""
        for event in self._last_copies.values():
            self.lanes.synchronize(event, "saved inputs moved")
        self._last_copies.clear()
