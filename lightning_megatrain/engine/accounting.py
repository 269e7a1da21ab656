"""What the engine holds on the device and moves over the bus, counted exactly."""

from collections import Counter
from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

Kind = Literal["slots", "kept layers", "resident", "buffers", "saved inputs", "gradients"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The memory in which a tensor lies; a sparse one lies in several places."""
    if tensor.layout is torch.strided:
        return [] if tensor.is_nested else [tensor.untyped_storage()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._values().untyped_storage(), tensor._indices().untyped_storage()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [part.untyped_storage() for part in (tensor.values(), tensor.crow_indices(), tensor.col_indices())]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [part.untyped_storage() for part in (tensor.values(), tensor.ccol_indices(), tensor.row_indices())]
    return []


class Holding:
    """Device bytes of some tensors, counted until `release` or the death of this object."""

    def __init__(self, accounting: "Accounting", kind: Kind, tensors: Iterable[Tensor]) -> None:
        self._accounting, self._kind = accounting, kind
        self._storages = {storage._cdata: storage.nbytes() for tensor in tensors for storage in storages(tensor) if storage.nbytes()}
        accounting._take(kind, self._storages)

    def release(self) -> None:
        self._accounting._give(self._kind, self._storages)
        self._storages = {}

    def __del__(self) -> None:
        if getattr(self, "_storages", None):  # torch.compile makes objects without calling __init__
            self.release()


class Accounting:
    """Bytes on the device by kind, bytes moved each way, and how often each layer was loaded.

    Storages are counted once, however many tensors view them. On the CPU, where weights are used where they lie, slots count no bytes.
    """

    def __init__(self) -> None:
        self._held: dict[Kind, dict[int, list[int]]] = {}
        self.device_bytes: Counter[Kind] = Counter(dict.fromkeys(KINDS, 0))
        """Bytes held on the device now, by kind."""
        self.peak_bytes: Counter[Kind] = Counter(self.device_bytes)
        """The most bytes held at once, by kind."""
        self.loads: Counter[str] = Counter()
        """Times each layer's weights were brought into a slot, by layer."""
        self.bytes_to_device = 0
        self.bytes_to_host = 0
        self.prefetch_hits = 0
        """Times a layer was in a slot, or on its way, when it was wanted."""
        self.prefetch_misses = 0
        """Times a layer had to be asked for at the moment it was wanted."""
        self.inputs_waited_for = 0
        """Saved inputs that had to be asked for at the moment they were wanted."""

    def reset(self) -> None:
        """Sets the counts of movement to zero and the peaks to what is held now."""
        self.loads.clear()
        self.bytes_to_device = self.bytes_to_host = self.prefetch_hits = self.prefetch_misses = self.inputs_waited_for = 0
        self.peak_bytes = Counter(self.device_bytes)

    def hold(self, kind: Kind, tensors: Iterable[Tensor]) -> Holding:
        """Counts the storages of `tensors` as held on the device."""
        return Holding(self, kind, tensors)

    def _take(self, kind: Kind, storages: dict[int, int]) -> None:
        held = self._held.setdefault(kind, {})
        for key, nbytes in storages.items():
            if key in held:
                held[key][0] += 1
            else:
                held[key] = [1, nbytes]
                self.device_bytes[kind] += nbytes
        self.peak_bytes[kind] = max(self.peak_bytes[kind], self.device_bytes[kind])

    def _give(self, kind: Kind, storages: dict[int, int]) -> None:
        held = self._held.get(kind, {})
        for key in storages:
            held[key][0] -= 1
            if held[key][0] == 0:
                self.device_bytes[kind] -= held.pop(key)[1]
