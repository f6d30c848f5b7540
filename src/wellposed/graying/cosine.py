"""DCT graying: X^ = D X D^T, each coefficient x becomes x (|x| / max|x|)^(eps - 1), and back.

D is the orthonormal cosine transform, here by FFT: as a product with D itself it would take 148 GFLOP for 256 images of
196 x 768, several milliseconds of float32 on a GPU, and TF32 would spoil it.
"""

from math import pi

import torch
from torch import Tensor


def gray_by_cosines(x_BND: Tensor, eps: float, tol: float) -> Tensor:
    """Each matrix of `x_BND` with the coefficients of its 2-D cosine transform raised to the power eps.

    The largest coefficient stays as it is. A coefficient below `tol` of it counts as that in |x| / max|x|, which keeps
    the gradient finite at 0.
    """
    coefficients_BND = dct(dct(x_BND).mT).mT
    sizes_BND = coefficients_BND.abs()
    largest = sizes_BND.amax((-2, -1), keepdim=True)
    shares_BND = sizes_BND / largest.where(largest > 0, 1.0)
    grayed_BND = coefficients_BND * shares_BND.clamp(min=tol) ** (eps - 1)
    return inverse_dct(inverse_dct(grayed_BND.mT).mT)


def dct(x: Tensor) -> Tensor:
    """The orthonormal DCT-II along the last dimension.

    With v the even entries of x followed by the odd ones in reverse, and V its Fourier transform of length n,
    z_k = exp(-i pi k / 2n) V_k has the cosine coefficients k and n - k in its real and imaginary part (Makhoul 1980).
    """
    n = x.shape[-1]
    v = torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], -1)
    real, imaginary = torch.view_as_real(torch.fft.rfft(v, norm="ortho")).unbind(-1)
    cosine, sine = _half_steps(n, 2**0.5, x)
    first = real * cosine + imaginary * sine
    last = real * sine - imaginary * cosine
    return torch.cat([first, last[..., 1 : (n + 1) // 2].flip(-1)], -1)


def inverse_dct(coefficients: Tensor) -> Tensor:
    """The inverse of `dct`, which is also its transpose."""
    n = coefficients.shape[-1]
    cosine, sine = _half_steps(n, 0.5**0.5, coefficients)
    first = coefficients[..., : n // 2 + 1]
    last = torch.cat([torch.zeros_like(first[..., :1]), coefficients[..., n - n // 2 :].flip(-1)], -1)
    spectrum = torch.stack([first * cosine + last * sine, first * sine - last * cosine], -1)
    v = torch.fft.irfft(torch.view_as_complex(spectrum), n, norm="ortho")
    evens = n - n // 2
    odds = v[..., evens:].flip(-1)
    if n % 2:
        odds = torch.nn.functional.pad(odds, (0, 1))
    return torch.stack([v[..., :evens], odds], -1).flatten(-2)[..., :n]


def _half_steps(n: int, scale: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cos and sin of pi k / 2n for the k of a real Fourier transform, times `scale` except for k = 0.

    The transforms of the constant and of the other waves differ by sqrt(2) in their norms.
    """
    k = torch.arange(n // 2 + 1, device=like.device)
    scales = 1 + (scale - 1) * (k > 0).to(like.dtype)
    angles = k.to(like.dtype) * (pi / (2 * n))
    return scales * angles.cos(), scales * angles.sin()
