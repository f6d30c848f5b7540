"""A floored fractional power as a sum of simple fractions, which for matrices needs inverses but no decomposition.

With l the square of a singular value divided by the largest one, graying multiplies that singular value by
h(l) = max(l, tol^2)^((eps - 1) / 2). This is fitted by

    r(l) = w_0 + sum_i w_i t_i / (l + t_i) + (u d^2 + v d l) / ((l - a)^2 + b^2)

with d = |a + ib|. The poles -t_i are spread evenly over the decades between the floor and 1, as for the power alone;
the pair a +- ib stands beside the floor, where the power has its kink.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import cos, sin

import torch
from torch import Tensor

SHARE_OF_LARGEST, SHARE_OF_OWN = 1e-3, 1e-2
"""The tolerance: no singular value is off by more than the first of the largest one, nor the second of itself.

It is kept from eps = 0.5 on. Below, where the kink is sharper, errors reach 0.003 and 0.03 down to 0.3, then 0.02 and
0.04.
"""
FLOORS = 1e-3, 1e-2
"""The range of tol for which this holds.

Below it, gradients drown in float64's rounding: those of a matrix that is nearly of rank one are right to half a
percent at 1e-3, and to no more than a quarter at 5e-4.
"""

_LOWEST, _HIGHEST = (3.0, 4.5, 6.0), (0.65, 0.9)  # where the poles begin, over tol^2, and end: the best is taken
_PAIR_DISTANCE, _PAIR_ANGLE = 1.05, 0.75  # of a + ib: over tol^2, and in radians
_FEWEST, _MOST = 2, 7
_ROUNDS = 40
_BEYOND_ONE = 1.01  # the largest singular value is itself known only roughly


@dataclass(frozen=True)
class Rational:
    """The weights and poles of r."""

    constant: float
    poles: tuple[tuple[float, float], ...]
    """Pairs w_i t_i and t_i."""
    pair: tuple[float, float]
    """The numerator's coefficients u d^2 and v d."""
    center: float
    """The a of the pair of poles a +- ib."""
    width: float
    """Its b."""


def floored_power(eps: float, tol: float) -> Rational:
    """The r with the fewest poles that keeps to the tolerance, or the closest of those tried."""
    return _floored_power(eps, tol)


# torch.compiler.assume_constant_result sets no more than this, but imports the compiler and triton with it.
vars(floored_power)["_dynamo_marked_constant"] = True


@lru_cache(maxsize=64)
def _floored_power(eps: float, tol: float) -> Rational:
    closest: tuple[float, Rational] | None = None
    for count in range(_FEWEST, _MOST + 1):
        fits = (_fitted(eps, tol, _spaced(low * tol**2, high, count)) for low, high in product(_LOWEST, _HIGHEST))
        error, rational = min(fits, key=lambda fit: fit[0])
        if closest is None or error < closest[0]:
            closest = error, rational
        if error <= 1:
            break
    assert closest is not None
    return closest[1]


def _fitted(eps: float, tol: float, poles: Tensor) -> tuple[float, Rational]:
    """The r with these real poles, and its largest error in units of the tolerance.

    Least squares, repeated with more weight where the error was large (Lawson's algorithm), comes close to the
    smallest maximal error.
    """
    with torch.device("cpu"), torch.no_grad():
        sigma = torch.cat([torch.zeros(1), _spaced(tol / 30, _BEYOND_ONE, 400), _spaced(tol / 2, tol * 2, 60)]).double()
        target = sigma.clamp(min=tol) ** (eps - 1)
        per_tolerance = torch.maximum(sigma / SHARE_OF_LARGEST, 1 / (target * SHARE_OF_OWN))[:, None]
        distance = _PAIR_DISTANCE * tol**2
        center, width = distance * cos(_PAIR_ANGLE), distance * sin(_PAIR_ANGLE)
        square = sigma.square()
        near_floor = distance / ((square - center).square() + width**2)
        fractions = poles / (square[:, None] + poles)
        columns = [torch.ones_like(square), *fractions.unbind(1), distance * near_floor, square * near_floor]
        basis = torch.stack(columns, 1)
        target = target[:, None]
        emphasis, best = per_tolerance, (float("inf"), torch.empty(0))
        for _ in range(_ROUNDS):
            weights = torch.linalg.lstsq(basis * emphasis, target * emphasis, driver="gelsd").solution
            error = (basis @ weights - target).abs() * per_tolerance
            worst = float(error.max())
            if worst < best[0]:
                best = worst, weights[:, 0]
            emphasis = emphasis * (error / worst + 1e-6) ** 0.25
    constant, *others = best[1].tolist()
    rational = Rational(
        constant=constant,
        poles=tuple((weight * t, t) for weight, t in zip(others[:-2], poles.tolist(), strict=True)),
        pair=(others[-2] * distance**2, others[-1] * distance),
        center=center,
        width=width,
    )
    return best[0], rational


def _spaced(low: float, high: float, count: int) -> Tensor:
    """`count` numbers from `low` to `high`, each the same multiple of the one before."""
    ends = torch.tensor([low, high], dtype=torch.float64).log()
    return torch.linspace(float(ends[0]), float(ends[1]), count, dtype=torch.float64).exp()
