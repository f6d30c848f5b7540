"""Graying of tensors against numpy's SVD and scipy's cosine transform."""

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import wellposed as wp
from wellposed.bench.graying import gray_by_svd
from wellposed.cli import main
from wellposed.errors import InvalidArgumentError
from wellposed.graying import spectral
from wellposed.graying.cosine import dct2, gray_by_cosines, inverse_dct2
from wellposed.graying.products import gray_by_products
from wellposed.graying.rational import floored_power
from wellposed.spectrum import extremes

KINDS = ["svd", "dct"]


@pytest.fixture(params=["by eigenvalues", "by products"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest singular value as the CPU finds it, and as a GPU does, on the CPU."""
    if request.param == "by products":
        by_products = lambda gram: extremes._top_by_products(gram, squarings=14, steps=8)  # noqa: E731
        monkeypatch.setattr(spectral, "largest_eigenvalue", by_products)


def matrices(*shape: int, decades: float = 0.0, seed: int = 0) -> Tensor:
    """Matrices whose singular values fall over so many decades."""
    generator = torch.Generator().manual_seed(seed)
    left, _, right = torch.linalg.svd(torch.randn(shape, dtype=torch.float64, generator=generator), full_matrices=False)
    return left * torch.logspace(0, -decades, min(shape[-2:]), dtype=torch.float64) @ right


def by_svd(X: Tensor, eps: float, tol: float) -> Tensor:
    """The definition."""
    U, S, Vt = np.linalg.svd(X.double().numpy(), full_matrices=False)
    largest = S[..., :1]
    return torch.from_numpy((U * (S * np.maximum(S / largest, tol) ** (eps - 1))[..., None, :]) @ Vt)


def by_dctn(X: Tensor, eps: float, tol: float) -> Tensor:
    """The definition; what lies below the floor is raised as if it lay there."""
    coefficients = scipy.fft.dctn(X.double().numpy(), axes=(-2, -1), norm="ortho")
    largest = np.abs(coefficients).max((-2, -1), keepdims=True)
    shares = np.abs(coefficients) / largest
    grayed = np.sign(coefficients) * np.where(shares < tol, shares * tol ** (eps - 1), shares**eps) * largest
    return torch.from_numpy(scipy.fft.idctn(grayed, axes=(-2, -1), norm="ortho"))


# --- the singular values


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    decades=st.floats(0, 8),
    eps=st.sampled_from([0.5, 0.6, 0.7, 0.9, 0.999]),
    tol=st.sampled_from([1e-3, 3e-3, 1e-2]),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
    seed=st.integers(0, 99),
)
def test_svd_is_the_definition_to_the_stated_tolerance(
    rows: int, columns: int, decades: float, eps: float, tol: float, scale: float, seed: int
) -> None:
    X = scale * matrices(2, rows, columns, decades=decades, seed=seed)
    expected, grayed = by_svd(X, eps, tol), wp.gray(X, "svd", eps, tol=tol)
    largest = torch.linalg.svdvals(X)[:, 0]
    assert (torch.linalg.matrix_norm(grayed - expected, 2) <= 1.05e-3 * largest).all()
    values, exact = torch.linalg.svdvals(grayed), torch.linalg.svdvals(expected)
    assert ((values - exact).abs() <= 1.1e-2 * exact + 1e-12 * scale).all()


@pytest.mark.parametrize(("eps", "of_largest", "of_own"), [(0.3, 3e-3, 3e-2), (0.4, 3e-3, 3e-2), (0.05, 1.5e-2, 3e-2)])
@pytest.mark.parametrize("tol", [1e-3, 3e-3, 1e-2])
def test_small_eps(eps: float, of_largest: float, of_own: float, tol: float) -> None:
    X = matrices(50, 60, decades=5)
    expected, grayed = by_svd(X, eps, tol), wp.gray(X, "svd", eps, tol=tol)
    assert torch.linalg.matrix_norm(grayed - expected, 2) <= of_largest
    torch.testing.assert_close(torch.linalg.svdvals(grayed), torch.linalg.svdvals(expected), rtol=of_own, atol=0)


@pytest.mark.parametrize("shape", [(196, 768), (300, 48)])
@pytest.mark.parametrize("decades", [0, 1, 3, 8])
def test_svd_at_the_sizes_of_models(shape: tuple[int, int], decades: int, way: None) -> None:
    X = matrices(2, *shape, decades=decades)
    error = torch.linalg.matrix_norm(wp.gray(X, "svd") - by_svd(X, 0.7, 1e-3), 2)
    assert (error < 1e-3).all()


def test_condition_number_is_the_power() -> None:
    X = matrices(20, 30, decades=2)
    values = torch.linalg.svdvals(wp.gray(X, "svd", 0.5))
    assert float(values[0] / values[-1]) == pytest.approx(10, rel=0.02)


def test_few_poles_by_default() -> None:
    """Each one is a Cholesky decomposition, and what graying costs."""
    assert len(floored_power(0.7, 1e-3).poles) <= 5


# --- the cosine transform


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 33), columns=st.integers(1, 33), eps=st.floats(0.05, 1), seed=st.integers(0, 99))
@example(rows=2, columns=26, eps=0.5, seed=26)  # a coefficient below the floor
def test_dct_is_the_definition(rows: int, columns: int, eps: float, seed: int) -> None:
    X = torch.randn(2, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(wp.gray(X, "dct", eps, tol=1e-12), by_dctn(X, eps, 1e-12), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(wp.gray(X, "dct", eps), by_dctn(X, eps, 1e-6), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 4), (5, 1), (2, 2), (2, 3), (3, 2), (8, 49), (49, 8), (196, 768)], ids=str
)
def test_cosine_transform_against_scipy(shape: tuple[int, int]) -> None:
    x = torch.randn(3, *shape, dtype=torch.float64)
    torch.testing.assert_close(dct2(x), torch.from_numpy(scipy.fft.dctn(x.numpy(), axes=(1, 2), norm="ortho")))
    torch.testing.assert_close(inverse_dct2(dct2(x)), x)
    single = x.float()
    torch.testing.assert_close(dct2(single), dct2(single.double()).float(), rtol=1e-5, atol=1e-5)


def test_dct_floor() -> None:
    coefficients = torch.tensor([[1.0, 1e-4], [-1e-6, 0.0]], dtype=torch.float64)
    grayed = dct2(wp.gray(inverse_dct2(coefficients), "dct", 0.5, tol=1e-4))
    expected = torch.tensor([[1.0, 1e-2], [-1e-4, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(grayed, expected, rtol=1e-9, atol=1e-14)


# --- both


@pytest.mark.parametrize("kind", KINDS)
def test_eps_1_is_the_input_itself(kind: str) -> None:
    X = torch.randn(3, 4)
    assert wp.gray(X, kind, 1) is X


@pytest.mark.parametrize("kind", KINDS)
def test_defaults(kind: str) -> None:
    X, eps, tol = torch.randn(3, 4), *{"svd": (0.7, 1e-3), "dct": (0.95, 1e-6)}[kind]
    assert torch.equal(wp.gray(X, kind), wp.gray(X, kind, eps, tol=tol))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_and_autocast(kind: str, dtype: torch.dtype) -> None:
    X = matrices(6, 8, decades=1).to(dtype)
    exact = wp.gray(X.double(), kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grayed = wp.gray(X, kind)
    assert grayed.dtype == dtype
    torch.testing.assert_close(grayed.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_batches(kind: str, way: None) -> None:
    X = torch.randn(2, 3, 5, 4)
    each = torch.stack([wp.gray(x, kind) for x in X.flatten(0, 1)]).unflatten(0, (2, 3))
    torch.testing.assert_close(wp.gray(X, kind), each)
    torch.testing.assert_close(wp.gray(1e-3 * X, kind), 1e-3 * each)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (3, 3)])
def test_gradcheck(kind: str, shape: tuple[int, int], way: None) -> None:
    X = matrices(2, *shape, decades=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: wp.gray(x, kind, 0.6), X)


def test_second_derivative() -> None:
    X = matrices(3, 4, decades=1).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: wp.gray(x, "svd", 0.6), X)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "X",
    [torch.zeros(4, 6), torch.eye(5), torch.ones(4, 6), torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0]))],
    ids=["zeros", "all equal", "rank one", "repeated and zero"],
)
def test_gradients_are_finite_everywhere(kind: str, X: Tensor, way: None) -> None:
    X = X.clone().requires_grad_()
    grayed = wp.gray(X, kind, 0.5)
    (grayed * torch.randn_like(grayed)).sum().backward()
    assert grayed.isfinite().all()
    assert X.grad is not None
    assert X.grad.isfinite().all()
    if not X.any():
        assert not grayed.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch 2.11, of itself
def test_compile(kind: str) -> None:
    X = torch.randn(2, 5, 8, requires_grad=True)
    compiled = torch.compile(lambda x: wp.gray(x, kind), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), wp.gray(X, kind))
    gradient = torch.autograd.grad(compiled(X).square().sum(), X)
    torch.testing.assert_close(gradient, torch.autograd.grad(wp.gray(X, kind).square().sum(), X))


@pytest.mark.parametrize("eps", [0, -0.1, 1.01, float("nan"), "0.5"])
def test_eps_out_of_range(eps: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"eps=.*above 0 and at most 1"):
        wp.gray(torch.ones(2, 2), "svd", eps)


@pytest.mark.parametrize("tol", [0, 1e-5, 0.5, float("nan")])
def test_tol_out_of_range(tol: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"tol=.*from 0\.001 to 0\.01"):
        wp.gray(torch.ones(2, 2), "svd", 0.5, tol=tol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_input_that_is_no_number(kind: str, bad: float) -> None:
    with pytest.raises(InvalidArgumentError, match="NaN or Inf"):
        wp.gray(torch.tensor([[1.0, bad]]), kind)


def test_other_refusals() -> None:
    with pytest.raises(InvalidArgumentError, match="expected 'svd' or 'dct'"):
        wp.gray(torch.ones(2, 2), "fft")
    for X in (torch.ones(3), torch.ones(2, 0), torch.ones(2, 2, dtype=torch.int64), [[1.0]]):
        with pytest.raises(InvalidArgumentError, match="floating-point matrices"):
            wp.gray(X, "svd")


def test_bench_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--model", "vit_tiny_patch16_224", "--batch-size", "2", "--svd-images", "1", "--repeats", "1"]
    assert main(["bench", "graying", *small, "--no-compile", "--device", "cpu"]) == 0
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert {"training step, svd", "gray alone, dct", "torch.linalg.svd, float32"} <= set(rows)


def test_the_baseline_of_the_benchmark_is_the_definition() -> None:
    X = matrices(2, 6, 9, decades=4)
    torch.testing.assert_close(gray_by_svd(X), by_svd(X, 0.7, 1e-3))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str) -> None:
    X = matrices(4, 196, 768, decades=3).float()
    torch.testing.assert_close(wp.gray(X.cuda(), kind).cpu(), wp.gray(X, kind), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("scale", "of_gradient"), [(1e-30, 1.0), (1.0, 1.0), (1e30, 1.0), (1.0, 1e-30), (1.0, 1e30)])
def test_products_of_float16_are_as_good_as_bfloat16(scale: float, of_gradient: float) -> None:
    X = (scale * matrices(3, 49, 96, decades=2)).float().requires_grad_()
    above = of_gradient * torch.randn(X.shape, generator=torch.Generator().manual_seed(1))
    ours, right = gray_by_products(X, 0.95, 1e-6), gray_by_cosines(X.double(), 0.95, 1e-6)
    assert (ours - right).norm() < 2e-3 * right.norm()
    gradients = [torch.autograd.grad((y * above.to(y.dtype)).sum(), X)[0] for y in (ours, right)]
    with torch.autocast("cpu", dtype=torch.bfloat16):  # not there
        gradients += torch.autograd.grad((gray_by_products(X, 0.95, 1e-6) * above).sum(), X)
    for gradient in (gradients[0], gradients[2]):
        assert (gradient - gradients[1]).double().norm() < 3e-3 * gradients[1].double().norm()


def test_products_of_float16_with_zeros_alone_and_under_vmap() -> None:
    X = matrices(3, 6, 9, decades=1).float()
    X[1] = 0
    grayed = gray_by_products(X, 0.95, 1e-6)
    assert grayed[1].eq(0).all()
    assert torch.equal(grayed[2], gray_by_products(X[2], 0.95, 1e-6))
    torch.testing.assert_close(torch.func.vmap(lambda one: gray_by_products(one, 0.95, 1e-6))(X), grayed)


@pytest.mark.gpu
def test_autocast_on_a_gpu() -> None:
    X = matrices(4, 196, 768, decades=3).float().cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        rough, precise = wp.gray(X, "dct"), wp.gray(X, "dct", 0.5)
    assert torch.equal(rough, gray_by_products(X, 0.95, 1e-6))
    assert torch.equal(precise, wp.gray(X, "dct", 0.5))
    assert not torch.equal(rough, wp.gray(X, "dct"))
    of_rounded = wp.gray(X.bfloat16(), "dct").float()
    torch.testing.assert_close(of_rounded, wp.gray(X, "dct"), rtol=0, atol=0.02 * float(X.abs().max()))


@pytest.mark.parametrize("scale", [1e-170, 1e155])
def test_float64_of_any_size(scale: float) -> None:
    x = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(wp.gray(scale * x, "svd") / scale, wp.gray(x, "svd"), rtol=1e-9, atol=0)


@pytest.mark.parametrize("eps", [0.7, 0.95])
@pytest.mark.parametrize("kind", KINDS)
def test_on_the_meta_device(kind: str, eps: float) -> None:
    assert wp.gray(torch.randn(2, 6, 9, device="meta"), kind, eps).shape == (2, 6, 9)


def test_under_vmap() -> None:
    x = torch.randn(3, 6, 9, dtype=torch.float64)
    for kind in ("svd", "dct"):
        torch.testing.assert_close(torch.func.vmap(lambda one, kind=kind: wp.gray(one, kind))(x), wp.gray(x, kind))
