"""The loader on which every policy rests: sized, stateful, and open to change between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import DataLoader

from lightning_megatrain.datamodules.feed import Epoch, Feed
from lightning_megatrain.datamodules.plan import Plan
from lightning_megatrain.datamodules.planner import Delivered, Planner, Shape
from lightning_megatrain.datamodules.sample_domains import THREE_FORMS, DomainOf
from lightning_megatrain.datamodules.sampler_order import SamplerOrder
from lightning_megatrain.datamodules.sampling import as_pool
from lightning_megatrain.datamodules.shares import check_same_domains
from lightning_megatrain.datamodules.training_data import TrainingData
from lightning_megatrain.datamodules.wrapping import batch_size_of


class DynamicLoader:
    """A data loader whose samples can be chosen anew between any two steps.

    It has a length, keeps its place in the checkpoint and is used like a DataLoader. All ranks plan the same batches from the seed
    and take their own part, so nothing is communicated. :meth:`set_pool` and :meth:`set_proportions` are in force with the very next
    batch; what workers had fetched ahead is dropped. Inside an epoch, a resumed run goes on with exactly the sample that would
    have come next. ``loader.last`` tells the index and domain of each sample of the batch at hand, which itself is untouched.

    Without a decision each epoch is one permutation of all samples. A pool or a domain is drawn without replacement until it is used up,
    then in a new permutation. Proportions are exact over each ``window`` of samples (largest remainder).

    Args:
        dataset: A map-style dataset, or one dataset per domain: ``{"wiki": ..., "code": ...}``, where each is map-style or iterable
            (streamed). A lone iterable dataset is one stream. Of a stream with ``num_shards`` and ``shard`` (Hugging Face's) that has a
            multiple of ranks x workers as shards, each worker reads its own; its order then depends on their numbers. Any other stream
            is read whole by every worker and rank, each of which keeps its own samples.
        batch_size: Samples per batch and rank.
        domain: Where a map-style dataset has its domains: a column, or a function of the sample. Either gives strings or whole numbers.
        proportions: Share of each domain from the start. Default: none, all samples are alike (streams: equal shares).
        shuffle: ``False`` keeps the samples' own order. Streams always do, unless they have a ``shuffle_buffer``.
        shuffle_buffer: Samples of each stream that are held in memory, by each process that reads it, and drawn from at random, in
            another order in each pass. That many are read before the first batch. 0: a stream keeps its order.
        seed: Seeds every permutation.
        steps_per_epoch: Length of an epoch in batches. Needed for streams; else one pass over the data, or under a decision the full
            batches that one takes. When it is given, an epoch goes on where the last one ended.
        window: Samples over which proportions are exact (default: 1024, rounded up to whole global batches).
        drop_last: Leave out a last smaller batch of an epoch.
        collate_fn: As in DataLoader.
        num_workers: As in DataLoader; workers live as long as the loader.
        prefetch_factor: As in DataLoader. What is fetched ahead is lost when a decision changes.
        pin_memory: As in DataLoader.
        worker_init_fn: As in DataLoader.
        rank: This process among ``world_size`` (default: from ``torch.distributed``).
        world_size: How many processes train (default: from ``torch.distributed``).

    Raises:
        TypeError: the dataset is neither map-style nor iterable.
        ValueError: a size, share or domain that cannot be.

    Example::

        loader = DynamicLoader({"wiki": wiki, "code": code}, batch_size=8, proportions={"wiki": 0.7, "code": 0.3})
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        domain: DomainOf | None = None,
        proportions: Mapping[str, float] | None = None,
        shuffle: bool = True,
        shuffle_buffer: int = 0,
        seed: int = 0,
        steps_per_epoch: int | None = None,
        window: int = 1024,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ValueError(f"`steps_per_epoch` must be at least 1, got {steps_per_epoch}.")
        if window < 1:
            raise ValueError(f"`window` must be at least 1, got {window}.")
        self.batch_size, self.drop_last, self.seed, self._steps_per_epoch = batch_size, drop_last, seed, steps_per_epoch
        self._window, self._shuffle, self._first_proportions = window, shuffle, proportions
        self._rank, self._world_size = rank, world_size
        self._own_order: SamplerOrder | None = None
        self.data = TrainingData(dataset, domain, shuffle_buffer, seed)
        if self.data.streams and steps_per_epoch is None:
            raise ValueError("A stream has no length: give `steps_per_epoch=`, the number of batches to call an epoch.")
        self._feed = Feed(self)
        self._inner: DataLoader[Any] = DataLoader(
            self.data.source,
            batch_sampler=self._feed,
            collate_fn=collate_fn,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            persistent_workers=num_workers > 0,
            generator=torch.Generator().manual_seed(seed),  # leaves torch's global generator alone
        )
        self._start()

    same_every_epoch = False
    """Whether each epoch has the batches of the first. The Trainer's `overfit_batches` sets it."""

    nothing_left = False
    """Whether the next batch that is asked for is one behind an epoch's last. A Trainer that resumes from there sets it."""

    inside_epoch = False
    """Whether the first batch after a resume is one of the epoch that was begun. A Trainer that resumes inside an epoch sets it."""

    @classmethod
    def from_dataloader(
        cls,
        loader: DataLoader[Any],
        *,
        domain: DomainOf | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> DynamicLoader:
        """Take over a plain DataLoader. Until a decision is made it gives exactly what it gave before.

        Args:
            loader: A DataLoader over a map-style dataset, with the sampler that this rank shall use.
            domain: A column, or a function of the sample.
            seed: Seeds the permutations once a decision is in force.
            rank: As in the constructor.
            world_size: As in the constructor.

        Raises:
            TypeError: the dataset is iterable, or the loader does not batch.
        """
        batch_size = batch_size_of(loader)
        self = cls.__new__(cls)
        self.batch_size, self.drop_last, self.seed, self._steps_per_epoch = batch_size, loader.drop_last, seed, None
        self._window, self._shuffle, self._first_proportions = 1024, True, None
        self._rank, self._world_size = rank, world_size
        self.data = TrainingData(loader.dataset, domain)
        self._own_order = SamplerOrder(loader)
        self._feed = Feed(self, getattr(loader.batch_sampler, "sampler", loader.batch_sampler))
        self._inner = copy(loader)  # keeps a subclass, its collate, workers and generator as they are
        self._inner.__dict__["batch_sampler"] = self._feed  # DataLoader refuses to set it by name
        self._inner.__dict__["_iterator"] = None
        self._start()
        return self

    def _start(self) -> None:
        self.last: Delivered | None = None
        self._planner_in_use: Planner | None = None
        self._earlier: DynamicLoader | None = None  # whose decisions to take over
        self._stale = False  # what the DataLoader's iterator has fetched ahead is out of date
        self._unused: Iterator[Any] | None = None  # a DataLoader's iterator, with no batch taken
        self._resumed = False  # and no batch handed out since
        self._epochs_without_batches = 0

    # ---------------------------------------------------------------- what it holds

    @property
    def rank(self) -> int:
        """This process among those that train."""
        if self._rank is not None:
            return self._rank
        return torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """How many processes train."""
        if self._world_size is not None:
            return self._world_size
        return torch.distributed.get_world_size() if torch.distributed.is_available() and torch.distributed.is_initialized() else 1

    @property
    def batch_sampler(self) -> Feed:
        """Where Lightning looks for a sampler to tell the epoch."""
        return self._feed

    @property
    def _iterator(self) -> Any:
        """Where Lightning looks for workers, to end them when a fit ends. Left to the garbage collector they may take seconds each."""
        return self._inner._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._inner._iterator = iterator
        self._unused, self._stale = None, True

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any]:
        """The function that makes a batch of samples."""
        return self._inner.collate_fn

    @property
    def num_samples(self) -> int | None:
        """Samples of all domains, None with a stream."""
        return self.data.num_samples

    @property
    def dataset(self) -> Any:
        """The dataset, or the named datasets, that were given."""
        return self.data.dataset

    @property
    def samples(self) -> Any:
        """The map-style dataset whose positions are the indices of :attr:`last` and :meth:`set_pool`.

        Raises:
            TypeError: a source is a stream.
        """
        return self.data.samples

    @property
    def has_domains(self) -> bool:
        """Whether the data comes with domains."""
        return self.data.has_domains

    @property
    def domains(self) -> list[str]:
        """The names of the domains.

        Raises:
            ValueError: the data has none; shows the three ways to give them.
        """
        if not self.has_domains:
            raise ValueError(f"The training data has no domains.\n{THREE_FORMS}")
        return self.plan.names

    @property
    def domain_sizes(self) -> dict[str, int | None]:
        """Samples of each domain, None for a stream."""
        counts = self.plan.domain_sizes
        return dict(zip(self.domains, counts, strict=True))

    @property
    def proportions(self) -> dict[str, float] | None:
        """The proportions in force."""
        return None if self.plan.proportions is None else dict(self.plan.proportions)

    @property
    def pool(self) -> NDArray[np.int64] | None:
        """The indices of the pool in force."""
        return self.plan.pool

    def find_domains_by(self, domain: DomainOf) -> None:
        """Take the samples' domains from a column or a function; before the first batch.

        Args:
            domain: As in the constructor.

        Raises:
            TypeError: a source is a stream.
            RuntimeError: batches have been planned.
        """
        _ = self.samples
        if self._planner_in_use is not None:
            raise RuntimeError("The loader is in use: say where the domains are before its first batch.")
        self.data.domain = domain

    def domain_of(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Return the domain (position in :attr:`domains`) of each of ``indices``, which are (N,) integers."""
        self.domains  # noqa: B018  raises if there are none
        return self.plan.domain_of(np.asarray(indices, dtype=np.int64))

    @property
    def plan(self) -> Plan:
        """What comes next."""
        return self._planner.plan

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self._planner.epoch

    @property
    def delivered(self) -> int:
        """Batches of this epoch that were handed out."""
        return self._planner.delivered

    @property
    def _planner(self) -> Planner:
        """Made when first needed: a column of domains may take a pass over the data, and ranks must be known."""
        if self._planner_in_use is None:
            names, sizes, ids = self.data.find_domains()
            if self._first_proportions is not None and not self.has_domains:
                raise ValueError(f"`proportions` needs domains.\n{THREE_FORMS}")
            one_pass = self._steps_per_epoch is None
            shape = Shape(self.batch_size, self.rank, self.world_size, len(self), self.num_samples, one_pass, self.drop_last)
            window = -(-self._window // shape.global_batch) * shape.global_batch
            readers = self.world_size * max(self._inner.num_workers, 1)
            parts = self.data.count_parts(readers)
            plan = Plan(sizes, names, ids, seed=self.seed, window=window, shuffle=self._shuffle, ranks=self.world_size, parts=parts)
            plan.set_proportions(self._first_proportions or self.data.equal_shares(), 0)
            self._planner_in_use = Planner(plan, shape, self._own_order, self.has_domains, keyed_by_domain=bool(self.data.streams))
            if self._earlier is not None:
                self._planner_in_use.take_over(self._earlier._planner)
                self._earlier = None
            self._warn_of_repeats()
        return self._planner_in_use

    def _warn_of_repeats(self) -> None:
        """Without proportions a batch that is larger than the data is cut to one pass; with them it has no end."""
        total, batch = self.num_samples, self.batch_size * self.world_size
        if self._steps_per_epoch is None and self.plan.proportions is not None and total is not None and batch > total:
            rank_zero_warn(
                f"A batch of {batch} samples (over all processes) is larger than the data, {total} samples: as proportions hold, it is "
                f"full, and a sample comes about {batch / total:.1f} times in it. Lower `batch_size`, or say with `steps_per_epoch` that "
                "an epoch is no pass over the data."
            )

    # ---------------------------------------------------------------- decisions

    def set_pool(self, indices: ArrayLike | None, *, ordered: bool = False) -> None:
        """Draw only from ``indices`` from the next batch on.

        Args:
            indices: (N,) positions in the dataset; a repeated one comes up that often. None: all samples again.
            ordered: Serve them in the order given, again and again, instead of shuffled.

        Raises:
            TypeError: a source is a stream, or the indices are no whole numbers.
            ValueError: no index, or one outside the dataset.
        """
        pool = None if indices is None else as_pool(indices, len(self.samples))
        self._planner.change(lambda _: self.plan.set_pool(pool, ordered))
        self._stale = True

    def set_proportions(self, proportions: Mapping[str, float] | None) -> None:
        """Mix the domains in these shares from the next batch on.

        Args:
            proportions: A weight for every domain; None: no shares (streams: equal ones).

        Raises:
            ValueError: the data has no domains, or a weight is missing or wrong.
        """
        _ = self.domains
        first = self.plan.proportions is None
        self._planner.change(
            lambda number: self.plan.set_proportions(self.data.equal_shares() if proportions is None else proportions, number)
        )
        self._stale = True
        if first:
            self._warn_of_repeats()

    def take_over(self, earlier: DynamicLoader) -> None:
        """Put the decisions of another loader over the same data in force, and go on where it is under them; before the first batch.

        Args:
            earlier: That loader.

        Raises:
            ValueError: its data has another number of samples.
        """
        if earlier.num_samples != self.num_samples:
            raise ValueError(f"The decisions in force are about {earlier.num_samples} samples, the data now has {self.num_samples}.")
        self._earlier = earlier

    # ---------------------------------------------------------------- iteration

    def __len__(self) -> int:
        if self._steps_per_epoch is not None:
            return self._steps_per_epoch
        if self._own_order is not None:
            return len(self._own_order)
        global_batch = self.batch_size * self.world_size
        total = self.num_samples or 0
        return total // global_batch if self.drop_last else -(-total // global_batch)

    def __iter__(self) -> Iterator[Any]:
        if self.delivered and (not self._resumed or self.delivered >= len(self)):
            self._begin_epoch(self.epoch + 1)
        return Epoch(self)

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch ``epoch``, unless the loader is in it already. Lightning calls this at the start of every epoch.

        A run that resumes from the end of an epoch may count that epoch twice, the second time without a batch. One that `max_steps` ended
        inside an epoch counted it, and counts it again when it goes on. The loader does not.
        """
        if epoch < self._epochs_without_batches:
            self._epochs_without_batches = 0  # another Trainer, that counts from the start
        number = epoch - self._epochs_without_batches
        if number != self.epoch and self._resumed and (self.inside_epoch or not self.delivered):
            self._epochs_without_batches += max(number - self.epoch, 0)  # less: one of several loaders, begun anew within the epoch
        elif number != self.epoch:
            self._begin_epoch(number)

    def end_epoch(self) -> None:
        """End the epoch, of which batches may be left (`limit_train_batches`): the next batch is the first of the one behind it."""
        if self.delivered:
            self._begin_epoch(self.epoch + 1)

    def _begin_epoch(self, epoch: int) -> None:
        self._planner.begin_epoch(epoch, again=self.same_every_epoch)
        self._stale = True

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data and the decisions in force, for a checkpoint."""
        domains = list(self.domains) if self.has_domains else []
        more = {"domains": domains, "shuffle_buffers": dict(self.data.shuffle_buffers)}
        return {**self._planner.state_dict(), **more, "epochs_without_batches": self._epochs_without_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place that :meth:`state_dict` returned; the next batch is the one that would have followed.

        Raises:
            ValueError: the batch size, number of processes, data, domains, or seed or buffers of streams are not the saved ones.
            RuntimeError: a wrapped DataLoader's sampler gives another order than it gave then.
        """
        saved, names = state.get("domains"), self.domains if self.has_domains else []
        mixed = state["decisions"]["proportions"] is not None
        if saved is not None and (mixed or (saved and names)):  # a run may get or lose domains that nothing mixes
            check_same_domains(saved, names)
        self.data.check_same_buffers(state.get("shuffle_buffers", {}))
        self._planner.load_state_dict(state)
        self._epochs_without_batches = state.get("epochs_without_batches", 0)
        self._stale = self._resumed = True
