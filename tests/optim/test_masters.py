"""FP32 weights in two halves."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatrain.optim import join, split

floats = st.lists(st.floats(width=32, allow_nan=False), max_size=40)


@given(floats)
def test_the_halves_join_to_the_value_bit_for_bit(values: list[float]) -> None:
    value = torch.tensor(values, dtype=torch.float32)
    joined = join(*split(value))
    assert torch.equal(joined.view(torch.int32), value.view(torch.int32))


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_upper_half_survives(low: int) -> None:
    bits = (torch.arange(1 << 16, dtype=torch.int32) << 16) + low
    value = bits.view(torch.float32)
    joined = join(*split(value))
    assert torch.equal(value.isnan(), joined.isnan())
    assert torch.equal(joined.view(torch.int32)[~value.isnan()], bits[~value.isnan()])


@given(floats)
def test_the_bf16_half_is_the_value_rounded_to_nearest(values: list[float]) -> None:
    value = torch.tensor(values, dtype=torch.float32)
    high, _ = split(value)
    distance, nearest = (high.double() - value.double()).abs(), (value.to(torch.bfloat16).double() - value.double()).abs()
    assert bool(((distance == nearest) | (distance.isnan() & nearest.isnan())).all())  # inf - inf


def test_ties_go_away_from_zero() -> None:
    tie = torch.tensor([1 + 2.0**-8, -1 - 2.0**-8])
    assert split(tie)[0].tolist() == [1 + 2.0**-7, -1 - 2.0**-7]


def test_a_weight_zeroed_beside_its_low_half_reads_as_zero() -> None:
    high, low = split(torch.tensor([1.0 - 2.0**-20, -1.0 + 2.0**-20]))
    assert (low < 0).all()
    assert join(high * 0, low).tolist() == [0.0, 0.0]


def test_strides_are_kept() -> None:
    value = torch.randn(5, 3, 4, 4).to(memory_format=torch.channels_last)
    high, low = split(value)
    assert high.stride() == low.stride() == value.stride()
    assert torch.equal(join(high, low), value)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"float16.*\.float\(\)"):
        split(torch.zeros(1, dtype=torch.float16))
    with pytest.raises(TypeError, match="int16"):
        join(torch.zeros(1), torch.zeros(1, dtype=torch.int16))


def test_a_nan_stays_one_in_both_halves() -> None:
    high, low = split(torch.tensor([math.nan, 1.0]))
    assert high.isnan().tolist() == join(high, low).isnan().tolist() == [True, False]
