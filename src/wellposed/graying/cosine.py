"""DCT graying: X^ = D X D^T, each coefficient x becomes x (|x| / max|x|)^(eps - 1), and back.

D is the orthonormal cosine transform, here by FFT: as a product with D itself it would take 148 GFLOP for 256 images of
196 x 768, several milliseconds of float32 on a GPU, and TF32 would spoil it.
"""

from math import pi

import torch
from torch import Tensor
from torch.nn import functional as F


def gray_by_cosines(x_BND: Tensor, eps: float, tol: float) -> Tensor:
    """Each matrix of `x_BND` with the coefficients of its 2-D cosine transform raised to the power eps.

    The largest coefficient stays as it is. A coefficient below `tol` of it counts as that in |x| / max|x|, which keeps
    the gradient finite at 0.
    """
    coefficients_BND = dct2(x_BND)
    sizes_BND = coefficients_BND.abs()
    largest = sizes_BND.amax((-2, -1), keepdim=True)
    shares_BND = sizes_BND / largest.where(largest > 0, 1.0)
    return inverse_dct2(coefficients_BND * shares_BND.clamp(min=tol) ** (eps - 1))


def dct2(x: Tensor) -> Tensor:
    """The orthonormal 2-D DCT-II of each matrix (..., n, m).

    With v the even rows and columns of x followed by the odd ones in reverse, V its Fourier transform and
    P_jk = exp(-i pi j / 2n) exp(-i pi k / 2m) V_jk, the cosine coefficients C are, up to their norms (Makhoul 1980),

        Re P_jk = C_jk - C_n-j,m-k,    -Im P_jk = C_n-j,k + C_j,m-k,    C_n. = C_.m = 0,

    so that 2 C_jk = Re P_jk - Im P_n-j,k and 2 C_j,m-k = -Im P_jk - Re P_n-j,k, where P_n. = -i P_0.
    """
    n, m = x.shape[-2:]
    v = _folded(_folded(x, -1), -2)
    real, imaginary = torch.view_as_real(torch.fft.rfft2(v, norm="ortho")).unbind(-1)
    rows, columns = _half_steps(n, n, x), _half_steps(m, m // 2 + 1, x)
    cosine, sine = _sums(rows, columns)
    real, imaginary = real * cosine + imaginary * sine, imaginary * cosine - real * sine
    mirrored_real = torch.cat([imaginary[..., :1, :], real[..., 1:, :].flip(-2)], -2)
    mirrored_imaginary = torch.cat([-real[..., :1, :], imaginary[..., 1:, :].flip(-2)], -2)
    first = (real - mirrored_imaginary) / 2
    last = (-imaginary - mirrored_real) / 2
    both = torch.cat([first, last[..., 1 : (m + 1) // 2].flip(-1)], -1)
    return both * _norms(n, 2**0.5, x)[:, None] * _norms(m, 2**0.5, x)


def inverse_dct2(coefficients: Tensor) -> Tensor:
    """The inverse of `dct2`, which is also its transpose."""
    n, m = coefficients.shape[-2:]
    c = coefficients * _norms(n, 0.5**0.5, coefficients)[:, None] * _norms(m, 0.5**0.5, coefficients)
    half = m // 2 + 1
    first, last = c[..., :half], F.pad(c[..., m - m // 2 :].flip(-1), (1, 0))
    below_first, below_last = (F.pad(part[..., 1:, :].flip(-2), (0, 0, 1, 0)) for part in (first, last))
    real, imaginary = first - below_last, -(below_first + last)
    cosine, sine = _sums(_half_steps(n, n, c), _half_steps(m, half, c))
    spectrum = torch.stack([real * cosine - imaginary * sine, imaginary * cosine + real * sine], -1)
    v = torch.fft.irfft2(torch.view_as_complex(spectrum), (n, m), norm="ortho")
    return _unfolded(_unfolded(v, -2), -1)


def _folded(x: Tensor, dim: int) -> Tensor:
    """The even entries along `dim`, followed by the odd ones in reverse."""
    x = x.movedim(dim, -1)
    return torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], -1).movedim(-1, dim)


def _unfolded(v: Tensor, dim: int) -> Tensor:
    """The inverse of `_folded`."""
    v = v.movedim(dim, -1)
    n = v.shape[-1]
    evens = n - n // 2
    odds = v[..., evens:].flip(-1)
    if n % 2:
        odds = F.pad(odds, (0, 1))
    return torch.stack([v[..., :evens], odds], -1).flatten(-2)[..., :n].movedim(-1, dim)


def _half_steps(n: int, count: int, like: Tensor) -> Tensor:
    """The angles pi k / 2n for the first `count` k."""
    return torch.arange(count, device=like.device).to(like.dtype) * (pi / (2 * n))


def _sums(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Cos and sin of the sums of both angles."""
    angles = rows[:, None] + columns
    return angles.cos(), angles.sin()


def _norms(n: int, scale: float, like: Tensor) -> Tensor:
    """1 for the constant wave and `scale` for the others, whose norms differ by sqrt(2)."""
    return 1 + (scale - 1) * (torch.arange(n, device=like.device) > 0).to(like.dtype)
