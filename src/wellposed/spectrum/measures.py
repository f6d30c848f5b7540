"""Singular values of batches of matrices, and the numbers made from them.

Everything is computed in float64, or in float32 if asked, on the device the matrices are on. A matrix of zeros has
condition number infinity and ranks 0.
"""

import torch
from torch import Tensor

from wellposed.errors import InvalidArgumentError


def singular_values(matrices: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The singular values of each matrix (..., m, n), the largest first.

    Example:
        >>> singular_values(torch.tensor([[3.0, 0.0], [0.0, -4.0]]))
        tensor([4., 3.], dtype=torch.float64)
    """
    return torch.linalg.svdvals(as_matrices(matrices, dtype))


def product_singular_values(left: Tensor, right: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The h singular values of each product left right^T that need not be 0, for (..., m, h) and (..., n, h).

    With left = Q_1 R_1 and right = Q_2 R_2 they are those of the h x h matrix R_1 R_2^T: the m x n product, such as
    W_Q W_K^T of a head of width h, is never formed.
    """
    if left.shape[-1] != right.shape[-1]:
        raise InvalidArgumentError(f"factors of widths {left.shape[-1]} and {right.shape[-1]}: expected the same")
    first, second = (torch.linalg.qr(as_matrices(factor, dtype), mode="r").R for factor in (left, right))
    return torch.linalg.svdvals(first @ second.mT)


def condition_number(matrices: Tensor, tol: float | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """The largest singular value of each matrix over its smallest.

    Args:
        matrices: (..., m, n), of any floating-point type.
        tol: a matrix whose smallest singular value is at most `tol` times its largest counts as rank-deficient, with
            condition number infinity; max(m, n) times the rounding error of the matrices' type if None. With 0 the
            ratio is returned as it comes out, which for a rank-deficient matrix is the size of rounding errors.
        dtype: in which to compute.

    Example:
        >>> condition_number(torch.tensor([[3.0, 0.0], [0.0, -4.0]]))
        tensor(1.3333, dtype=torch.float64)
        >>> condition_number(torch.ones(2, 2))
        tensor(inf, dtype=torch.float64)
    """
    values = singular_values(matrices, dtype)
    if tol is None:
        tol = max(matrices.shape[-2:]) * torch.finfo(matrices.dtype).eps
    largest, smallest = values[..., 0], values[..., -1]
    return torch.where(smallest <= tol * largest, torch.inf, largest / smallest)


def spectral_norm(matrices: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The largest singular value of each matrix."""
    return singular_values(matrices, dtype)[..., 0]


def frobenius_norm(matrices: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The root of the sum of squares of each matrix."""
    return torch.linalg.matrix_norm(as_matrices(matrices, dtype))


def stable_rank(matrices: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """||A||_F^2 / ||A||_2^2 of each matrix: at most its rank, and blind to small singular values.

    Example:
        >>> stable_rank(torch.diag(torch.tensor([2.0, 2.0, 1e-6])))
        tensor(2.0000, dtype=torch.float64)
    """
    return _per_largest(singular_values(matrices, dtype)).square().sum(-1)


def effective_rank(matrices: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Exp of the entropy of the singular values divided by their sum, of each matrix (Roy and Vetterli 2007).

    Example:
        >>> effective_rank(torch.eye(5))
        tensor(5.0000, dtype=torch.float64)
    """
    values = _per_largest(singular_values(matrices, dtype))
    total = values.sum(-1, keepdim=True)
    shares = values / total.where(total > 0, 1.0)
    return torch.where(total[..., 0] > 0, torch.special.entr(shares).sum(-1).exp(), 0.0)


def _per_largest(values: Tensor) -> Tensor:
    """Singular values divided by the largest, which keeps their squares and sums in range; zeros stay zeros."""
    largest = values[..., :1]
    return values / largest.where(largest > 0, 1.0)


def as_matrices(matrices: Tensor, dtype: torch.dtype, check_values: bool = True) -> Tensor:
    """`matrices` in `dtype`, once it is sure that they have singular values."""
    if matrices.ndim < 2 or 0 in matrices.shape:
        raise InvalidArgumentError(f"matrices of shape {tuple(matrices.shape)}: expected (..., m, n), none of them 0")
    if not matrices.is_floating_point():
        raise InvalidArgumentError(f"matrices of {matrices.dtype}: expected a floating-point type")
    if dtype not in {torch.float32, torch.float64}:
        raise InvalidArgumentError(f"dtype={dtype}: expected torch.float32 or torch.float64")
    if check_values and not matrices.isfinite().all():
        raise InvalidArgumentError("a matrix holds NaN or Inf: it has no singular values")
    return matrices.to(dtype)
