"""Streams: shared by ranks and workers, mixed in exact proportions, resumed exactly, and read in parts where they have shards."""

from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from lightning_megatrain.callbacks import ODM, LossReweighting, LossSelection, PolicyError
from lightning_megatrain.datamodules import DynamicLoader
from lightning_megatrain.datamodules.streams import count_parts, shuffled
from tests.callbacks.modules import Linear, Points, fit

workers = pytest.mark.parametrize("num_workers", [0, 2])


class Stream(IterableDataset):
    """Numbers that can only be read in order."""

    def __init__(self, n, first=0):
        self.n, self.first = n, first

    def __iter__(self):
        return iter(torch.arange(self.first, self.first + self.n))


class Sharded(IterableDataset):
    """Numbers in `num_shards` files; `read` notes those that were read."""

    def __init__(self, files, read=None):
        self.files, self.read = files, [] if read is None else read

    @property
    def num_shards(self):
        return len(self.files)

    def shard(self, num_shards, index):
        return Sharded(self.files[index::num_shards], self.read)

    def __iter__(self):
        for file in self.files:
            for number in file:
                self.read.append(number)
                yield torch.tensor(number)


def files(n, shards, first=0):
    return np.arange(first, first + n).reshape(shards, -1).tolist()


def hugging_face(n, shards, first=0, **kwargs):
    table = datasets.Dataset.from_dict({"x": list(range(first, first + n))})
    return table.to_iterable_dataset(num_shards=shards)


def values(batches):
    return [(b["x"] if isinstance(b, dict) else b).tolist() for b in batches]


def test_a_stream_is_read_again_when_it_ends_and_told_the_pass():
    class Told(Stream):
        def set_epoch(self, epoch):
            self.first = 1000 * epoch

    loader = DynamicLoader(Told(5), 4, steps_per_epoch=3)
    assert values(loader) == [[0, 1, 2, 3], [4, 1000, 1001, 1002], [1003, 1004, 2000, 2001]]


@pytest.mark.parametrize("buffer", [1, 2, 10, 40, 100])
def test_a_shuffle_buffer_draws_each_sample_once_and_holds_no_more_than_it_says(buffer):
    read = []

    def numbers():
        for number in range(40):
            read.append(number)
            yield number

    drawn, ahead = [], []
    for number in shuffled(numbers(), buffer, [3]):
        drawn.append(number)
        ahead.append(len(read) - len(drawn))
    assert sorted(drawn) == list(range(40))
    assert max(ahead) == min(buffer, 39)
    assert (drawn == sorted(drawn)) == (buffer == 1)
    assert list(shuffled(range(40), buffer, [3])) == drawn
    assert buffer == 1 or list(shuffled(range(40), buffer, [4])) != drawn


def test_draws_are_even_over_a_buffer_as_large_as_the_data():
    firsts = Counter(next(shuffled(range(4), 4, [seed])) for seed in range(2000))
    assert all(abs(count - 500) < 5 * (2000 * 0.25 * 0.75) ** 0.5 for count in firsts.values())


@workers
def test_a_shuffled_stream_has_another_order_in_each_pass_and_by_each_name_and_seed(num_workers):
    def run(seed=0, name="a"):
        loader = DynamicLoader({name: Stream(40)}, 4, steps_per_epoch=20, shuffle_buffer=16, seed=seed, num_workers=num_workers)
        seen = sum(values(loader), [])
        return seen[:40], seen[40:]

    first, second = run()
    assert sorted(first) == sorted(second) == list(range(40))
    orders = [first, second, run(seed=1)[0], run(name="b")[0], list(range(40))]
    assert len({tuple(order) for order in orders}) == 5
    assert run() == (first, second)


def test_a_resume_with_another_shuffle_buffer_is_refused_and_both_are_named():
    def loader(buffer, named=True):
        return DynamicLoader({"a": Stream(40)} if named else Stream(40), 4, steps_per_epoch=10, shuffle_buffer=buffer)

    whole = loader(16)
    batches = [batch.tolist() for _, batch in zip(range(3), whole, strict=False)]
    state = whole.state_dict()
    for buffer in (0, 17):
        with pytest.raises(
            ValueError,
            match=rf"shuffle_buffer=16 for the stream 'a', which now has shuffle_buffer={buffer}: .* Use shuffle_buffer=16 to resume",
        ):
            loader(buffer).load_state_dict(state)
    with pytest.raises(ValueError, match=r"shuffle_buffer=0 for the stream, which now has shuffle_buffer=16"):
        loader(16, named=False).load_state_dict(loader(0, named=False).state_dict())
    del state["shuffle_buffers"]  # a checkpoint of before this was kept
    for saved in (state, whole.state_dict()):
        resumed = loader(16)
        resumed.load_state_dict(saved)
        assert batches + values(resumed) == values(loader(16))


