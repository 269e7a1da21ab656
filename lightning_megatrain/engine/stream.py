"""The schedule: which layer's weights are in which slot, and when they are sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from lightning_megatrain.engine.accounting import Accounting, Holding
from lightning_megatrain.engine.host import Clock, HostLayer, Stamp
from lightning_megatrain.engine.lanes import Event, Lanes
from lightning_megatrain.engine.sources import OnTheWay
from lightning_megatrain.engine.transfer import HostToDevice

_REACH = 8
"""Layers that are looked through for the next one to send: each look reads a stamp, and a load needs no longer start than that."""

Phase = Literal["forward", "backward", "inference"]
Use = tuple[int, Phase]


@dataclass
class Slot:
    """Device memory that holds one layer's weights at a time."""

    buffer: Tensor | None = None
    layer: HostLayer | None = None
    weights: Sequence[Tensor] = ()
    made: tuple[int, int, Stamp] | None = None
    """The time, the layout and the stamp of the host's weights when they were sent."""
    loaded: Event | None = None
    released: Event | None = None
    users: int = 0
    last_use: int = 0
    holding: Holding | None = None


class Updates(Protocol):
    """Updates of layers' host weights that are still to come."""

    @property
    def any_due(self) -> bool:
        """Whether any layer's weights are to be updated before they are next read."""

    def run(self, layer: HostLayer) -> None:
        """Updates a layer's if that is due."""


