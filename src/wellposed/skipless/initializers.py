"""The matrices of the conditioned initialization (arXiv 2510.00345, Section 4), drawn at random.

All are returned as the paper writes them for the query and key factors, and in torch's (out, in) layout for
semi-orthogonal matrices. d is the model's width, h the width of a head.
"""

import math

import torch
from torch import Tensor


def query_key_factors(
    heads: int,
    d: int,
    h: int,
    alpha: float,
    beta: float,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """W_Q and W_K, both (heads, d, h) in float64, with W_Q W_K^T the best rank-h approximation of M = alpha Z + beta I.

    Z is d x d Gaussian with variance 1/d, drawn anew for every head. With M = U S V^T, W_Q = U_h sqrt(S_h) and
    W_K = V_h sqrt(S_h).
    """
    z = gaussian((heads, d, d), generator=generator, device=device).to(torch.float64) / math.sqrt(d)
    m = alpha * z + beta * torch.eye(d, dtype=z.dtype, device=z.device)
    v = top_right_singular_vectors(m, h)
    mv = m @ v
    s = torch.linalg.vector_norm(mv, dim=-2, keepdim=True)
    return mv / s.sqrt(), v * s.sqrt()


def top_right_singular_vectors(m: Tensor, k: int) -> Tensor:
    """The right singular vectors of the k largest singular values of each matrix, as columns, largest first.

    Through the eigenvectors of M^T M, which cost a fraction of an SVD. Squaring the spectrum takes accuracy from the
    smallest singular vectors, not from the largest ones.
    """
    return torch.linalg.eigh(m.mT @ m).eigenvectors[..., -k:].flip(-1)


def semi_orthogonal(
    rows: int,
    columns: int,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A (rows, columns) matrix, uniformly distributed among those with all singular values 1.

    As torch.nn.init.orthogonal_, but drawn where the generator lives and decomposed on `device`: a CPU generator makes
    the numbers repeatable everywhere without making a GPU's model wait for the CPU's QR.
    """
    tall = gaussian((max(rows, columns), min(rows, columns)), generator=generator, device=device).to(dtype)
    q, r = torch.linalg.qr(tall)
    q = q * r.diagonal().sign()  # the sign QR leaves open, fixed: q is then uniform
    return q if rows >= columns else q.T


def suo_scale(rows: int, columns: int) -> float:
    """The scale max(sqrt(out/in), 1) of a scale-corrected uniform orthogonal (SUO) matrix."""
    return max(math.sqrt(rows / columns), 1.0)


def gaussian(shape: tuple[int, ...], *, generator: torch.Generator | None, device: torch.device | str) -> Tensor:
    """Standard normal float32 numbers on `device`, drawn on the generator's own device where one is given."""
    drawn_on = device if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=drawn_on, dtype=torch.float32).to(device)
