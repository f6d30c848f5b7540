"""Inverses of Cholesky factors by halves, against LAPACK's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.spectrum.cholesky import inverse_cholesky


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 70), block=st.integers(1, 20), decades=st.floats(0, 12), seed=st.integers(0, 99))
def test_by_halves_against_lapack(n: int, block: int, decades: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(2, n, n, dtype=torch.float64, generator=generator)).Q
    values = torch.logspace(0, -decades, n, dtype=torch.float64)
    matrices = (q * values) @ q.mT
    inverse, failed = inverse_cholesky((matrices + matrices.mT) / 2, block)
    assert not failed.any()
    assert (inverse.triu(1) == 0).all()
    eye = torch.eye(n, dtype=torch.float64)
    # L^-1 A L^-T = 1, to what the condition number leaves of float64
    torch.testing.assert_close(inverse @ matrices @ inverse.mT, eye.expand_as(q), rtol=0, atol=1e-14 * n * 10**decades)


@pytest.mark.parametrize("block", [3, 5, 8])
def test_says_which_are_not_positive_definite(block: int) -> None:
    matrices = torch.eye(8, dtype=torch.float64).repeat(4, 1, 1)
    matrices[1, 1, 1] = -1.0
    matrices[2, 6, 6] = 0.0
    matrices[3, 7, 0] = matrices[3, 0, 7] = 2.0
    _, failed = inverse_cholesky(matrices, block)
    assert failed.tolist() == [False, True, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 197, 768])
def test_on_a_gpu(n: int) -> None:
    x = torch.randn(5, n, 2 * n, dtype=torch.float64)
    matrices = x @ x.mT / n
    inverse, failed = inverse_cholesky(matrices.cuda())
    assert not failed.any()
    torch.testing.assert_close(inverse.cpu(), inverse_cholesky(matrices)[0])
