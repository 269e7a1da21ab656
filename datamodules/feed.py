"""How batches are pulled out of the inner DataLoader: what it is asked for, and when its iterator is begun anew."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning_megatrain.datamodules.sources import Sources

if TYPE_CHECKING:
    from lightning_megatrain.datamodules.dynamic_loader import DynamicLoader


class Epoch(Iterator[Any]):
    """One epoch's batches; starts the DataLoader's iterator anew when what it fetched ahead is out of date."""

    def __init__(self, loader: DynamicLoader) -> None:
        self._loader = loader
        self._batches = self._begin()

    def __next__(self) -> Any:
        if self._loader.nothing_left:
            self._loader.nothing_left = False
            raise StopIteration
        if self._loader._stale:
            self._batches = self._begin()
        batch = next(self._batches)
        self._loader._unused, self._loader._resumed = None, False
        self._loader.last = self._loader._planner.hand_out()
        return batch

    def _begin(self) -> Iterator[Any]:
        loader = self._loader
        if loader._unused is not None and not loader._stale:
            return loader._unused  # Lightning calls `iter` once more, to see that it can
        loader._stale = False
        inner, planner = loader._inner, loader._planner
        planner.rewind()
        if isinstance(source := loader.data.source, Sources):
            source.keep = (inner.num_workers * (inner.prefetch_factor or 0) + 1) * loader.batch_size * loader.world_size
        generator, begun = inner.generator, planner.delivered or (inner.persistent_workers and planner.epoch)
        if generator is not None and planner.in_own_order and begun:
            # The seed of workers was drawn from it when they first began, and the sampler's next epoch may hang on it.
            inner.generator = generator.clone_state()
        try:
            loader._unused = iter(inner)
        finally:
            inner.generator = generator
        return loader._unused


class Feed:
    """The batch sampler of the inner DataLoader: asks the plan for one batch after another."""

    def __init__(self, loader: DynamicLoader, wrapped_sampler: Any = None) -> None:
        # Weak, as a cycle would leave the workers to the garbage collector, which may run in a forked process that cannot end them.
        self._owner = weakref.ref(loader)
        self._wrapped_sampler = wrapped_sampler

    @property
    def _loader(self) -> DynamicLoader:
        loader = self._owner()
        if loader is None:
            raise RuntimeError("The DynamicLoader is gone. Keep it alive while its batches are read.")
        return loader

    @property
    def sampler(self) -> Feed:
        """Where Lightning looks for ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, and the sampler of a wrapped DataLoader, which epoch begins."""
        self._loader.set_epoch(epoch)
        if hasattr(self._wrapped_sampler, "set_epoch"):
            self._wrapped_sampler.set_epoch(self._loader.epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        while (planned := self._loader._planner.take()) is not None:
            yield planned.keys

    def __len__(self) -> int:
        return len(self._loader)
