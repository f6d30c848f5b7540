"""Batches of tensors in the eigenbases of their Kronecker factors.

Shapes: x is (B, n_1, ..., n_k); a factor or basis of dimension i is (B, n_i, n_i), or None where that dimension is left
alone.
"""

import torch
from torch import Tensor

from wellposed.errors import InvalidArgumentError
from wellposed.spectrum.cholesky import inverse_cholesky

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
    product.div_(largest).add_(basis, alpha=32 * torch.finfo(factor.dtype).eps)
    index = order[:, None, :].expand_as(basis)
    if not factor.is_cuda or factor.dtype == torch.float64:
        return torch.linalg.qr(product.gather(-1, index)).Q, order
    columns = product.gather(-1, index).double()
    del product
    good = gram_schmidt_(columns)
    new = columns.to(factor.dtype)
    del columns
    # To find out which have failed the host would have to wait: they keep the basis they have.
    return torch.where(good[:, None, None], new, basis.gather(-1, index), out=new), order


def gram_schmidt_(matrices: Tensor, block: int = 288) -> Tensor:
    """Replace each float64 matrix by the Q of its QR decomposition, up to signs; the verdict which ones succeeded.

    Those do with a condition number up to some 1e8: the Cholesky decompositions of blocks' A^T A square it. cuSOLVER's
    QR of a batch runs one matrix after the other; these products run together. The verdict probes Q^T Q x = x.
    """
    matrices /= torch.linalg.vector_norm(matrices, dim=-2, keepdim=True)
    _orthonormalize_(matrices, block)
    x = torch.arange(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device).cos()[:, None]
    return (matrices.mT @ (matrices @ x) - x).abs().amax((-2, -1)) < 1e-3


def _orthonormalize_(a: Tensor, block: int) -> None:
    """Gram and Schmidt by halves of each matrix's columns, down to `block` of them: Q = A L^-T where A^T A = L L^T."""
    n = a.shape[-1]
    if n <= block:
        a.copy_(a @ inverse_cholesky(a.mT @ a)[0].mT)
        return
    left, right = a[..., : n // 2], a[..., n // 2 :]
    _orthonormalize_(left, block)
    right.baddbmm_(left, left.mT @ right, alpha=-1)
    _orthonormalize_(right, block)
