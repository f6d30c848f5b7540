"""Measures of matrices, against scipy and against properties."""

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wellposed.errors import InvalidArgumentError
from wellposed.spectrum import (
    condition_number,
    effective_rank,
    frobenius_norm,
    product_singular_values,
    singular_values,
    spectral_norm,
    stable_rank,
)

SIZES = st.integers(1, 9)
MEASURES = [condition_number, effective_rank, frobenius_norm, singular_values, spectral_norm, stable_rank]


def random_matrices(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(m=SIZES, n=SIZES, batch=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_against_scipy(m: int, n: int, batch: int, seed: int) -> None:
    matrices = random_matrices(batch, m, n, seed=seed)
    for i, matrix in enumerate(matrices.numpy()):
        values = scipy.linalg.svdvals(matrix)
        shares = values / values.sum()
        expected = {
            singular_values: values,
            condition_number: values[0] / values[-1],
            spectral_norm: scipy.linalg.norm(matrix, 2),
            frobenius_norm: scipy.linalg.norm(matrix),
            stable_rank: (values**2).sum() / values[0] ** 2,
            effective_rank: np.exp(-(shares * np.log(shares)).sum()),
        }
        for measure, value in expected.items():
            np.testing.assert_allclose(measure(matrices)[i].numpy(), value, rtol=1e-8)


@given(m=SIZES, n=SIZES, h=SIZES, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_products_without_forming_them(m: int, n: int, h: int, seed: int) -> None:
    left, right = random_matrices(2, m, h, seed=seed), random_matrices(2, n, h, seed=seed + 1)
    values = product_singular_values(left, right)
    whole = singular_values(left @ right.mT)
    count = min(values.shape[-1], whole.shape[-1])
    torch.testing.assert_close(values[..., :count], whole[..., :count], atol=1e-10, rtol=1e-8)
    assert values[..., count:].abs().max() < 1e-10 if values.shape[-1] > count else True


@given(scale=st.sampled_from([1e-150, 1e-3, 1.0, 1e150]), n=SIZES, seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_what_does_not_depend_on_scale_or_rotation(scale: float, n: int, seed: int) -> None:
    matrix = random_matrices(n, n, seed=seed)
    turned = torch.linalg.qr(random_matrices(n, n, seed=seed + 1)).Q @ matrix * scale
    for measure in (condition_number, stable_rank, effective_rank):
        torch.testing.assert_close(measure(turned, dtype=torch.float64), measure(matrix), rtol=1e-6, atol=0.0)
    assert 1 <= stable_rank(matrix) <= n + 1e-9
    assert 1 <= effective_rank(matrix) <= n + 1e-9


def test_known_ranks() -> None:
    projection = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]))
    assert stable_rank(projection) == pytest.approx(3)
    assert effective_rank(projection) == pytest.approx(3)
    assert condition_number(projection) == torch.inf


def test_rank_deficient_matrices() -> None:
    ones = torch.ones(3, 3)
    assert condition_number(ones) == torch.inf
    assert condition_number(ones, tol=0) > 1e7
    assert condition_number(torch.diag(torch.tensor([1.0, 1e-3])), tol=0.01) == torch.inf
    assert condition_number(torch.diag(torch.tensor([1.0, 1e-3])), tol=1e-4) == pytest.approx(1e3)
    zeros = torch.zeros(2, 3)
    assert condition_number(zeros) == torch.inf
    assert stable_rank(zeros) == effective_rank(zeros) == spectral_norm(zeros) == 0


@pytest.mark.parametrize("given_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_types(given_dtype: torch.dtype, dtype: torch.dtype) -> None:
    for measure in MEASURES:
        value = measure(torch.eye(3).to(given_dtype), dtype=dtype)
        assert value.dtype == dtype
    assert condition_number(torch.eye(3).to(given_dtype)) == 1


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        (torch.ones(3), "expected"),
        (torch.ones(0, 3, 3), "none of them 0"),
        (torch.ones(3, 3, dtype=torch.int64), "floating-point"),
        (torch.full((3, 3), torch.nan), "NaN or Inf"),
        (torch.full((3, 3), torch.inf), "NaN or Inf"),
    ],
)
def test_what_has_no_singular_values(measure: object, matrices: Tensor, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        measure(matrices)  # type: ignore[operator]


def test_odd_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected torch\.float32 or torch\.float64"):
        singular_values(torch.eye(2), dtype=torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="widths 3 and 2"):
        product_singular_values(torch.ones(4, 3), torch.ones(4, 2))
