"""Moments in BF16 and in one byte."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatrain.optim import moments

# Every value of the noise once: what rounds by chance is then exact on average.
ALL_NOISE_16, ALL_NOISE_20 = torch.arange(1 << 16, dtype=torch.int32), torch.arange(1 << 20, dtype=torch.int32)
magnitudes = st.floats(2.0**-60, 2.0**60, width=32)
blocks = st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=1, max_size=600).map(lambda x: torch.tensor(x, dtype=torch.float32))


@given(magnitudes)
def test_bf16_moments_are_right_on_average(value: float) -> None:
    coded = moments.encode_bf16(torch.full((1 << 16,), value), ALL_NOISE_16)
    assert coded.double().mean().item() == pytest.approx(value, rel=1e-12)  # exact: the noise is uniform over the dropped bits


@pytest.mark.parametrize("share", [1.0, 0.7, 0.1, 1e-2, 3e-4])
def test_8_bit_moments_are_right_on_average(share: float) -> None:
    largest = 0.37
    block = torch.full((1 << 20,), largest * share).view(-1, 256)
    block[:, 0] = largest  # sets the scale
    noise = ALL_NOISE_20.view(256, -1).T.reshape(-1)
    for encode, decode in ((moments.encode_m, moments.decode_m), (moments.encode_v, moments.decode_v)):
        decoded = decode(*encode(block.reshape(-1), noise)).view(-1, 256)[:, 1:].double()
        step = decoded.max() - decoded.min()
        # The first of each block does not count, and has the lowest 256th of the noise: the mean may be off by 1/256 of a step.
        assert abs(decoded.mean().item() - largest * share) <= step.item() / 128 + 1e-6 * largest * share


@given(blocks)
def test_8_bit_moments_lie_within_one_step(value: Tensor) -> None:
    noise = torch.randint(0, 1 << 20, value.shape, dtype=torch.int32)
    for encode, decode, exact, unit in (
        (moments.encode_m, moments.decode_m, value, 2.0**-16),
        (moments.encode_v, moments.decode_v, value * value, 2.0**-32),
    ):
        code, scale = encode(exact, noise)
        units = (scale.double() * unit).repeat_interleave(256)[: value.numel()]
        # Three bits follow the leading one of 1 + |value| / unit: codes lie an eighth of its power of two apart.
        step = (exact.double().abs() + units) / 8
        assert bool(((decode(code, scale).double() - exact.double()).abs() <= step).all())


@given(blocks)
def test_the_largest_of_a_block_has_a_code_above_it(value: Tensor) -> None:
    noise = torch.full(value.shape, (1 << 20) - 1, dtype=torch.int32)  # rounds up
    for encode, decode, exact in ((moments.encode_m, moments.decode_m, value), (moments.encode_v, moments.decode_v, value * value)):
        largest = (exact.abs() == exact.abs().max()) & (exact.abs() > moments.LEAST)  # below that the scale does not shrink
        decoded = decode(*encode(exact, noise))[largest]
        assert bool((decoded.abs() >= exact[largest].abs() * (1 - 2.0**-23)).all())  # 1 + x is rounded once
        assert torch.equal(decoded.signbit(), exact[largest].signbit() & (decoded != 0))


@given(blocks)
def test_a_second_moment_never_becomes_zero(value: Tensor) -> None:
    square = value * value
    code, scale = moments.encode_v(square, torch.zeros(value.shape, dtype=torch.int32))
    assert bool((code > 0).all())
    assert bool((moments.decode_v(code, scale) > 0).all())


def test_small_second_moments_survive_beside_large_ones() -> None:
    root = torch.logspace(0, -4, 256)  # four orders of magnitude in one block
    v = root.square()
    decoded = moments.decode_v(*moments.encode_v(v, torch.full((256,), 1 << 19, dtype=torch.int32))).sqrt()
    assert ((decoded / root - 1).abs()[root > 1e-2]).max() < 0.1
    assert ((decoded / root).log2().abs()).max() < 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_shows_in_its_block_and_no_other(bad: float) -> None:
    value = torch.ones(600)
    value[300] = bad
    noise = torch.zeros(600, dtype=torch.int32)
    for encode, decode in ((moments.encode_m, moments.decode_m), (moments.encode_v, moments.decode_v)):
        finite = decode(*encode(value, noise)).isfinite()
        assert finite[:256].all()
        assert finite[512:].all()
        assert not finite[256:512].any()


def test_the_random_bits_are_uniform_and_differ_between_seeds() -> None:
    one, two = (moments.random_bits(seed, 0, 1 << 18) for seed in (1, 0x9E3779B1))
    for bits in (one, two):
        for half in (bits & 0xFFFF, (bits >> 16) & 0xFFFF):
            counts = torch.bincount(half >> 8, minlength=256).double()  # 1024 expected in each, standard deviation 32
            assert (counts - 1024).abs().max() < 5 * 32
    correlation = torch.corrcoef(torch.stack([one.double(), two.double()]))[0, 1]
    assert correlation.abs() < 5 / 512  # five standard deviations of 2^18 independent pairs
    assert torch.equal(moments.random_bits(1, 1000, 2000), one[1000:2000])


@pytest.mark.parametrize("share", [0.5, 0.03])
def test_what_rounds_up_varies_as_much_as_if_all_elements_were_drawn_alone(share: float) -> None:
    """Elements of a block, and equal places of two blocks, share a hash."""
    n, draws = 1 << 14, 400
    ups = torch.tensor([float(((moments.random_bits(seed * 0x9E3779B1, 0, n) & 0xFFFF) < share * 65536).sum()) for seed in range(draws)])
    expected = n * share * (1 - share)
    assert abs(ups.mean().item() - n * share) < 4 * (expected / draws) ** 0.5
    assert 0.7 < ups.var().item() / expected < 1.4  # of normal draws four standard deviations; these have a longer tail
