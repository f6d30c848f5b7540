"""The largest singular values of a large matrix, from products with it."""

import torch
from torch import Tensor

_SPARE = 16
"""Directions beyond those asked for; the more there are, the faster the others come out right."""


def dominant(matrix: Tensor, count: int, rounds: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """U (m, count), values (count,) and V^T (count, n) of the `count` largest singular values of a matrix (m, n).

    Subspace iteration (Halko, Martinsson and Tropp 2011) from a start that is always the same, so that nothing is taken
    from torch's random numbers. No value comes out too large; U and V are orthonormal.

    Example:
        >>> dominant(torch.diag(torch.tensor([1.0, 4.0, 3.0])), 2)[1].round(decimals=3)
        tensor([4., 3.])
    """
    width = min(count + max(count, _SPARE), *matrix.shape)
    start = torch.randn(matrix.shape[1], width, generator=torch.Generator().manual_seed(0))
    basis = start.to(matrix)
    for _ in range(rounds):
        left = torch.linalg.qr(matrix @ basis).Q
        basis = torch.linalg.qr(matrix.T @ left).Q
    left, values, right = torch.linalg.svd(matrix @ basis, full_matrices=False)
    return left[:, :count], values[:count], (right @ basis.T)[:count]
