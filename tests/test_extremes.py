"""Extreme singular values by products alone against LAPACK's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wellposed.errors import InvalidArgumentError
from wellposed.spectrum import extreme_singular_values, extreme_singular_values_of_product, extremes
from wellposed.spectrum.extremes import resolution


@pytest.fixture(params=["by eigenvalues", "by products"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the CPU, and that of a GPU taken on the CPU."""
    if request.param == "by products":
        monkeypatch.setattr(extremes, "_ends_by_eigenvalues", extremes._ends_by_products)


def random(*shape: int, decades: float = 0.0, seed: int = 0) -> Tensor:
    """Matrices whose singular values fall over so many decades."""
    generator = torch.Generator().manual_seed(seed)
    left, _, right = torch.linalg.svd(torch.randn(shape, dtype=torch.float64, generator=generator), full_matrices=False)
    return left * torch.logspace(0, -decades, min(shape[-2:]), dtype=torch.float64) @ right


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    decades=st.floats(0, 5.5),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
    seed=st.integers(0, 99),
)
def test_by_products_against_lapack(rows: int, columns: int, decades: float, scale: float, seed: int) -> None:
    matrices = scale * random(3, rows, columns, decades=decades, seed=seed)
    values = torch.linalg.svdvals(matrices)
    largest, smallest = extremes._extremes(extremes.gram_matrices(matrices), extremes._ends_by_products)
    torch.testing.assert_close(largest, values[..., 0], rtol=5e-3, atol=0)
    torch.testing.assert_close(smallest, values[..., -1], rtol=5e-3, atol=0)
    assert (largest <= values[..., 0] * (1 + 1e-9)).all()


@pytest.mark.parametrize("spread", [1e-4, 1e-3, 1e-2])
def test_singular_values_close_to_each_other(spread: float, way: None) -> None:
    left, _, right = torch.linalg.svd(torch.randn(50, 60, dtype=torch.float64), full_matrices=False)
    values = torch.ones(50, dtype=torch.float64)
    values[0], values[-1] = 1 + spread, 1 - spread
    largest, smallest = extreme_singular_values(left * values @ right)
    assert float(largest) == pytest.approx(1 + spread, rel=2e-3)
    assert float(smallest) == pytest.approx(1 - spread, rel=2e-3)


def test_singular_matrices(way: None) -> None:
    largest, smallest = extreme_singular_values(torch.ones(2, 3, 4, dtype=torch.float64))
    torch.testing.assert_close(largest, torch.full((2,), 12.0, dtype=torch.float64).sqrt())
    assert (smallest == 0).all()
    assert [float(end) for end in extreme_singular_values(torch.zeros(3, 4, dtype=torch.float64))] == [0, 0]
    below = torch.diag(torch.tensor([1.0, 0.5 * resolution(2)], dtype=torch.float64))
    assert float(extreme_singular_values(below)[1]) == 0


def test_of_a_product(way: None) -> None:
    left, right = random(5, 30, 6, decades=1, seed=1), random(5, 24, 6, decades=2, seed=2)
    values = torch.linalg.svdvals(left @ right.mT)
    largest, smallest = extreme_singular_values_of_product(left, right)
    torch.testing.assert_close(largest, values[:, 0], rtol=5e-3, atol=0)
    torch.testing.assert_close(smallest, values[:, 5], rtol=5e-3, atol=0)


def test_of_a_product_with_a_column_twice(way: None) -> None:
    left, right = random(2, 30, 6), random(2, 24, 6, seed=1)
    left[0, :, 1] = left[0, :, 0]
    values = torch.linalg.svdvals(left @ right.mT)
    largest, smallest = extreme_singular_values_of_product(left, right)
    torch.testing.assert_close(largest, values[:, 0], rtol=5e-3, atol=0)
    assert smallest[0] == 0
    assert float(smallest[1]) == pytest.approx(float(values[1, 5]), rel=5e-3)


def test_of_a_wide_product() -> None:
    left, right = random(8, 12, seed=1), random(9, 12, seed=2)
    values = torch.linalg.svdvals(left @ right.mT)
    largest, smallest = extreme_singular_values_of_product(left, right)
    torch.testing.assert_close(torch.stack([largest, smallest]), values[[0, 7]])


def test_refusals() -> None:
    with pytest.raises(InvalidArgumentError, match="widths 3 and 4"):
        extreme_singular_values_of_product(torch.ones(5, 3), torch.ones(5, 4))
    with pytest.raises(InvalidArgumentError, match="NaN or Inf"):
        extreme_singular_values(torch.full((2, 2), torch.nan))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    matrices = torch.randn(64, 197, 768) * torch.logspace(0, -2, 768)
    values = torch.linalg.svdvals(matrices.double())
    largest, smallest = (end.cpu() for end in extreme_singular_values(matrices.cuda()))
    torch.testing.assert_close(largest, values[:, 0], rtol=5e-3, atol=0)
    torch.testing.assert_close(smallest, values[:, -1], rtol=5e-3, atol=0)