def test_a_shuffle_buffer_is_refused_where_it_means_nothing():
    with pytest.raises(ValueError, match="a map-style dataset is shuffled as a whole"):
        DynamicLoader(list(range(8)), 4, shuffle_buffer=4)
    with pytest.raises(ValueError, match="or 0 for a stream's own order, got -1"):
        DynamicLoader(Stream(8), 4, steps_per_epoch=1, shuffle_buffer=-1)


@workers
@pytest.mark.parametrize(
    "stream", [lambda: Stream(64), lambda: Sharded(files(64, 4)), lambda: hugging_face(64, 4), lambda: hugging_face(64, 3)]
)
def test_ranks_and_workers_share_a_stream_without_repeats(stream, num_workers):
    ranks = [values(DynamicLoader(stream(), 4, steps_per_epoch=8, rank=r, world_size=2, num_workers=num_workers)) for r in range(2)]
    assert sorted(sum(sum(ranks, []), [])) == list(range(64))


def test_the_order_of_a_stream_without_shards_depends_on_neither_ranks_nor_workers():
    one = sum(values(DynamicLoader(Stream(64), 8, steps_per_epoch=8)), [])
    ranks = [values(DynamicLoader(Stream(64), 4, steps_per_epoch=8, rank=r, world_size=2, num_workers=2)) for r in range(2)]
    assert one == [n for a, b in zip(*ranks, strict=True) for n in a + b]


def test_a_shuffled_hugging_face_stream_gives_each_sample_once_in_each_pass():
    stream = hugging_face(40, 4).shuffle(seed=1, buffer_size=10)
    loader = DynamicLoader({"h": stream}, 4, steps_per_epoch=10, num_workers=2)
    first, second = values(loader), values(loader)
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(40))
    assert first != second
    assert first == values(DynamicLoader({"h": stream}, 4, steps_per_epoch=10, num_workers=2))


@pytest.mark.parametrize(("shards", "readers", "parts"), [(8, 4, 4), (4, 8, 4), (6, 4, 2), (3, 4, 1), (1, 4, 1), (5, 1, 1)])
def test_a_stream_is_read_in_as_many_parts_as_divide_shards_and_readers(shards, readers, parts):
    assert count_parts(Sharded([[0]] * shards), readers) == parts
    assert count_parts(Stream(3), readers) == 1


def test_each_rank_reads_its_own_shards_alone():
    for rank in range(2):
        stream = Sharded(files(64, 4))
        seen = sum(values(DynamicLoader(stream, 4, steps_per_epoch=4, rank=rank, world_size=2)), [])
        assert stream.read == seen == [n for file in stream.files[rank::2] for n in file][:16]


def test_each_worker_reads_its_own_shards_alone_unless_a_decision_comes_out_of_turn():
    class Counting(Sharded):
        """A sample tells how many samples its worker has read."""

        def shard(self, num_shards, index):
            return Counting(self.files[index::num_shards], self.read)

        def __iter__(self):
            for number in super().__iter__():
                yield torch.stack([number, torch.tensor(len(self.read))])

    def counts(stream, decision):
        loader = DynamicLoader(
            {"a": stream, "b": Sharded(files(8, 4, 1000))}, 4, steps_per_epoch=8, num_workers=2, proportions={"a": 1, "b": 0}
        )
        most = 0
        for _ in range(3):
            for n, batch in enumerate(loader):
                most = max(most, int(batch[:, 1].max()))
                if n == decision:
                    loader.set_proportions({"a": 1, "b": 0})
        return most

    assert counts(Counting(files(96, 4)), decision=3) == 48  # 96 samples were served, half by each worker
    assert 48 < counts(Counting(files(96, 4)), decision=4) <= 96  # the workers took over each other's shards; nothing was read twice
    assert counts(Counting(files(96, 3)), decision=3) > 90  # 3 shards are not shared by 2 workers: both read everything


def test_decisions_at_every_step_use_all_parts_alike():
    loader = DynamicLoader(
        {"a": Sharded(files(64, 4)), "b": Sharded(files(64, 4, 100))}, 4, steps_per_epoch=32, num_workers=2, proportions={"a": 1, "b": 1}
    )
    seen = []
    for batch in loader:
        seen += batch.tolist()
        loader.set_proportions({"a": 1, "b": 1})
    assert sorted(seen) == [*range(64), *range(100, 164)]


