"""Buffers of a streamed layer: written once, however often the layer runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

BufferPlace = tuple[nn.Module, str]


class LayerBuffers:
    """The buffers of one layer, and which of them its forward writes.

    Backward runs the layer again. What it would write then (running statistics, a power iteration) starts from what the forward started
    from, goes to a copy, and is dropped. Some kernels write buffers without telling autograd, so the first forward in each mode compares
    values; later ones keep copies only of the buffers found to be written, and check the version of the others.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module]) -> None:
        self._name, self._modules = name, modules
        self._written: dict[bool, set[BufferPlace]] = {}

    def _all(self) -> list[tuple[BufferPlace, Tensor]]:
        return [((m, key), buffer) for m in self._modules for key, buffer in m._buffers.items() if buffer is not None]

    @contextmanager
    def watched(self, before: dict[BufferPlace, Tensor]) -> Iterator[None]:
        """Fills `before` with what the buffers that the forward writes held when it began.

        Raises:
            RuntimeError: A buffer was written that the first forward in this mode did not write.
        """
        buffers = self._all()
        if not buffers:
            yield
            return
        training = any(module.training for module in self._modules)
        written = self._written.get(training)
        copies = {place: buffer.detach().clone() for place, buffer in buffers if written is None or place in written}
        versions = {place: (buffer, buffer._version) for place, buffer in buffers if place not in copies}
        yield
        if written is None:
            written = {place for place, copy in copies.items() if not self._unchanged(place, copy)}
            self._written[training] = written
        for (module, key), (buffer, version) in versions.items():
            if module._buffers[key] is not buffer or buffer._version != version:
                raise RuntimeError(
                    f"Buffer {key!r} of {type(module).__name__} in streamed layer {self._name!r} was written in this forward but not in "
                    "the layer's first one, so its value before is lost and backward cannot run the layer again. Keep the layer on the "
                    f"device with resident=[{self._name!r}]."
                )
        before.update({place: copies[place] for place in written})

    def _unchanged(self, place: BufferPlace, copy: Tensor) -> bool:
        now = place[0]._buffers[place[1]]
        return now is not None and now.shape == copy.shape and torch.equal(now, copy)

    @contextmanager
    def restored(self, before: dict[BufferPlace, Tensor]) -> Iterator[None]:
        """Puts copies of `before` in the place of the buffers, and the buffers back."""
        now = {(module, key): module._buffers[key] for module, key in before}
        try:
            for (module, key), value in before.items():
                module._buffers[key] = value.clone()
            yield
        finally:
            for (module, key), buffer in now.items():
                module._buffers[key] = buffer
