"""The random matrices of the conditioned initialization, against scipy and against their definitions."""

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import init

from wellposed.skipless.initializers import query_key_factors, semi_orthogonal, suo_scale, top_right_singular_vectors

sizes = st.integers(1, 24).flatmap(lambda d: st.tuples(st.just(d), st.integers(1, d)))


@settings(deadline=None, max_examples=50)
@given(sizes, st.floats(0.01, 10), st.floats(0, 10), st.integers(0, 2**31))
def test_factors_are_the_truncated_svd_of_m(size: tuple[int, int], alpha: float, beta: float, seed: int) -> None:
    d, h = size
    w_q, w_k = query_key_factors(2, d, h, alpha, beta, generator=torch.Generator().manual_seed(seed))
    z = torch.randn(2, d, d, generator=torch.Generator().manual_seed(seed)).double().numpy() / np.sqrt(d)
    for m, q, k in zip(alpha * z + beta * np.eye(d), w_q.numpy(), w_k.numpy(), strict=True):
        s = scipy.linalg.svdvals(m)
        close = {"rtol": 0, "atol": 1e-7 * s[0]}
        np.testing.assert_allclose(q.T @ q, np.diag(s[:h]), **close)
        np.testing.assert_allclose(k.T @ k, np.diag(s[:h]), **close)
        # Eckart and Young: the best approximation of rank h, and no other, is this close
        rest = scipy.linalg.svdvals(m - q @ k.T)
        np.testing.assert_allclose(rest[: d - h], s[h:], **close)
        np.testing.assert_allclose(rest[d - h :], 0, **close)


def test_z_has_variance_one_over_d() -> None:
    w_q, w_k = query_key_factors(4, 100, 100, alpha=2.0, beta=0.5)
    m = w_q @ w_k.mT
    assert (m - 0.5 * torch.eye(100)).var().item() == pytest.approx(4.0 / 100, rel=0.03)
    assert m.diagonal(dim1=1, dim2=2).mean().item() == pytest.approx(0.5, abs=0.05)


def test_heads_are_drawn_independently() -> None:
    w_q, w_k = query_key_factors(2, 64, 64, alpha=1.0, beta=0.0)
    first, second = (w_q @ w_k.mT).flatten(1)
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1].item()) < 0.05


def test_singular_vectors_at_the_width_of_a_real_model() -> None:
    m = 2 * torch.randn(768, 768, dtype=torch.float64) / 768**0.5 + 0.6 * torch.eye(768)
    v = top_right_singular_vectors(m, 64)
    u, s, vt = scipy.linalg.svd(m.numpy())
    best = (u[:, :64] * s[:64]) @ vt[:64]
    np.testing.assert_allclose((m @ v @ v.mT).numpy(), best, atol=1e-10)
    np.testing.assert_allclose(torch.linalg.vector_norm(m @ v, dim=0).numpy(), s[:64], rtol=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40))
def test_semi_orthogonal(rows: int, columns: int) -> None:
    values = torch.linalg.svdvals(semi_orthogonal(rows, columns, dtype=torch.float64))
    torch.testing.assert_close(values, torch.ones_like(values))


def test_semi_orthogonal_is_torchs_own_for_the_same_draw() -> None:
    for rows, columns in ((5, 3), (3, 3), (3, 5)):
        ours = semi_orthogonal(rows, columns, generator=torch.Generator().manual_seed(4))
        gaussian = torch.randn(max(rows, columns), min(rows, columns), generator=torch.Generator().manual_seed(4))
        if rows >= columns:  # torch draws a wide matrix wide and transposes it, so only the tall draws agree
            theirs = init.orthogonal_(torch.empty(rows, columns), generator=torch.Generator().manual_seed(4))
            torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close((ours if rows >= columns else ours.T) @ _triangle(gaussian), gaussian)


def test_semi_orthogonal_is_uniform_in_sign() -> None:
    traces = torch.stack([semi_orthogonal(8, 8).trace() for _ in range(400)])
    assert abs(traces.mean().item()) < 0.2, "the trace of a uniform orthogonal matrix has mean 0 and variance 1"
    assert traces.var().item() == pytest.approx(1.0, rel=0.3)


@pytest.mark.parametrize(("rows", "columns", "scale"), [(3072, 768, 2.0), (768, 3072, 1.0), (64, 64, 1.0)])
def test_suo_scale(rows: int, columns: int, scale: float) -> None:
    assert suo_scale(rows, columns) == pytest.approx(scale)


def _triangle(gaussian: torch.Tensor) -> torch.Tensor:
    r = torch.linalg.qr(gaussian).R
    return r * r.diagonal().sign()[:, None]
