"""DCT graying by matrix products in float16, for what is rounded to bfloat16 afterwards.

On the tensor cores of a GPU a product with the cosines themselves takes less time than the passes over memory around a
Fourier transform. Matrices are scaled to a largest entry of 1 before: float16 then holds all that counts, with an error
of some 0.001 as long as no coefficient is raised much, about half of what the rounding to bfloat16 adds.
"""

from contextlib import AbstractContextManager, nullcontext
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor

from wellposed.graying.cosine import largest_of, raised


def gray_by_products(x_BND: Tensor, eps: float, tol: float) -> Tensor:
    """As `gray_by_cosines`, with smaller precision."""
    rows, columns = (_cosines(size, x_BND) for size in x_BND.shape[-2:])
    coefficients_BND = _rotated(x_BND, largest_of(x_BND), rows, columns)
    largest = largest_of(coefficients_BND)
    return _rotated(raised(coefficients_BND, largest, eps, tol), largest, rows.mT, columns.mT)


def _rotated(x_BND: Tensor, largest: Tensor, rows_NN: Tensor, columns_DD: Tensor) -> Tensor:
    """The products rows x columns^T, of matrices with these largest entries."""
    result: Tensor = _Rotation.apply(x_BND, largest.detach(), rows_NN, columns_DD)
    return result


class _Rotation(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x_BND: Tensor, largest: Tensor, rows_NN: Tensor, columns_DD: Tensor) -> Tensor:
        with without_autocast(x_BND):  # here too: a backward pass may be asked for within it
            halves_BND = (x_BND / largest).half()
            return (rows_NN @ (halves_BND @ columns_DD.mT)).to(x_BND.dtype) * largest

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, gradient_BND: Tensor) -> tuple[Tensor, None, None, None]:
        rows_NN, columns_DD = ctx.saved_tensors
        return _rotated(gradient_BND, largest_of(gradient_BND), rows_NN.mT, columns_DD.mT), None, None, None


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Within this, products on the device of `x` have the precision of what is multiplied."""
    kind = x.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def _cosines(n: int, like: Tensor) -> Tensor:
    """The orthonormal DCT-II as a matrix, (n, n), in float16."""
    waves, places = torch.arange(n, device=like.device)[:, None], torch.arange(n, device=like.device)
    # Whole periods of 4n steps taken off before anything is rounded.
    angles = (waves * (2 * places + 1) % (4 * n)).float() * (pi / (2 * n))
    norms = torch.where(waves > 0, sqrt(2 / n), sqrt(1 / n))
    return (angles.cos() * norms).half()
