"""Inverses of Cholesky factors for batches of matrices, mostly by matrix products."""

import torch
from torch import Tensor

# Columns up to which a GPU's own batched decomposition is the fastest.
_BLOCK = 100


def inverse_cholesky(matrices: Tensor, block: int | None = None) -> tuple[Tensor, Tensor]:
    """The inverses (..., n, n) of the L in L L^T of symmetric matrices, and which of these are not positive definite.

    A GPU decomposes many matrices of 200 columns no faster than the products they consist of would allow, by halves
    down to `block` columns it does: with A = [[B, C^T], [C, D]], B = L L^T and E = C L^-T, what remains is D - E E^T =
    M M^T, and the inverse is [[L^-1, 0], [-M^-1 E L^-1, M^-1]].

    Where a matrix is not positive definite, its result means nothing.
    """
    n = matrices.shape[-1]
    if n <= (block or (_BLOCK if matrices.is_cuda else n)):
        factor, failed = torch.linalg.cholesky_ex(matrices)
        eye = torch.eye(n, dtype=matrices.dtype, device=matrices.device)
        return torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False), failed != 0
    h = n // 2
    first, failed_first = inverse_cholesky(matrices[..., :h, :h], block)
    below = matrices[..., h:, :h] @ first.mT
    second, failed_second = inverse_cholesky(matrices[..., h:, h:] - below @ below.mT, block)
    inverse = torch.zeros_like(matrices)
    inverse[..., :h, :h] = first
    inverse[..., h:, h:] = second
    inverse[..., h:, :h] = -second @ (below @ first)
    return inverse, failed_first | failed_second
