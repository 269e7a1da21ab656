"""When policies act."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatrain.callbacks import Schedule


def steps(last, **schedule):
    s, updates, out = Schedule(**schedule), 0, []
    for step in range(last + 1):
        if s.due(step, updates):
            updates += 1
            out.append(step)
    return out


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"warmup_steps": 2, "every_n_steps": 3}, [2, 5]),
        ({"warmup_steps": 2, "every_n_steps": 0}, [2]),
        ({"every_n_steps": 3, "max_updates": 2}, [0, 3]),
        ({"max_updates": 0}, []),
        ({"warmup_steps": 0, "every_n_steps": 0, "max_updates": 0}, []),
    ],
)
def test_zero_is_legal_everywhere(schedule, expected):
    assert steps(7, **schedule) == expected


@given(st.integers(0, 9), st.integers(0, 9), st.one_of(st.none(), st.integers(0, 9)))
def test_never_acts_in_warm_up_nor_more_than_allowed(warmup_steps, every_n_steps, max_updates):
    acted = steps(40, warmup_steps=warmup_steps, every_n_steps=every_n_steps, max_updates=max_updates)
    assert all(s >= warmup_steps for s in acted)
    assert max_updates is None or len(acted) <= max_updates


@pytest.mark.parametrize("name", ["warmup_steps", "every_n_steps", "max_updates"])
def test_a_negative_number_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"`{name}` must be zero or more, got -1"):
        Schedule(**{name: -1})
