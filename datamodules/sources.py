"""Named datasets behind one index: map-style ones by position, streams by ordinal."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from lightning_megatrain.datamodules.shares import name_seed
from lightning_megatrain.datamodules.streams import OrdinalReader, part_of


def sample_count(dataset: Any, name: str) -> int | None:
    """Return the number of samples of a map-style dataset, None for a stream.

    Raises:
        TypeError: it is neither.
        ValueError: it is empty, or a stream that was split over the ranks before.
    """
    what = f"dataset {name!r}" if name else "dataset"
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if not isinstance(dataset, Iterable):
            raise TypeError(f"The {what} ({type(dataset).__name__}) has neither `__getitem__` and `__len__` nor `__iter__`.")
        if getattr(dataset, "_distributed", None) is not None:
            raise ValueError(f"The {what} is already split over the ranks. Give the whole stream: the loader shares it out itself.")
        if hasattr(dataset, "__next__"):
            raise TypeError(f"The {what} is an iterator, which can be read only once. Give the iterable it came from.")
        return None
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"The {what} ({type(dataset).__name__}) has `__getitem__` but no `__len__`.")
    if len(dataset) == 0:
        raise ValueError(f"The {what} is empty.")
    return len(dataset)


class Sources(Dataset[Any]):
    """Named datasets, one after another.

    Args:
        sources: Datasets by name.
        sizes: Their numbers of samples, None for a stream.
        shuffle_buffer: Samples of a stream to draw from at random; 0 keeps its order.
        seed: Of the draws.

    A sample's key is its index in the concatenation, or (number of the dataset, index or ordinal, parts) where there are streams.
    """

    def __init__(self, sources: Mapping[str, Any], sizes: Mapping[str, int | None], shuffle_buffer: int = 0, seed: int = 0) -> None:
        self._shuffle_buffer, self._seeds = shuffle_buffer, [[seed, name_seed(name)] for name in sources]
        self._sources = list(sources.values())
        self._sizes = list(sizes.values())
        self._offsets = list(accumulate((s or 0 for s in self._sizes), initial=0))
        self._readers: dict[tuple[int, int, int], OrdinalReader] = {}  # by number of the dataset, part and parts
        self.keep = 1  # samples a reader can go back

    def __len__(self) -> int:
        return self._offsets[-1]

    def __getitem__(self, key: int | tuple[int, int, int]) -> Any:
        if not isinstance(key, tuple):
            source = bisect_right(self._offsets, key) - 1
            return self._sources[source][int(key) - self._offsets[source]]
        source, place, parts = key
        if self._sizes[source] is not None:
            return self._sources[source][place - self._offsets[source]]
        which = (source, place % parts, parts)
        if which not in self._readers:
            part, seed = part_of(self._sources[source], place % parts, parts), [*self._seeds[source], place % parts]
            self._readers[which] = OrdinalReader(part, self.keep, self._shuffle_buffer, seed)
        return self._readers[which][place // parts]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}}  # a spawned worker opens streams of its own
