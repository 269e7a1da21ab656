"""A wrapped DataLoader in which nothing is decided: its own order, over epochs, and again after a resume."""

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from lightning_megatrain.datamodules import DynamicLoader
from tests.datamodules.test_dynamic_loader import Numbers, single, streamed, values

EPOCHS, STEPS = 3, 6


def shuffled(**kwargs):
    """The sampler and the workers' seeds draw from one generator, as `DataLoader(shuffle=True, generator=...)` has it."""
    return DataLoader(Numbers(23), 4, shuffle=True, generator=torch.Generator().manual_seed(7), **kwargs)


def replaced(**kwargs):
    """Draws numbers all through the epoch, 32 at a time."""
    sampler = RandomSampler(Numbers(92), replacement=True, generator=torch.Generator().manual_seed(7))
    return DataLoader(Numbers(92), 16, sampler=sampler, generator=sampler.generator, **kwargs)


orders = pytest.mark.parametrize("make", [shuffled, replaced])
workers = pytest.mark.parametrize("kwargs", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])


@orders
@workers
def test_every_epoch_is_that_of_the_plain_loader(make, kwargs):
    plain, wrapped = make(**kwargs), DynamicLoader.from_dataloader(make(**kwargs))
    assert [values(wrapped) for _ in range(EPOCHS)] == [values(plain) for _ in range(EPOCHS)]


@orders
@workers
@pytest.mark.parametrize("stop", [1, 5, 6, 7, 12])
def test_after_a_resume_the_later_epochs_are_right_too(make, kwargs, stop):
    whole, expected = DynamicLoader.from_dataloader(make(**kwargs)), []
    for _ in range(EPOCHS):
        for batch in whole:
            expected.append(batch.tolist())
            if len(expected) == stop:
                state = whole.state_dict()
    resumed = DynamicLoader.from_dataloader(make(**kwargs))
    resumed.load_state_dict(state)
    got = [values(resumed) for _ in range(EPOCHS - stop // STEPS)]
    assert sum(got, []) == expected[stop:]


@pytest.mark.parametrize("make", [single, lambda **kwargs: DynamicLoader.from_dataloader(shuffled(), **kwargs)])
def test_another_seed_leaves_out_and_repeats_nothing(make, recwarn):
    whole = make(seed=1)
    whole.set_pool(range(20))
    first, expected = [], []
    for number, batch in enumerate(whole):
        (first if number < 3 else expected).append(batch.tolist())
        if number == 2:
            state = whole.state_dict()
    resumed = make(seed=2)
    resumed.load_state_dict(state)
    assert values(resumed) == expected
    said = [str(w.message) for w in recwarn if "the checkpoint's order, of seed 1" in str(w.message)]
    assert len(said) == 1
    later = make(seed=1)
    later.load_state_dict(resumed.state_dict())
    assert values(later) == values(resumed)


def test_another_seed_of_streams_is_refused():
    with pytest.raises(ValueError, match="saved with seed 1, and this loader has seed 2.*Use seed 1 to resume"):
        streamed(seed=2).load_state_dict(streamed(seed=1).state_dict())
