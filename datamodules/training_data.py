"""What a loader draws from: one dataset or several by name, map-style or streamed, and the domains of their samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatrain.datamodules.sample_domains import THREE_FORMS, DomainOf, find_domains
from lightning_megatrain.datamodules.sources import Sources, sample_count
from lightning_megatrain.datamodules.streams import count_parts


class TrainingData:
    """The datasets behind one loader.

    Args:
        dataset: A map-style or iterable dataset, or one per name.
        domain: Where a map-style dataset has its domains.
        shuffle_buffer: Samples of a stream to draw from at random; 0 keeps its order.
        seed: Of the draws.

    Raises:
        TypeError: A dataset is neither map-style nor iterable.
        ValueError: There is none, one is empty, or the domains cannot be taken from there.
    """

    def __init__(self, dataset: Any, domain: DomainOf | None, shuffle_buffer: int = 0, seed: int = 0) -> None:
        if isinstance(dataset, Mapping) and not dataset:
            raise ValueError("There is no dataset: give at least one name and dataset.")
        if isinstance(dataset, Mapping) and domain is not None:
            raise ValueError("Named datasets are their own domains: leave out `domain=`.")
        self.dataset, self.domain = dataset, domain
        self._named = dict(dataset) if isinstance(dataset, Mapping) else {"": dataset}
        self._sizes = {name: sample_count(source, name) for name, source in self._named.items()}
        self.streams = [name or "the dataset" for name, size in self._sizes.items() if size is None]
        if self.streams and domain is not None:
            raise ValueError(f"The domains of a stream must be separate streams, one per name.\n{THREE_FORMS}")
        if shuffle_buffer < 0:
            raise ValueError(f"`shuffle_buffer` must be a number of samples, or 0 for a stream's own order, got {shuffle_buffer}.")
        if shuffle_buffer and not self.streams:
            raise ValueError("`shuffle_buffer` is for streams: a map-style dataset is shuffled as a whole. Leave it out.")
        keyed = isinstance(dataset, Mapping) or bool(self.streams)
        self.shuffle_buffers = {
            name: int(shuffle_buffer or getattr(self._named[name], "shuffle_buffer", 0))
            for name, size in self._sizes.items()
            if size is None
        }
        """Of each stream: samples to draw from at random, the loader's or (a stream of text) documents of its own."""
        self.source: Any = Sources(self._named, self._sizes, shuffle_buffer, seed) if keyed else dataset
        """What the DataLoader reads."""

    @property
    def num_samples(self) -> int | None:
        """Samples of all domains, None with a stream."""
        return None if self.streams else sum(s or 0 for s in self._sizes.values())

    @property
    def samples(self) -> Any:
        """The map-style dataset that indices are positions in.

        Raises:
            TypeError: a source is a stream.
        """
        if self.streams:
            raise TypeError(
                f"The samples of a stream ({', '.join(self.streams)}) cannot be chosen by index. To select samples make it map-style "
                "(`datasets.load_dataset` without `streaming=True`); a mixture and a reweighting work on streams as they are."
            )
        return self.source

    @property
    def has_domains(self) -> bool:
        """Whether the data comes with domains."""
        return self.domain is not None or isinstance(self.dataset, Mapping)

    def find_domains(self) -> tuple[list[str], list[int | None], NDArray[np.int32] | None]:
        """Return the names, the samples of each (None for a stream), and (N,) the domain of each sample where these are not in order."""
        if self.domain is None:
            return list(self._named), list(self._sizes.values()), None
        names, ids = find_domains(self.dataset, self.domain)
        return names, np.bincount(ids, minlength=len(names)).tolist(), ids

    def check_same_buffers(self, saved: Mapping[str, int]) -> None:
        """Refuse a checkpoint whose streams were drawn from other buffers, which is another order.

        Args:
            saved: :attr:`shuffle_buffers` of then.

        Raises:
            ValueError: Names both sizes, and the way out.
        """
        for name, buffer in self.shuffle_buffers.items():
            if saved.get(name, buffer) != buffer:
                stream = f"stream {name!r}" if name else "stream"
                raise ValueError(
                    f"The checkpoint was saved with shuffle_buffer={saved[name]} for the {stream}, which now has shuffle_buffer={buffer}: "
                    f"it would come in another order. Use shuffle_buffer={saved[name]} to resume, or begin a new run from the checkpoint's "
                    "weights (`load_from_checkpoint`)."
                )

    def count_parts(self, readers: int) -> list[int]:
        """Return in how many parts each dataset is read by so many readers (1 if it is no stream)."""
        sizes = zip(self._named.values(), self._sizes.values(), strict=True)
        return [count_parts(source, readers) if size is None else 1 for source, size in sizes]

    def equal_shares(self) -> dict[str, float] | None:
        """Return what streams are mixed in without a decision; None where the data has an order of its own."""
        return dict.fromkeys(self._named, 1.0) if self.streams else None
