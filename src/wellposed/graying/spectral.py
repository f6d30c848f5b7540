"""SVD graying without an SVD: X~ = r(G / s_max^2) X with the Gram matrix G on the smaller side of X.

Fractions of a matrix are inverses, which GPUs compute for a whole batch at once by Cholesky, and they are smooth: the
gradient is finite where singular values repeat or vanish, which that of an SVD is not. A Gram matrix squares the
condition number, so all of this is in float64.
"""

from typing import Any

import torch
from torch import Tensor

from wellposed.graying.rational import Rational
from wellposed.spectrum.cholesky import inverse_cholesky
from wellposed.spectrum.extremes import largest_eigenvalue


def gray_by_fractions(x_BND: Tensor, power: Rational) -> Tensor:
    """Each matrix of `x_BND`, in float64, with its singular values s multiplied by r(s^2 / s_max^2)."""
    scale: Tensor | float = 1.0
    if x_BND.dtype == torch.float64:  # squares of float32 are in range
        largest = x_BND.detach().abs().amax((-2, -1), keepdim=True)
        scale = largest.where(largest > 0, 1.0)
    x_BND = x_BND.double() / scale
    is_wide = x_BND.shape[-2] <= x_BND.shape[-1]
    gram = x_BND @ x_BND.mT if is_wide else x_BND.mT @ x_BND
    top = largest_eigenvalue(gram)[..., None, None]
    factor = _of_matrix(power, gram / top.where(top > 0, 1.0))
    return scale * (factor @ x_BND if is_wide else x_BND @ factor)


def _of_matrix(power: Rational, gram: Tensor) -> Tensor:
    """The values of r at symmetric positive semidefinite matrices."""
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    shifted = gram - power.center * eye
    # All at once: a GPU inverts many matrices in little more time than a few.
    inverted = [*(gram + t * eye for _, t in power.poles), shifted @ shifted + power.width**2 * eye]
    *fractions, beside_floor = _Inverse.apply(torch.stack(inverted)).unbind()
    result = power.constant * eye + (power.pair[0] * eye + power.pair[1] * gram) @ beside_floor
    for (weight, _), fraction in zip(power.poles, fractions, strict=True):
        result = result + weight * fraction
    return result


class _Inverse(torch.autograd.Function):
    """The inverse of positive definite matrices: by Cholesky, with the two products its gradient needs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrices: Tensor) -> Tensor:
        inverse_factor, _ = inverse_cholesky(matrices)
        return inverse_factor.mT @ inverse_factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse @ gradient @ inverse)
