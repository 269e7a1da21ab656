"""Random projections keep inner products, and their signs are what they claim to be."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatrain.model_ops import GradientSettings
from lightning_megatrain.model_ops.per_sample import Explicit, Lookups, OuterProducts, Sum, Zeros, summed
from lightning_megatrain.model_ops.projection import Projection
from lightning_megatrain.model_ops.signs import key_of, rademacher


def splitmix64(counter: int, key: int) -> int:
    """The generator in Python's own integers."""
    mask = 2**64 - 1
    z = ((counter + 1) * 0x9E3779B97F4A7C15 + key) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(row=st.integers(0, 2**40), columns=st.integers(1, 200), seed=st.integers(0, 2**31))
def test_signs_are_the_bits_of_splitmix64(row: int, columns: int, seed: int) -> None:
    key, words = key_of(seed), -(-columns // 64)
    bits = [splitmix64(row * words + column // 64, key) >> column % 64 & 1 for column in range(columns)]
    assert rademacher(key, torch.tensor([row]), columns).tolist() == [[1.0 - 2 * bit for bit in bits]]


def test_any_block_of_a_sign_matrix_is_the_same_alone() -> None:
    whole = rademacher(key_of(0, "name"), torch.arange(50), 100)
    rows = torch.tensor([49, 3, 3, 17])
    assert torch.equal(rademacher(key_of(0, "name"), rows, 100), whole[rows])
    assert set(whole.unique().tolist()) == {-1.0, 1.0}


def test_signs_are_the_same_in_every_version() -> None:
    """Stored features stay comparable."""
    signs = rademacher(key_of(7, "model.weight", "dense"), torch.arange(64), 256)
    assert hashlib.sha256((signs > 0).numpy().tobytes()).hexdigest() == "1290637ab34666163b8801f18a12dab3240ef051788584542ee9d59c84eea484"


@pytest.mark.parametrize("parts", [(0, "a", "rows"), (1, "a", "rows"), (0, "b", "rows"), (0, "a", "columns")])
def test_signs_look_fair_and_independent(parts: tuple[object, ...]) -> None:
    """Means, and correlations of columns, rows and matrices, are within five standard deviations of zero."""
    n = 512
    signs = rademacher(key_of(*parts), torch.arange(n), n)
    other = rademacher(key_of(*parts, "other"), torch.arange(n), n)
    assert signs.mean().abs() < 5 / n
    for product in (signs.T @ signs, signs @ signs.T):
        off = product[~torch.eye(n, dtype=torch.bool)] / n
        assert off.abs().max() < 6 / n**0.5  # the largest of 2^18 normal numbers is near 5
        assert off.square().mean().sqrt() == pytest.approx(1 / n**0.5, rel=0.02)
    assert (signs * other).mean().abs() < 5 / n


def features_of(matrices: Tensor, projection: Projection) -> Tensor:
    """Projects matrices (N, R, C) as gradients of one parameter."""
    features = torch.zeros(len(matrices), projection.width, dtype=matrices.dtype)
    projection.add(features, "weight", tuple(matrices.shape[1:]), Explicit(slice(0, len(matrices)), matrices), None)  # type: ignore[arg-type]
    return features


def relative_errors(pair: Tensor, kind: str, width: int, seeds: int) -> Tensor:
    """(estimate - true) / (|x| |y|) of the inner product of two matrices, for each seed."""
    true, scale = (pair[0] * pair[1]).sum(), pair[0].norm() * pair[1].norm()
    estimates = torch.stack([features_of(pair, Projection(width, kind, seed)).prod(0).sum() for seed in range(seeds)])  # type: ignore[arg-type]
    return (estimates - true) / scale


@settings(max_examples=10)
@given(data=st.integers(0, 2**31))
def test_dense_inner_products_are_unbiased_with_the_johnson_lindenstrauss_variance(data: int) -> None:
    generator = torch.Generator().manual_seed(data)
    pair = torch.randn(2, 8, 6, generator=generator, dtype=torch.float64)
    pair[1] += pair[0]
    width, seeds = 64, 200
    errors = relative_errors(pair, "dense", width, seeds)
    cosine = (pair[0] * pair[1]).sum() / pair[0].norm() / pair[1].norm()
    bound = ((1 + cosine**2) / width) ** 0.5
    assert errors.mean().abs() < 5 * bound / seeds**0.5
    assert errors.std() < bound * (1 + 5 / (2 * seeds) ** 0.5)  # a standard deviation of n normal numbers varies by 1 / sqrt(2n)


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_factored_inner_products_are_unbiased_with_the_stated_variance(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    matrix = torch.randn(12, rank, generator=generator, dtype=torch.float64) @ torch.randn(
        rank, 10, generator=generator, dtype=torch.float64
    )
    width, seeds = 256, 400
    errors = relative_errors(torch.stack([matrix, matrix]), "factored", width, seeds)
    k_r, k_c = Projection(width).sides
    bound = ((1 + 2 / k_r) * (1 + 2 / k_c) - 1) ** 0.5
    # The square of a product of two chi-squares has heavy tails: its variance is known to about 15 % from 400 draws.
    assert errors.mean().abs() < 5 * bound / seeds**0.5
    assert errors.std() < 1.2 * bound
    assert rank > 1 or errors.std() > 0.4 * bound


def test_parameters_do_not_leak_into_each_other() -> None:
    """The features of two parameters are independent: the inner product of one's with the other's is zero on average."""
    x, errors = torch.randn(1, 8, 8), []
    for seed in range(300):
        features = torch.zeros(2, 64)
        for row, name in enumerate(("a", "b")):
            Projection(64, "factored", seed).add(features, name, (8, 8), Explicit(slice(row, row + 1), x), None)
        errors.append(features.prod(0).sum() / x.norm() ** 2)
    deviation = torch.stack(errors).std()
    assert torch.stack(errors).mean().abs() < 5 * deviation / 300**0.5
    assert deviation < 3 / 64**0.5


@pytest.mark.parametrize("kind", ["dense", "factored"])
def test_factors_lookups_and_whole_gradients_project_alike(kind: str) -> None:
    torch.manual_seed(0)
    left, right, ids = torch.randn(3, 4, 11), torch.randn(3, 4, 6), torch.randint(11, (3, 4))
    outer, lookups = OuterProducts(slice(0, 3), left, right), Lookups(slice(0, 3), ids, right)
    onehot = torch.nn.functional.one_hot(ids, 11).float()
    projection = Projection(36, kind)  # type: ignore[arg-type]
    for gradients, whole in ((outer, left.mT @ right), (lookups, onehot.mT @ right), (Sum([outer, lookups]), (left + onehot).mT @ right)):
        found = torch.zeros(3, 36)
        projection.add(found, "weight", (11, 6), gradients, None)
        torch.testing.assert_close(found, features_of(whole, projection), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "factored"])
@pytest.mark.parametrize("limit", [1, 50, 700])
def test_the_size_of_blocks_changes_nothing(kind: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_megatrain.model_ops import projection as module

    matrices = torch.randn(3, 11, 6, dtype=torch.float64)
    projection = Projection(36, kind)  # type: ignore[arg-type]
    whole = features_of(matrices, projection)
    monkeypatch.setattr(module, "MAX_ELEMENTS", limit)
    torch.testing.assert_close(features_of(matrices, projection), whole)


def test_sums_of_parts_of_single_samples_are_assembled() -> None:
    parts = [Explicit(slice(i % 3, i % 3 + 1), torch.full((1, 2, 1), float(i))) for i in range(6)]
    total = summed(parts, 3)  # type: ignore[arg-type]
    assert total.block(torch.arange(2), slice(0, 1)).squeeze(-1).tolist() == [[3, 3], [5, 5], [7, 7]]
    assert Zeros(slice(0, 2), torch.zeros(1)).block(torch.arange(2), slice(0, 3)).shape == (2, 2, 3)


@pytest.mark.parametrize(("width", "sides"), [(4096, (64, 64)), (8192, (64, 128)), (1024, (32, 32)), (36, (6, 6)), (2, (1, 2))])
def test_a_width_is_split_into_like_factors(width: int, sides: tuple[int, int]) -> None:
    assert Projection(width).sides == sides


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"width=4099 does not split .* Use width=4096"):
        GradientSettings(width=4099)
    assert GradientSettings(width=4099, projection="dense").width == 4099
    with pytest.raises(ValueError, match="width=0"):
        GradientSettings(width=0)
    with pytest.raises(ValueError, match="neither 'factored' nor 'dense'"):
        GradientSettings(projection="sparse")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="neither None nor 'adam'"):
        GradientSettings(preconditioner="adamw")
    with pytest.raises(TypeError, match="must be a sequence of patterns"):
        GradientSettings(parameters="*.mlp.*")  # type: ignore[arg-type]
    assert GradientSettings(parameters=["a"]) == GradientSettings(parameters=("a",))  # type: ignore[arg-type]
