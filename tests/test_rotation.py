"""The linear algebra of SOAP, against einsum, torch's own decompositions and closed forms."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.optim.rotation import (
    accumulate_factor_,
    gram_schmidt_,
    power_step,
    rotated,
    rotated_back,
)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 3))
def test_rotations(shape: list[int], batch: int) -> None:
    x = torch.randn(batch, *shape, dtype=torch.float64)
    bases: list[Any] = [torch.linalg.qr(torch.randn(batch, n, n, dtype=torch.float64)).Q for n in shape]
    bases[-1] = None
    turned = rotated(x, bases)
    torch.testing.assert_close(rotated_back(turned, bases), x)
    letters = "abcd"[: len(shape)]
    for i, q in enumerate(bases[:-1]):
        x = torch.einsum(f"z{letters},z{letters[i]}e->z{letters.replace(letters[i], 'e')}", x, q)
    torch.testing.assert_close(turned, x)


def test_factors_are_moving_averages_of_outer_products() -> None:
    x, factor = torch.randn(2, 4, 3, 5), torch.randn(2, 3, 3)
    expected = 0.9 * factor + 0.1 * torch.einsum("zabc,zadc->zbd", x, x)
    accumulate_factor_(factor, x, 1, 0.9)
    torch.testing.assert_close(factor, expected)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 70), st.integers(1, 20))
def test_gram_schmidt_by_halves(n: int, block: int) -> None:
    matrices = torch.randn(2, n, n) + 3 * n**0.5 * torch.eye(n)
    ours = matrices.double()
    assert gram_schmidt_(ours, block).all()
    theirs = torch.linalg.qr(matrices.double()).Q
    torch.testing.assert_close(ours * (ours * theirs).sum(-2, keepdim=True).sign(), theirs)


@pytest.mark.parametrize("smallest", [1e-2, 1e-6, 1e-12])
def test_gram_schmidt_is_qr(smallest: float) -> None:
    """On the matrices SOAP meets: a graded factor times a basis that is nearly its own."""
    n = 300
    q = torch.linalg.qr(torch.randn(2, n, n)).Q
    factor = (q * torch.logspace(0, torch.tensor(smallest).log10().item(), n)) @ q.mT
    near = torch.linalg.qr(q + 0.05 * torch.randn(2, n, n) / n**0.5).Q
    matrix = factor @ near + 4e-6 * near
    ours = matrix.double()
    assert gram_schmidt_(ours).all()
    eye = torch.eye(n, dtype=torch.float64).expand(2, n, n)
    torch.testing.assert_close(ours.mT @ ours, eye, rtol=0, atol=1e-8)
    agreement = (ours * torch.linalg.qr(matrix).Q).sum(-2).abs()
    assert agreement.min() > 0.99


def test_gram_schmidt_says_where_it_failed() -> None:
    matrices = torch.randn(3, 5, 5)
    matrices[1, :, 2] = 0
    matrices[2] = torch.nan
    assert gram_schmidt_(matrices.double()).tolist() == [True, False, False]


def test_power_step_converges_to_the_eigenbasis() -> None:
    q = torch.linalg.qr(torch.randn(1, 12, 12, dtype=torch.float64)).Q
    values = torch.logspace(0, -3, 12, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(1, 12, 12, dtype=torch.float64)).Q
    for _ in range(200):
        basis, _ = power_step((q * values) @ q.mT, basis)
    torch.testing.assert_close((q * basis).sum(-2).abs(), torch.ones(1, 12, dtype=torch.float64))
    unmoved, _ = power_step(torch.zeros(1, 12, 12, dtype=torch.float64), basis)
    torch.testing.assert_close((unmoved * basis).sum(-2).abs(), torch.ones(1, 12, dtype=torch.float64))
