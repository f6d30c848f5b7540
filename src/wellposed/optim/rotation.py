"""Batches of tensors in the eigenbases of their Kronecker factors.

Shapes: x is (B, n_1, ..., n_k); a factor or basis of dimension i is (B, n_i, n_i), or None where that dimension is left
alone.
"""

import torch
from torch import Tensor

from wellposed.errors import InvalidArgumentError

Bases = list[Tensor | None]


def rotated(x: Tensor, bases: Bases) -> Tensor:
    """Each tensor of `x` in the given bases: for matrices Q_1^T X Q_2."""
    for i, q in enumerate(bases):
        if q is not None:
            x = multiplied(x, q.mT, i)
    return x


def rotated_back(x: Tensor, bases: Bases) -> Tensor:
    """The inverse of `rotated`: for matrices Q_1 X Q_2^T."""
    for i, q in enumerate(bases):
        if q is not None:
            x = multiplied(x, q, i)
    return x


def multiplied(x: Tensor, matrix: Tensor, i: int) -> Tensor:
    """`matrix` times each tensor of `x` along dimension i, counted without the batch."""
    if x.ndim == 3:
        return matrix @ x if i == 0 else x @ matrix.mT
    moved = x.movedim(i + 1, 1)
    return (matrix @ moved.reshape(*moved.shape[:2], -1)).reshape(moved.shape).movedim(1, i + 1)


def accumulate_factor_(factor: Tensor, x: Tensor, i: int, decay: float) -> None:
    """Move `factor` towards the products of `x` with itself over all dimensions but i: for i = 0, X X^T."""
    flat = x.movedim(i + 1, 1).reshape(*factor.shape[:2], -1)
    torch.baddbmm(factor, flat, flat.mT, beta=decay, alpha=1 - decay, out=factor)


def eigenbasis(factor: Tensor) -> Tensor:
    """Eigenvectors of each symmetric matrix, as columns, the largest eigenvalue first."""
    try:
        vectors = torch.linalg.eigh(factor).eigenvectors
    except RuntimeError as error:  # float32 did not converge
        if not factor.isfinite().all():
            raise InvalidArgumentError(
                "the first gradient of a parameter is not finite or too large to square: no basis to start SOAP from"
            ) from error
        vectors = torch.linalg.eigh(factor.double()).eigenvectors.to(factor.dtype)
    return vectors.flip(-1)


def power_step(factor: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration; the new basis and the order in which it takes the old one's columns.

    Columns are sorted by their estimated eigenvalues first. The factor is shifted by a few rounding errors of its
    largest eigenvalue: its eigenvectors stay as they are, and a factor of lower rank than its size, as those of the
    first steps are, does not leave the remaining columns to chance.
    """
    product = factor @ basis
    values = (basis * product).sum(-2)
    order = values.argsort(dim=-1, descending=True)
    largest = values.amax(-1).clamp(min=torch.finfo(factor.dtype).tiny)[:, None, None]
    index = order[:, None, :].expand_as(basis)
    basis = basis.gather(-1, index)
    shift = 32 * torch.finfo(factor.dtype).eps
    return orthonormalized(product.gather(-1, index) / largest + shift * basis, otherwise=basis), order


def orthonormalized(matrices: Tensor, otherwise: Tensor) -> Tensor:
    """The Q of the QR decomposition of each matrix, up to the signs of its columns.

    On a GPU a matrix for which that fails, one with a condition number over some 1e7, gets `otherwise`: finding out
    which those are and treating them apart would make the host wait for the device.
    """
    if not matrices.is_cuda or matrices.dtype == torch.float64:
        return torch.linalg.qr(matrices).Q
    q, good = cholesky_qr(matrices)
    return torch.where(good[:, None, None], q, otherwise)


def cholesky_qr(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """The same through matrix products, with the verdict for each matrix whether it is orthogonal.

    Q = A L^-T with A^T A = L L^T, in float64 since forming A^T A squares the condition number, then one step of Newton
    and Schulz. cuSOLVER's QR of a batch runs one matrix after the other; these products run together.
    """
    a = matrices.double()
    a = a / torch.linalg.vector_norm(a, dim=-2, keepdim=True)
    q = (a @ inverse_cholesky(a.mT @ a).mT).to(matrices.dtype)
    error = q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return torch.baddbmm(q, q, error, alpha=-0.5), error.abs().amax((-2, -1)) < 0.1


def inverse_cholesky(matrices: Tensor, base: int = 384) -> Tensor:
    """L^-1 for each symmetric positive matrix L L^T, by halves down to size `base`."""
    n = matrices.shape[-1]
    if n <= base:
        lower = torch.linalg.cholesky_ex(matrices).L
        eye = torch.eye(n, dtype=matrices.dtype, device=matrices.device).expand_as(matrices)
        return torch.linalg.solve_triangular(lower, eye, upper=False)
    half = n // 2
    top = inverse_cholesky(matrices[..., :half, :half], base)
    below = matrices[..., half:, :half] @ top.mT
    bottom = inverse_cholesky(torch.baddbmm(matrices[..., half:, half:], below, below.mT, alpha=-1), base)
    inverse = torch.zeros_like(matrices)
    inverse[..., :half, :half] = top
    inverse[..., half:, half:] = bottom
    inverse[..., half:, :half] = -bottom @ (below @ top)
    return inverse
