"""Singular values of batches of matrices, and numbers made from them."""

import torch
from torch import Tensor

from wellposed.errors import InvalidArgumentError


def singular_values(matrices: Tensor) -> Tensor:
    """The singular values of each matrix (..., m, n), the largest first, computed in float64.

    Example:
        >>> singular_values(torch.tensor([[3.0, 0.0], [0.0, -4.0]]))
        tensor([4., 3.], dtype=torch.float64)
    """
    if matrices.ndim < 2 or 0 in matrices.shape:
        raise InvalidArgumentError(f"matrices of shape {tuple(matrices.shape)}: expected (..., m, n), none of them 0")
    if not matrices.is_floating_point():
        raise InvalidArgumentError(f"matrices of {matrices.dtype}: expected a floating-point type")
    if not matrices.isfinite().all():
        raise InvalidArgumentError("a matrix holds NaN or Inf: it has no singular values")
    return torch.linalg.svdvals(matrices.double())


def condition_number(matrices: Tensor, tol: float | None = None) -> Tensor:
    """The largest singular value of each matrix over its smallest, in float64.

    Args:
        matrices: (..., m, n), of any floating-point type.
        tol: a matrix whose smallest singular value is at most `tol` times its largest counts as rank-deficient, with
            condition number infinity; max(m, n) times the rounding error of the matrices' type if None. With 0 the
            ratio is returned as it comes out, which for a rank-deficient matrix is the size of rounding errors.

    Example:
        >>> condition_number(torch.tensor([[3.0, 0.0], [0.0, -4.0]]))
        tensor(1.3333, dtype=torch.float64)
        >>> condition_number(torch.ones(2, 2))
        tensor(inf, dtype=torch.float64)
    """
    values = singular_values(matrices)
    if tol is None:
        tol = max(matrices.shape[-2:]) * torch.finfo(matrices.dtype).eps
    largest, smallest = values[..., 0], values[..., -1]
    return torch.where(smallest <= tol * largest, torch.inf, largest / smallest)