class Stream:
    """Brings layers' weights to the device, one layer ahead of the one that runs.

    The layer that comes next is guessed from what came next last time, and at first from the order of registration. A wrong guess costs a
    load; nothing else depends on it. Layers that are kept have a slot each, which is loaded only when the host's weights may have changed;
    what comes ahead is then the next layer that is not on the device.

    Order on an accelerator: a load waits until compute has released its slot; compute waits until the load is done; the host waits for all
    loads before code that may write weights runs.
    """

    def __init__(
        self, layers: Sequence[HostLayer], lanes: Lanes, transfer: HostToDevice, slots: int, clock: Clock, accounting: Accounting
    ) -> None:
        self._layers, self._lanes, self._transfer, self._clock, self._accounting = layers, lanes, transfer, clock, accounting
        self._slots = [Slot() for _ in range(slots)]
        self._kept: dict[HostLayer, Slot] = {}
        self._next: dict[Use, Use] = {}
        self._last: Use | None = None
        self._first: dict[bool, Use] = {}
        self._uses = 0
        self._last_load: Event | None = None
        self._after_release: Use | None = None
        self.updates: Updates | None = None

    def begin(self, training: bool) -> None:
        """Starts a step: sends the first layer's weights, if it is known which layer that will be."""
        self._last = None
        first = self._first.get(training)
        if first is not None:
            self._load_ahead(first)

    def acquire(self, layer: HostLayer, phase: Phase) -> Sequence[Tensor]:
        """Returns the layer's weights on the device, in the order of its parameters, and sends for those of the next layer.

        Raises:
            RuntimeError: Every slot is in use, because streamed layers call one another.
        """
        use = (layer.index, phase)
        self._update(layer)
        slot = self._slot_of(layer)
        if slot is None:
            self._accounting.prefetch_misses += 1
            slot = self._load(layer)
        else:
            self._accounting.prefetch_hits += 1
        self._uses += 1
        slot.users, slot.last_use = slot.users + 1, self._uses
        assert slot.loaded is not None
        self._lanes.compute.wait(slot.loaded, "weights loaded")
        if self._last is None:
            self._first[phase != "inference"] = use
        else:
            self._next[self._last] = use
        self._last = use
        ahead = self._guess(use)
        if self.updates is not None and self.updates.any_due:
            self._after_release = ahead  # so that the host updates those weights while the device runs this layer
        else:
            self._load_ahead(ahead)
        return slot.weights

    def release(self, layer: HostLayer) -> None:
        """Says that everything that reads the layer's weights has been queued."""
        slot = next(slot for slot in (*self._kept.values(), *self._slots) if slot.layer is layer and slot.users)
        slot.users -= 1
        slot.released = self._lanes.compute.record()
        ahead, self._after_release = self._after_release, None
        self._load_ahead(ahead)

    def keep(self, layers: Sequence[HostLayer]) -> None:
        """Gives each of `layers` a slot of its own, of the size of its weights as they travel now."""
        for layer in layers:
            slot = self._kept[layer] = Slot(self._lanes.allocate(layer.nbytes))
            assert slot.buffer is not None
            slot.holding = self._accounting.hold("kept layers", [slot.buffer])
            slot.released = self._lanes.compute.record()

    def settle(self) -> None:
        """Waits until every load asked for has read the host's weights; code we do not know may write them next."""
        if self._last_load is not None:
            self._lanes.synchronize(self._last_load, "weights read")
            self._last_load = None

    def abandon(self) -> None:
        """Frees slots that a failed step left in use."""
        self._after_release = None
        for slot in (*self._kept.values(), *self._slots):
            slot.users = 0

    def close(self) -> None:
        """Gives up the slots' memory once nothing queued uses it."""
        self.settle()
        self._slots = [Slot() for _ in self._slots]
        self._kept.clear()

    def _guess(self, use: Use) -> Use | None:
        known = self._next.get(use)
        if known is not None:
            return known
        index, phase = use
        index += -1 if phase == "backward" else 1
        if not 0 <= index < len(self._layers) or (phase == "backward" and not self._layers[index].outstanding):
            return None
        return index, phase

    def _slot_of(self, layer: HostLayer) -> Slot | None:
        made = (self._clock.now, layer.layout, layer.stamp())
        return next((slot for slot in (*self._kept.values(), *self._slots) if slot.layer is layer and slot.made == made), None)

    def _own_slot(self, layer: HostLayer) -> Slot | None:
        """The slot of a kept layer, unless it is in use with other weights, or too small: in evaluation dtypes may be others."""
        slot = self._kept.get(layer)
        return slot if slot is not None and slot.buffer is not None and not slot.users and slot.buffer.nbytes >= layer.nbytes else None

    def _load_ahead(self, use: Use | None) -> None:
        """Sends for the weights of `use`, or where they are kept and good, of the next layer of which that is not so."""
        for _ in range(_REACH):
            if use is None:
                return
            layer = self._layers[use[0]]
            self._update(layer)
            if self._slot_of(layer) is None:
                if self._own_slot(layer) is not None or any(not slot.users for slot in self._slots):
                    self._load(layer)
                return
            if layer not in self._kept:
                return
            use = self._guess(use)

    def _update(self, layer: HostLayer) -> None:
        if self.updates is not None:
            self.updates.run(layer)

    def _load(self, layer: HostLayer) -> Slot:
        own = self._own_slot(layer)
        free = [slot for slot in self._slots if not slot.users] if own is None else [own]
        if not free:
            names = ", ".join(slot.layer.name for slot in self._slots if slot.layer)
            raise RuntimeError(
                f"Layer {layer.name!r} wants to run while {names} still run, and there are only {len(self._slots)} slots: streamed layers "
                f"that call one another need a slot each. Pass slots={len(self._slots) + 1}, or stream only the outer one by naming it in "
                "layers=[...]."
            )
        stale = [slot for slot in free if slot.layer is layer]
        slot = stale[0] if stale else min(free, key=lambda slot: slot.last_use)
        sources = layer.sources(self._clock.now)
        slot.layer, slot.made = layer, (self._clock.now, layer.layout, layer.stamp())
        if self._lanes.in_host_memory:
            slot.weights = [source.whole() if isinstance(source, OnTheWay) else source for source in sources]
        else:
            with torch.inference_mode(False):  # what is made in inference mode could not be used in training
                slot.weights = layer.views(self._room(slot) if own is None or own.buffer is None else own.buffer)
            assert slot.released is not None
            self._lanes.weights.wait(slot.released, "slot released")
            for weight, source in zip(slot.weights, sources, strict=True):
                self._transfer.send(weight, source)
                self._accounting.bytes_to_device += source.nbytes
        slot.loaded = self._last_load = self._lanes.weights.record()
        self._accounting.loads[layer.name] += 1
        return slot

    def _room(self, slot: Slot) -> Tensor:
        """The slot's buffer, made anew when the largest layer has grown or shrunk (a dtype was decided)."""
        nbytes = max(layer.nbytes for layer in self._layers)
        if slot.buffer is None or slot.buffer.nbytes != nbytes:
            self.settle()  # the old buffer must not be freed under a load that is still running
            slot.buffer, slot.weights, slot.holding = None, (), None
            slot.buffer = self._lanes.allocate(nbytes)
            slot.holding = self._accounting.hold("slots", [slot.buffer])
            slot.released = self._lanes.compute.record()
        return slot.buffer
