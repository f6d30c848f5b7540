"""The largest and the smallest singular value of each of many matrices.

The Gram matrix on the smaller side, in float64, has the squares of the singular values. On the CPU LAPACK finds its
eigenvalues. A GPU takes small decompositions one after the other, but matrix products and triangular solves all at
once: there, squaring the Gram matrix again and again leaves the vector of the largest, and doing so to its inverse that
of the smallest.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import InvalidArgumentError
from wellposed.spectrum.cholesky import inverse_cholesky
from wellposed.spectrum.measures import as_matrices

_SQUARINGS = 10
# Squarings in a row that keep a matrix with the largest entry 1 and up to 15,000 columns within bfloat16's range.
_UNSCALED = 3


def extreme_singular_values(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the smallest singular value of each matrix (..., m, n), in float64.

    On a GPU both are approached from between them, to half a percent where others lie close by and to many digits
    where none does. A smallest one below `resolution` times the largest is returned as 0, on all devices.

    Example:
        >>> largest, smallest = extreme_singular_values(torch.diag(torch.tensor([3.0, 2.0, 0.5])))
        >>> (largest / smallest).round(decimals=6)
        tensor(6., dtype=torch.float64)
    """
    return extremes_of_gram(gram_matrices(matrices))


def gram_matrices(matrices: Tensor) -> Tensor:
    """X X^T or X^T X of each matrix X, whichever is smaller, in float64; its trace is the sum of all squares."""
    matrices = as_matrices(matrices, torch.float64, check_values=False)
    return matrices @ matrices.mT if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT @ matrices


def extremes_of_gram(gram: Tensor) -> tuple[Tensor, Tensor]:
    """`extreme_singular_values` of the matrices with these `gram_matrices`."""
    return _extremes(gram, _ends_by_eigenvalues if gram.device.type == "cpu" else _ends_by_products)


def extreme_singular_values_of_product(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the smallest of the singular values that left right^T can have, (..., m, h) and (..., n, h).

    Where factors of width h give the answer, the m x n product, such as W_Q W_K^T of a head, is not formed: with Gram
    matrices L_1 L_1^T of `left` and L_2 L_2^T of `right` they are those of L_1^T L_2. Where h is no smaller than m or n
    that would not help.
    """
    if left.shape[-1] != right.shape[-1]:
        raise InvalidArgumentError(f"factors of widths {left.shape[-1]} and {right.shape[-1]}: expected the same")
    left, right = (as_matrices(factor, torch.float64) for factor in (left, right))
    if left.shape[-1] >= min(left.shape[-2], right.shape[-2]):
        return extreme_singular_values(left @ right.mT)
    (first, failed_first), (second, failed_second) = (
        torch.linalg.cholesky_ex(factor.mT @ factor) for factor in (left, right)
    )
    is_singular = (failed_first != 0) | (failed_second != 0)
    largest, smallest = extreme_singular_values(torch.where(is_singular[..., None, None], 0.0, first.mT @ second))
    if is_singular.any():  # columns that repeat each other: rare, so the whole product may be formed
        largest[is_singular] = extreme_singular_values((left @ right.mT)[is_singular])[0]
    return largest, smallest


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """That of each symmetric positive semidefinite matrix (..., n, n), with its derivative.

    On a GPU to a part in ten thousand, from below. Where the largest one repeats, the derivative is that of one.
    """
    if gram.device.type == "cpu":
        return torch.linalg.eigvalsh(gram)[..., -1]
    return _top_by_products(gram, squarings=14, steps=8)


def resolution(size: int) -> float:
    """Which part of the largest singular value, for matrices with `size` of them, is taken for 0: 6e-7 for 197."""
    return (8 * size * torch.finfo(torch.float64).eps) ** 0.5


def _extremes(gram: Tensor, ends: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """From the largest and smallest eigenvalues that `ends` finds of Gram matrices of trace 1."""
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    if not trace.isfinite().all():  # cheaper than to look at every entry
        raise InvalidArgumentError("a matrix holds NaN or Inf: it has no singular values")
    top, bottom = ends(gram / trace.where(trace > 0, 1.0))
    is_singular = bottom <= resolution(gram.shape[-1]) ** 2 * top
    unit = trace.sqrt()[..., 0, 0]
    return unit * top.sqrt(), unit * bottom.where(~is_singular, 0.0).sqrt()


def _ends_by_eigenvalues(gram: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.linalg.eigvalsh(gram).clamp(min=0)
    return values[..., -1], values[..., 0]


def _ends_by_products(gram: Tensor) -> tuple[Tensor, Tensor]:
    size = gram.shape[-1]
    eye = torch.eye(size, dtype=gram.dtype, device=gram.device)
    shift = size * torch.finfo(gram.dtype).eps
    inverse, failed = inverse_cholesky(gram + shift * eye)
    bottom = 1 / _top_by_products(inverse.mT @ inverse) - shift
    return _top_by_products(gram), torch.where(failed, 0.0, bottom)


def _top_by_products(gram: Tensor, squarings: int = _SQUARINGS, steps: int = 0) -> Tensor:
    """The largest eigenvalue: the Rayleigh quotient of a column of the 2^squarings-th power, after `steps` products.

    The power may be rough, hence in bfloat16: errors of a vector enter its Rayleigh quotient squared. Held fixed, the
    vector gives the eigenvalue's derivative too, up to an error that `steps` makes smaller.
    """
    vector = _top_vector(gram.detach(), squarings)
    for _ in range(steps):
        vector = _unit(gram.detach() @ vector)
    return (vector.mT @ gram @ vector)[..., 0, 0]


def _top_vector(gram: Tensor, squarings: int) -> Tensor:
    size = gram.shape[-1]
    unaligned = -size % 8
    power = F.pad(_per_largest_entry(gram).bfloat16(), (0, unaligned, 0, unaligned))
    for i in range(squarings):
        if i % _UNSCALED == 0:
            power = _per_largest_entry(power)
        power = power @ power
    column = power.diagonal(dim1=-2, dim2=-1)[..., :size].argmax(-1)[..., None, None].expand(*gram.shape[:-1], 1)
    return _unit(power[..., :size, :size].gather(-1, column).to(gram.dtype))


def _unit(vector: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(vector, dim=-2, keepdim=True)
    return vector / norm.where(norm > 0, 1.0)


def _per_largest_entry(gram: Tensor) -> Tensor:
    """Positive semidefinite matrices have their largest entry on the diagonal; zeros stay zeros."""
    largest = gram.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    return gram / largest.where(largest > 0, 1.0)
