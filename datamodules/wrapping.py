"""Which plain DataLoaders can be taken over."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset


def batch_size_of(loader: DataLoader[Any]) -> int:
    """Return the batch size of a DataLoader whose samples can be chosen by index.

    Raises:
        TypeError: the dataset is iterable, or the loader does not batch; says what to return instead.
    """
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__getitem__"):
        raise TypeError(
            f"The samples of an iterable dataset ({type(loader.dataset).__name__}) cannot be chosen by index. Return a `DynamicLoader` "
            "instead of a DataLoader: `DynamicLoader({'name': stream, ...}, batch_size=..., steps_per_epoch=...)` mixes "
            "streams; to select samples, make the dataset map-style (`__getitem__` and `__len__`)."
        )
    if loader.batch_sampler is None:
        raise TypeError("A DataLoader with `batch_size=None` does not batch. Give it a `batch_size`, or return a `DynamicLoader`.")
    batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if batch_size is None:
        raise TypeError(
            f"The batch sampler {type(loader.batch_sampler).__name__} does not tell its batch size. Give it an attribute `batch_size`, "
            "or return a `DynamicLoader`."
        )
    return int(batch_size)
