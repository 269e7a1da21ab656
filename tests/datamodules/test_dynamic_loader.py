"""The loader: every sample once, decisions at the very next batch, exact resume; with and without workers."""

import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_megatrain.datamodules import DynamicLoader


class Numbers(Dataset):
    """Sample i is the tensor i + first."""

    def __init__(self, n, first=0):
        self.n, self.first = n, first

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if not 0 <= i < self.n:
            raise IndexError(i)
        return torch.tensor(int(i) + self.first)


class Stream(IterableDataset):
    """Numbers that can only be read in order."""

    def __init__(self, n, first=0):
        self.n, self.first = n, first

    def __iter__(self):
        return iter(torch.arange(self.first, self.first + self.n))


def named(**kwargs):
    return DynamicLoader({"a": Numbers(10), "b": Numbers(30, 100), "c": Numbers(7, 200)}, 4, seed=3, **kwargs)


def streamed(**kwargs):
    return DynamicLoader({"a": Stream(10), "b": Stream(30, 100)}, 4, proportions={"a": 1, "b": 3}, steps_per_epoch=12, **kwargs)


def single(**kwargs):
    return DynamicLoader(Numbers(45), 4, **{"seed": 3, **kwargs})


def wrapped(**kwargs):
    generator = torch.Generator().manual_seed(7)
    return DynamicLoader.from_dataloader(DataLoader(Numbers(45), 4, shuffle=True, generator=generator, **kwargs))


MAKERS = {"single": single, "named": named, "streamed": streamed, "wrapped": wrapped}
workers = pytest.mark.parametrize("num_workers", [0, 2])


def values(batches):
    return [b.tolist() for b in batches]


@workers
def test_an_epoch_is_every_sample_once_and_the_next_one_has_another_order(num_workers):
    loader = single(num_workers=num_workers)
    first, second = values(loader), values(loader)
    assert [len(b) for b in first] == [4] * 11 + [1]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(45))
    assert first != second
    assert len(loader) == len(first)


def test_without_shuffle_samples_keep_their_order():
    assert sum(values(single(shuffle=False)), []) == list(range(45))


def test_drop_last_leaves_out_the_smaller_batch():
    loader = single(drop_last=True)
    assert [len(b) for b in loader] == [4] * 11 == [4] * len(loader)


def test_ranks_share_each_global_batch_and_each_sample_comes_once():
    ranks = [values(single(rank=r, world_size=3)) for r in range(3)]
    assert [len(r) for r in ranks] == [4] * 3  # 45 = 3 x 12 + 9
    assert sorted(sum(sum(ranks, []), [])) == list(range(45))
    assert [len(r[-1]) for r in ranks] == [3, 3, 3]


def test_every_rank_gets_a_sample_when_the_last_batch_has_fewer_than_ranks():
    ranks = [values(DynamicLoader(Numbers(9), 2, rank=r, world_size=4)) for r in range(4)]
    assert [[len(b) for b in r] for r in ranks] == [[2, 1]] * 4
    assert set(sum(sum(ranks, []), [])) == set(range(9))


def test_a_domain_is_used_up_before_a_sample_comes_again():
    loader = named(proportions={"a": 1, "b": 0, "c": 1}, steps_per_epoch=40)
    seen = torch.cat(list(loader))
    for name, size, first in (("a", 10, 0), ("c", 7, 200)):
        mine = seen[(seen >= first) & (seen < first + 100)].tolist()
        passes = [mine[i : i + size] for i in range(0, len(mine) - size + 1, size)]
        assert len(passes) > 5, name
        assert all(sorted(p) == list(range(first, first + size)) for p in passes)
        assert len({tuple(p) for p in passes}) == len(passes)


def test_proportions_are_exact_over_a_window():
    loader = named(proportions={"a": 0.5, "b": 0.3, "c": 0.2}, steps_per_epoch=50, window=200)
    domains = []
    for _ in loader:
        domains.append(loader.last.domain)
    assert torch.bincount(torch.cat(domains)).tolist() == [100, 60, 40]


