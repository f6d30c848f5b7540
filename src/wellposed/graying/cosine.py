"""DCT graying: X^ = D X D^T, each coefficient x becomes x (|x| / max|x|)^(eps - 1), and back.

D is the orthonormal cosine transform, here by FFT: as a product with D itself it would take 148 GFLOP for 256 images of
196 x 768, several milliseconds of float32 on a GPU. Where less precision will do, see `graying/products.py`.
"""

from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor


def gray_by_cosines(x_BND: Tensor, eps: float, tol: float) -> Tensor:
    """Each matrix of `x_BND` with the coefficients of its 2-D cosine transform raised to the power eps.

    The largest coefficient stays as it is. A coefficient below `tol` of it counts as that in |x| / max|x|, which keeps
    the gradient finite at 0.
    """
    coefficients_BND = dct2(x_BND)
    return inverse_dct2(raised(coefficients_BND, largest_of(coefficients_BND), eps, tol))


def largest_of(x_BND: Tensor) -> Tensor:
    """The largest size of an entry of each matrix, (..., 1, 1), or 1 where there are only zeros."""
    largest = x_BND.abs().amax((-2, -1), keepdim=True)
    return largest.where(largest > 0, 1.0)


def raised(coefficients_BND: Tensor, largest: Tensor, eps: float, tol: float) -> Tensor:
    """Each coefficient c as c max(|c| / largest, tol)^(eps - 1)."""
    shares_BND = coefficients_BND.abs() / largest
    # A power by exp2 and log2 is a few instructions on a GPU, and a compiler may work it out for each of its four uses.
    return coefficients_BND * torch.exp2((eps - 1) * torch.log2(shares_BND.clamp(min=tol)))


def dct2(x: Tensor) -> Tensor:
    """The orthonormal 2-D DCT-II of each matrix (..., n, m).

    With v the even rows and columns of x followed by the odd ones in reverse, V its Fourier transform and
    P_jk = exp(-i pi j / 2n) exp(-i pi k / 2m) V_jk, the cosine coefficients C are, up to their norms (Makhoul 1980),

        Re P_jk = C_jk - C_n-j,m-k,    -Im P_jk = C_n-j,k + C_j,m-k,    C_n. = C_.m = 0,

    so that 2 C_jk = Re P_jk - Im P_n-j,k and 2 C_j,m-k = -Im P_jk - Re P_n-j,k, where P_n. = -i P_0. The Fourier
    transforms go without their factor 1 / sqrt(n m), for which torch would pass over the spectrum once more.
    """
    result: Tensor = _Transform.apply(x)
    return result


def inverse_dct2(coefficients: Tensor) -> Tensor:
    """The inverse of `dct2`, which is also its transpose."""
    result: Tensor = _InverseTransform.apply(coefficients)
    return result


class _Transform(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        n, m = x.shape[-2:]
        v = x[..., _folded(n, x.device)[:, None], _folded(m, x.device)]
        spectrum = torch.view_as_real(torch.fft.rfft2(v, norm="backward"))
        j, k = torch.arange(n, device=x.device)[:, None], torch.arange(m, device=x.device)
        half = torch.minimum(k, m - k)
        turns = _turns(n, m, x)
        p_real, p_imaginary = _product(spectrum[..., j, half, :], turns[j, half])
        q_real, q_imaginary = _product(spectrum[..., (n - j) % n, half, :], turns[n - j, half])
        both = torch.where(k <= m // 2, p_real - q_imaginary, -p_imaginary - q_real)
        return both * (_norms(n, 2**0.5, x)[:, None] * _norms(m, 2**0.5, x) / (2 * sqrt(n * m)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return inverse_dct2(gradient)


class _InverseTransform(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(coefficients: Tensor) -> Tensor:
        n, m = coefficients.shape[-2:]
        norms = _norms(n, 0.5**0.5, coefficients)[:, None] * _norms(m, 0.5**0.5, coefficients)
        c = coefficients * (norms / sqrt(n * m))
        j, k = torch.arange(n, device=c.device)[:, None], torch.arange(m // 2 + 1, device=c.device)
        below, beside = (n - j) % n, (m - k) % m
        real = c[..., j, k] - c[..., below, beside] * ((j > 0) & (k > 0))
        imaginary = -(c[..., below, k] * (j > 0) + c[..., j, beside] * (k > 0))
        back_real, back_imaginary = _product(torch.stack([real, -imaginary], -1), _turns(n, m, c)[:n])
        spectrum = torch.view_as_complex(torch.stack([back_real, -back_imaginary], -1))
        v = torch.fft.irfft2(spectrum, (n, m), norm="forward")
        rows, columns = (_unfolded(size, c.device) for size in (n, m))
        return v[..., rows[:, None], columns]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return dct2(gradient)


def _folded(n: int, device: torch.device) -> Tensor:
    """The even ones of n numbers, followed by the odd ones in reverse."""
    i = torch.arange(n, device=device)
    return torch.where(2 * i < n, 2 * i, 2 * (n - i) - 1)


def _unfolded(n: int, device: torch.device) -> Tensor:
    """Where `_folded` puts each of n numbers."""
    i = torch.arange(n, device=device)
    return torch.where(i % 2 == 0, i // 2, n - 1 - i // 2)


def _turns(n: int, m: int, like: Tensor) -> Tensor:
    """Exp(-i pi j / 2n) exp(-i pi k / 2m) for j from 0 to n and k from 0 to m / 2, as (n + 1, m // 2 + 1, 2)."""
    rows = torch.arange(n + 1, device=like.device).to(like.dtype)[:, None] * (pi / (2 * n))
    angles = rows + torch.arange(m // 2 + 1, device=like.device).to(like.dtype) * (pi / (2 * m))
    # A complex operation, which the compiler leaves alone: it would work out the angles anew for every matrix.
    return torch.view_as_real(torch.polar(torch.ones_like(angles), -angles))


def _product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of the product of complex numbers, each given by both along the last dimension."""
    return x[..., 0] * y[..., 0] - x[..., 1] * y[..., 1], x[..., 0] * y[..., 1] + x[..., 1] * y[..., 0]


def _norms(n: int, scale: float, like: Tensor) -> Tensor:
    """1 for the constant wave and `scale` for the others, whose norms differ by sqrt(2)."""
    return 1 + (scale - 1) * (torch.arange(n, device=like.device) > 0).to(like.dtype)