@workers
@pytest.mark.parametrize("make", [Stream, lambda n, first=0: Sharded(files(n, 4, first)), lambda n, first=0: hugging_face(n, 4, first)])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("shuffle_buffer", [0, 30])
def test_streamed_domains_are_mixed_exactly_and_resumed_exactly(make, num_workers, world_size, shuffle_buffer):
    def loaders():
        return [
            DynamicLoader(
                {"a": make(400), "b": make(400, 1000), "c": make(400, 2000)},
                4,
                proportions={"a": 0.5, "b": 0.3, "c": 0.2},
                steps_per_epoch=50 // world_size,
                shuffle_buffer=shuffle_buffer,
                window=200,
                num_workers=num_workers,
                rank=rank,
                world_size=world_size,
            )
            for rank in range(world_size)
        ]

    whole = loaders()
    epochs, saved = [], {}
    for epoch in range(2):
        batches = [[] for _ in whole]
        for n, given in enumerate(zip(*whole, strict=True)):
            for rank, batch in enumerate(values(given)):
                batches[rank].append(batch)
            if epoch == 1 and n == 6:
                [loader.set_proportions({"a": 0.2, "b": 0.3, "c": 0.5}) for loader in whole]
            if (epoch, n) in ((0, 6), (0, 50 // world_size - 1), (1, 9)):
                saved[epoch, n] = whole[0].state_dict()  # of rank 0 alone, as Lightning keeps it
        epochs.append(batches)
    first = Counter(n // 1000 for rank in epochs[0] for batch in rank for n in batch)
    assert [first[d] for d in range(3)] == [100, 60, 40]
    everything = [n for batches in epochs for rank in batches for batch in rank for n in batch]
    assert len(set(everything)) == 400
    for (epoch, n), state in saved.items():
        for rank, loader in enumerate(loaders()):
            loader.load_state_dict(state)
            if n == 50 // world_size - 1:
                assert values(loader)[:7] == epochs[epoch + 1][rank][:7], (epoch, n)
            else:
                assert values(loader) == epochs[epoch][rank][n + 1 :], (epoch, n)


def test_a_checkpoint_goes_on_with_another_number_of_workers():
    def make(num_workers):
        return DynamicLoader(Sharded(files(96, 4)), 4, steps_per_epoch=24, num_workers=num_workers)

    loader = make(2)
    batches, first = iter(loader), []
    for _ in range(5):
        first.append(next(batches).tolist())
    rest = make(4)
    rest.load_state_dict(loader.state_dict())
    assert sorted(sum(first + values(rest), [])) == list(range(96))


def test_streams_beside_a_map_style_domain():
    loader = DynamicLoader(
        {"m": list(range(1000, 1010)), "s": hugging_face(64, 2).with_format("torch").map(lambda r: r)},
        4,
        steps_per_epoch=8,
        collate_fn=list,
    )
    seen = [s if isinstance(s, int) else int(s["x"]) for batch in loader for s in batch]
    counts = Counter(n >= 1000 for n in seen)
    assert counts == {True: 16, False: 16}
    assert [n for n in seen if n < 1000] == list(range(16))


def test_a_stream_that_is_split_by_node_already_is_refused():
    from datasets.distributed import split_dataset_by_node

    split = split_dataset_by_node(hugging_face(8, 2), rank=0, world_size=2)
    with pytest.raises(ValueError, match="already split over the ranks. Give the whole stream"):
        DynamicLoader({"a": split}, 2, steps_per_epoch=2)


class PointStream(IterableDataset):
    """The points of one domain."""

    def __init__(self, domain):
        self.domain = domain

    def __iter__(self):
        return iter([Points()[i] for i in range(self.domain, 24, 3)])


def point_streams():
    return DynamicLoader({"a": PointStream(0), "b": PointStream(1), "c": PointStream(2)}, 4, steps_per_epoch=6, num_workers=1)


def test_a_mixture_and_a_reweighting_work_on_streams():
    module, odm = Linear(), ODM(warmup_steps=2, every_n_steps=1)
    fit(module, point_streams(), [odm, LossReweighting()])
    assert len(module.seen) == 6
    assert len(odm.history) == 4


def test_a_selection_on_streams_is_refused_before_the_first_step():
    module = Linear()
    with pytest.raises(PolicyError, match=r"LossSelection .*samples of a stream \(a, b, c\) cannot be chosen by index.*make it map-style"):
        fit(module, point_streams(), [LossSelection(size=4)])
    assert module.seen == []