def test_the_order_of_the_domains_does_not_change_the_mixture():
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    other = DynamicLoader({"c": Numbers(7, 200), "b": Numbers(30, 100), "a": Numbers(10)}, 4, seed=3, proportions=shares)
    assert values(named(proportions=shares)) == values(other)


@workers
@pytest.mark.parametrize("kind", MAKERS)
def test_last_tells_what_the_batch_is_made_of(kind, num_workers):
    loader = MAKERS[kind](num_workers=num_workers)
    for n, batch in enumerate(loader):
        if kind in ("single", "wrapped"):
            assert batch.tolist() == loader.last.index.tolist()
            assert loader.last.domain is None
        else:
            assert (batch // 100).tolist() == loader.last.domain.tolist()
            offsets = torch.tensor([0, 10, 40]) if kind == "named" else torch.tensor([0, 0])
            place = loader.last.index - offsets[loader.last.domain]
            assert (batch % 100).tolist() == [int(p) % s for p, s in zip(place, (torch.tensor([10, 30, 7])[loader.last.domain]).tolist())]
        assert loader.delivered == n + 1


@workers
@pytest.mark.parametrize("kind", ["single", "named", "wrapped"])
def test_a_new_pool_is_in_force_with_the_very_next_batch(kind, num_workers):
    loader = MAKERS[kind](num_workers=num_workers)
    for n, _ in enumerate(loader):
        if n == 3:
            loader.set_pool([2, 3, 5, 7, 11])
        if n > 3:
            assert set(loader.last.index.tolist()) <= {2, 3, 5, 7, 11}, n
    assert n == len(loader) - 1


@workers
@pytest.mark.parametrize("kind", ["named", "streamed"])
def test_new_proportions_are_in_force_with_the_very_next_batch(kind, num_workers):
    loader = MAKERS[kind](num_workers=num_workers)
    for n, _ in enumerate(loader):
        if n > 2:
            assert loader.last.domain.tolist() == [1] * 4, n
        if n == 2:
            loader.set_proportions({d: float(d == "b") for d in loader.domains})


@workers
def test_what_was_fetched_ahead_is_served_later_not_lost(num_workers):
    loader = wrapped(num_workers=num_workers)
    seen = []
    for n, batch in enumerate(loader):
        if n not in (4, 5):
            seen += batch.tolist()
        if n == 3:
            loader.set_pool([1])
        if n == 5:
            loader.set_pool(None)
    plain = sum(values(wrapped()), [])
    assert seen == plain[: len(seen)]


def test_a_pool_and_proportions_hold_at_once():
    loader = named(steps_per_epoch=30, window=120)
    loader.set_pool([0, 1, 2, 10, 11, 12, 13, 40])
    loader.set_proportions({"a": 0.5, "b": 0.4, "c": 0.1})
    index, domain = [], []
    for _ in loader:
        index.append(loader.last.index)
        domain.append(loader.last.domain)
    assert set(torch.cat(index).tolist()) == {0, 1, 2, 10, 11, 12, 13, 40}
    assert torch.bincount(torch.cat(domain)).tolist() == [60, 48, 12]


def test_a_pool_without_one_of_the_domains_gives_its_share_to_the_others():
    loader = named(steps_per_epoch=30, proportions={"a": 1, "b": 1, "c": 2}, window=120)
    with pytest.warns(UserWarning, match="none of the domains \\['c'\\]"):
        loader.set_pool(range(20))
    domains = torch.cat([loader.last.domain for _ in loader])
    assert torch.bincount(domains).tolist() == [60, 60]


def test_an_ordered_pool_keeps_its_order():
    loader = single()
    loader.set_pool([5, 4, 3, 9, 1, 0], ordered=True)
    assert sum(values(loader), [])[:12] == [5, 4, 3, 9, 1, 0] * 2


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("stop", "num_workers"), [(1, 0), (5, 0), (11, 0), (12, 0), (5, 2)])
def test_a_resumed_run_goes_on_with_the_sample_that_would_have_come(kind, num_workers, stop):
    def run(loader, epoch, n, batches):
        for n, batch in enumerate(batches, start=n):
            yield batch.tolist()
            if kind != "streamed" and (epoch, n) == (0, 2):
                loader.set_pool(range(0, 45, 2))
            if kind in ("named", "streamed") and (epoch, n) == (0, 6):
                loader.set_proportions(dict.fromkeys(loader.domains, 1.0))

    whole = MAKERS[kind](num_workers=num_workers)
    expected = []
    for epoch in range(2):
        for batch in run(whole, epoch, 0, whole):
            expected.append(batch)
            if len(expected) == stop:
                state = torch.load(_saved(whole.state_dict()), weights_only=True)
    resumed = MAKERS[kind](num_workers=num_workers)
    resumed.load_state_dict(state)
    got = []
    for epoch in range(stop // 12, 2):
        got += run(resumed, epoch, stop if len(got) == 0 and stop < 12 else 0, resumed)
    assert got == expected[stop:]


def _saved(state):
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_a_sampler_that_gives_another_order_is_refused_on_resume():
    class Moody(torch.utils.data.Sampler):
        def __len__(self):
            return 45

        def __iter__(self):
            return iter(np.random.permutation(45).tolist())

    def make():
        return DynamicLoader.from_dataloader(DataLoader(Numbers(45), 4, sampler=Moody()))

    loader = make()
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    with pytest.raises(RuntimeError, match="another order for the 5 batches"):
        make().load_state_dict(loader.state_dict())


@workers
def test_a_wrapped_loader_gives_what_the_plain_one_gave_and_takes_the_same_random_numbers(num_workers):
    torch.manual_seed(0)
    plain = DataLoader(Numbers(45), 4, shuffle=True, num_workers=num_workers)
    expected = [values(plain) for _ in range(2)], torch.rand(1)
    torch.manual_seed(0)
    loader = DynamicLoader.from_dataloader(DataLoader(Numbers(45), 4, shuffle=True, num_workers=num_workers))
    assert ([values(loader) for _ in range(2)], torch.rand(1)) == expected


def test_the_native_loader_leaves_the_global_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    loader = single(num_workers=1)
    for n, _ in enumerate(loader):
        if n == 3:
            loader.set_pool([1, 2])
    assert torch.rand(1) == expected


def test_the_users_batch_is_untouched():
    strange = object()
    loader = DynamicLoader(Numbers(8), 4, collate_fn=lambda samples: (strange, {"n": len(samples)}))
    assert list(loader) == [(strange, {"n": 4})] * 2


@pytest.mark.parametrize("domain", ["source", lambda sample: sample["source"]])
@pytest.mark.parametrize("hugging_face", [True, False])
def test_domains_come_from_a_column_or_a_function(domain, hugging_face):
    rows = [{"x": i, "source": "even" if i % 2 == 0 else "odd"} for i in range(10)]
    data = rows
    if hugging_face:
        from datasets import Dataset

        data = Dataset.from_list(rows)
    loader = DynamicLoader(data, 5, domain=domain, proportions={"even": 0, "odd": 1})
    assert loader.domains == ["even", "odd"]
    assert loader.domain_sizes == {"even": 5, "odd": 5}
    assert next(iter(loader))["x"].remainder(2).tolist() == [1] * 5
    assert loader.domain_of([0, 1, 2]).tolist() == [0, 1, 0]


def test_domains_may_be_whole_numbers_and_scalars_of_numpy():
    names = [0, np.int64(1), "two", np.str_("two"), True]
    loader = DynamicLoader(Numbers(5), 5, domain=lambda i: names[int(i)])
    assert loader.domains == ["0", "1", "True", "two"]
    assert loader.domain_sizes == {"0": 1, "1": 1, "True": 1, "two": 2}


@pytest.mark.parametrize(
    ("value", "kind"),
    [(None, "NoneType"), (1.0, "float"), (np.float32(1), "float32"), (torch.tensor(1), "Tensor"), (["a"], "list"), (b"a", "bytes")],
)
@pytest.mark.parametrize("column", [True, False])
def test_what_is_no_name_of_a_domain_is_refused_with_its_sample(value, kind, column):
    rows = [{"source": "a"}, {"source": "a"}, {"source": value}]
    loader = DynamicLoader(rows, 2, domain="source" if column else lambda row: row["source"])
    says = f"`domain` must give a string or a whole number, the name of a domain, but for sample 2 it gives a {kind}."
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        loader.domains  # noqa: B018


def test_a_domain_function_that_fails_names_the_sample():
    loader = DynamicLoader([("a", 1), ("b",)], 2, domain=lambda sample: str(sample[1]))
    with pytest.raises(ValueError, match=r"^`domain` failed on sample 1, a tuple: IndexError: tuple index out of range$"):
        loader.domains  # noqa: B018


def test_no_proportions_at_all_are_not_none():
    loader = DynamicLoader({"a": Numbers(4), "b": Numbers(4)}, 2)
    with pytest.raises(ValueError, match="`proportions` must be"):
        loader.set_proportions({})


def test_a_loader_without_domains_shows_the_three_forms():
    with pytest.raises(ValueError, match=r'domain="source"(.|\n)*domain=lambda(.|\n)*one dataset per name'):
        single().set_proportions({"a": 1})
    with pytest.raises(ValueError, match="one dataset per name"):
        DynamicLoader(Stream(5), 2, steps_per_epoch=2, domain="x")


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: DynamicLoader(Numbers(4), 0), ValueError, "`batch_size` must be at least 1, got 0"),
        (lambda: DynamicLoader(Numbers(4), 2, window=0), ValueError, "`window` must be at least 1, got 0"),
        (lambda: DynamicLoader(Stream(4), 2), ValueError, "`steps_per_epoch="),
        (lambda: DynamicLoader({"a": Numbers(4), "b": []}, 2), ValueError, "dataset 'b' is empty"),
        (lambda: DynamicLoader(iter([1, 2]), 2, steps_per_epoch=1), TypeError, "read only once"),
        (lambda: DynamicLoader(5, 2), TypeError, "neither"),
        (lambda: DynamicLoader({"a": [1]}, 2, domain="x"), ValueError, "leave out `domain="),
        (lambda: single().set_pool([]), ValueError, "between 0 and 44, got 0"),
        (lambda: single().set_pool([45]), ValueError, "between 0 and 44"),
        (lambda: streamed().set_pool([1]), TypeError, "stream"),
        (lambda: single().set_pool(np.arange(45) < 3), TypeError, "got bool. For a mask give `numpy.flatnonzero"),
        (lambda: single().set_pool([0.7, 1.9]), TypeError, "whole numbers.* got float64"),
        (lambda: DynamicLoader({}, 2), ValueError, "There is no dataset"),
        (lambda: named().set_proportions({"a": 1}), ValueError, "Missing: \\['b', 'c'\\]"),
        (lambda: DynamicLoader.from_dataloader(DataLoader(Stream(4), 2)), TypeError, "Return a `DynamicLoader`"),
        (lambda: DynamicLoader.from_dataloader(DataLoader(Numbers(4), None)), TypeError, "does not batch"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_resuming_inside_an_epoch_with_another_batch_size_is_refused():
    loader = single()
    next(iter(loader))
    with pytest.raises(ValueError, match="batches of 4 samples .* now have 10 \\(5 x 2\\)"):
        DynamicLoader(Numbers(45), 5, rank=0, world_size=2).load_state_dict(loader.state_dict())
