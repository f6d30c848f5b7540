"""Graying of matrices, whichever way (arXiv 2505.01996, Section 5)."""

from dataclasses import dataclass, field
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from wellposed.errors import InvalidArgumentError
from wellposed.graying.cosine import gray_by_cosines
from wellposed.graying.products import gray_by_products, without_autocast
from wellposed.graying.rational import FLOORS, Rational, floored_power
from wellposed.graying.spectral import gray_by_fractions
from wellposed.spectrum.modes import within_transform

Kind = Literal["svd", "dct"]

DEFAULT_EPS: dict[str, float] = {"svd": 0.7, "dct": 0.95}
"""The paper's."""
DEFAULT_TOL: dict[str, float] = {"svd": 1e-3, "dct": 1e-6}
"""For the SVD below the condition numbers the paper reports for its inputs; for the DCT at float32's rounding."""
_TOLS: dict[str, tuple[float, float]] = {"svd": FLOORS, "dct": (1e-12, 0.1)}


@dataclass(frozen=True)
class Graying:
    """One way of graying, as a function on batches of matrices (..., n, d)."""

    kind: str
    eps: float
    tol: float
    power: Rational | None = field(default=None, repr=False, compare=False)
    """How the SVD's kind computes its power; it follows from eps and tol."""

    def __call__(self, x_BND: Tensor) -> Tensor:
        """Gray each matrix; the result has the dtype of `x_BND`.

        In float32 or better whatever autocast says, but for the DCT where the result is rounded to bfloat16.
        """
        if self.eps < 1 and _can_be_read(x_BND) and not x_BND.isfinite().all():
            raise InvalidArgumentError("what is to be grayed holds NaN or Inf: find out where they come from")
        return _grayed(x_BND, self.eps, self.tol, self.power)


def gray(X: Tensor, kind: Kind, eps: float | None = None, *, tol: float | None = None) -> Tensor:
    r"""Gray each matrix of `X`: raise what is small in it, so that it is better conditioned.

    "svd": the singular values s become s (max(s / s_max, tol))^(eps - 1), that is s_max (s / s_max)^eps above the
    floor. Computed by matrix products and inverses: no singular value is off by more than 0.001 s_max, nor by more than
    1 % of itself, for eps from 0.5 on; by 0.003 s_max and 3 % from 0.3 on, 0.02 s_max and 4 % below. "dct": the same
    with the coefficients of the orthonormal 2-D cosine transform in place of the singular values, up to rounding, which
    is raised as well.

    Matrices of zeros stay zeros. Gradients are finite, also where singular values repeat or are 0.

    Args:
        X: matrices (..., n, d) of any floating-point type, which the result has too; computed in float64 for "svd",
            in float32 or better for "dct". On a GPU, where bfloat16 is given or autocast will round to it, and no
            coefficient more than doubles, "dct" has the precision of bfloat16.
        kind: "svd" or "dct".
        eps: the power, in (0, 1]; 1 returns `X` itself. The paper's if None: 0.7 for "svd", 0.95 for "dct".
        tol: the floor, as a share of the largest: from 0.001 to 0.01 for "svd", 0.001 if None; from 1e-12 to 0.1 for
            "dct", 1e-6 if None.

    Raises:
        InvalidArgumentError: an argument out of its range, or NaN or Inf in `X` (not looked for inside torch.compile
            and torch.func).

    Example:
        >>> gray(torch.diag(torch.tensor([4.0, 1.0, 0.25])), "svd", 0.5).diagonal().round(decimals=2)
        tensor([4., 2., 1.])
    """
    eps, tol = _in_range(kind, eps, tol)
    if not isinstance(X, Tensor) or X.ndim < 2 or 0 in X.shape or not X.is_floating_point():
        given = f"{X.dtype} of shape {tuple(X.shape)}" if isinstance(X, Tensor) else type(X).__name__
        raise InvalidArgumentError(
            f"X is {given}: expected floating-point matrices (..., n, d), at least one and none of size 0"
        )
    if _can_be_read(X, on=("cpu", "cuda")) and not X.isfinite().all():
        raise InvalidArgumentError("X holds NaN or Inf: such a matrix cannot be grayed; find out where they come from")
    return _grayed(X, eps, tol, floored_power(eps, tol) if kind == "svd" and eps < 1 else None)


def _grayed(x_BND: Tensor, eps: float, tol: float, power: Rational | None) -> Tensor:
    if eps == 1:
        return x_BND
    doubled_at_most = tol ** (eps - 1) <= 2  # rounding errors among the small coefficients are raised with them
    transformed = gray_by_products if doubled_at_most and _ends_in_bfloat16(x_BND) else gray_by_cosines
    with without_autocast(x_BND):
        if power is not None:
            return gray_by_fractions(x_BND, power).to(x_BND.dtype)
        precise_BND = x_BND.to(torch.promote_types(x_BND.dtype, torch.float32))
        return transformed(precise_BND, eps, tol).to(x_BND.dtype)


def _ends_in_bfloat16(x: Tensor) -> bool:
    """Whether `x`, on a GPU, holds no more than bfloat16 does, or is about to be rounded to it by autocast."""
    if x.device.type != "cuda":
        return False
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    return x.dtype == torch.bfloat16 or (autocast and x.dtype == torch.float32)


def _can_be_read(x: Tensor, on: tuple[str, ...] = ("cpu",)) -> bool:
    """Whether what is in `x` may decide what happens: not within a compiler or torch.func; a GPU would have to wait."""
    return x.device.type in on and not torch.compiler.is_compiling() and not within_transform()


def graying(kind: str, eps: float | None = None, tol: float | None = None) -> Graying:
    """The way of graying with these arguments, once it is sure that they are in range."""
    eps, tol = _in_range(kind, eps, tol)
    return Graying(kind, eps, tol, floored_power(eps, tol) if kind == "svd" and eps < 1 else None)


def _in_range(kind: str, eps: float | None, tol: float | None) -> tuple[float, float]:
    """`eps` and `tol`, or the usual ones, if they can be."""
    if kind not in ("svd", "dct"):
        raise InvalidArgumentError(f"kind={kind!r}: expected 'svd' or 'dct'")
    eps = DEFAULT_EPS[kind] if eps is None else eps
    tol = DEFAULT_TOL[kind] if tol is None else tol
    if isinstance(eps, bool) or not isinstance(eps, Real) or not 0 < eps <= 1:
        raise InvalidArgumentError(f"eps={eps!r}: expected a number above 0 and at most 1, which changes nothing")
    lowest, highest = _TOLS[kind]
    if not isinstance(tol, Real) or not lowest <= tol <= highest:
        raise InvalidArgumentError(f"tol={tol!r}: expected a number from {lowest:g} to {highest:g} for {kind!r}")
    return float(eps), float(tol)
