"""Bjontegaard's delta rate: how much more or less memory one curve of quality over size needs than another."""

from collections.abc import Sequence
from math import exp, isfinite

import torch
from torch import Tensor

from wellposed.errors import InvalidArgumentError

Curve = Sequence[tuple[float, float]]
"""Points (rate, quality): bytes and accuracy, say."""


def bd_rate(curve: Curve, reference: Curve) -> float:
    """The mean change in rate at equal quality from `reference` to `curve`: -0.4 is 40 % less.

    Log rate is interpolated as a function of quality, piecewise cubic and monotone (PCHIP, Fritsch and Butland 1984),
    and the difference of the two averaged over the qualities that both curves reach (Bjontegaard 2001, VCEG-M33; with
    PCHIP as JVT uses it). Points that another of their curve dominates, with no more rate and no less quality, are left
    out, as many as `dominated` counts.

    Args:
        curve: points (rate, quality), in any order.
        reference: the same, of what it is compared with.

    Raises:
        InvalidArgumentError: fewer than two points are left of a curve, a rate is not above 0, or no quality is common.

    Example:
        >>> reference = [(1.0, 30.0), (2.0, 33.0), (4.0, 35.0), (8.0, 36.0)]
        >>> round(bd_rate([(0.6 * rate, quality) for rate, quality in reference], reference), 6)
        -0.4
    """
    (rates, qualities), (reference_rates, reference_qualities) = _sorted(curve), _sorted(reference)
    low = max(qualities[0], reference_qualities[0])
    high = min(qualities[-1], reference_qualities[-1])
    if low >= high:
        raise InvalidArgumentError(
            f"qualities {qualities[0]:g} to {qualities[-1]:g} and {reference_qualities[0]:g} to "
            f"{reference_qualities[-1]:g}: expected curves that share a range of qualities"
        )
    own, other = (
        _integral(torch.tensor(at, dtype=torch.float64), torch.tensor(rate, dtype=torch.float64).log(), low, high)
        for at, rate in ((qualities, rates), (reference_qualities, reference_rates))
    )
    return exp((own - other) / (high - low)) - 1


def dominated(curve: Curve) -> int:
    """How many points another one of the curve dominates.

    Example:
        >>> dominated([(1.0, 70.0), (2.0, 69.0), (3.0, 72.0)])
        1
    """
    return len(curve) - len(_front(curve))


def _front(curve: Curve) -> list[tuple[float, float]]:
    """The points that none dominates, from the lowest rate and quality to the highest."""
    front: list[tuple[float, float]] = []
    for rate, quality in sorted(curve, key=lambda point: (point[0], -point[1])):
        if not front or quality > front[-1][1]:
            front.append((rate, quality))
    return front


def _sorted(curve: Curve) -> tuple[list[float], list[float]]:
    points = [(float(rate), float(quality)) for rate, quality in curve]
    if any(not isfinite(rate) or not isfinite(quality) or rate <= 0 for rate, quality in points):
        raise InvalidArgumentError(f"points {points}: expected finite numbers, and rates above 0")
    front = _front(points)
    if len(front) < 2:
        raise InvalidArgumentError(
            f"{len(front)} of {len(points)} points are left without those that another dominates: expected at least 2"
        )
    return [rate for rate, _ in front], [quality for _, quality in front]


def _integral(x: Tensor, y: Tensor, low: float, high: float) -> float:
    """Of the PCHIP interpolant of y over x, ascending, from `low` to `high` within it."""
    h, slope = x.diff(), y.diff() / x.diff()
    d = _derivatives(h, slope)
    total = 0.0
    for i in range(len(h)):
        start, end = max(low, float(x[i])), min(high, float(x[i + 1]))
        if start < end:
            c = float((3 * slope[i] - 2 * d[i] - d[i + 1]) / h[i])
            b = float((d[i] + d[i + 1] - 2 * slope[i]) / h[i] ** 2)
            first, last = start - float(x[i]), end - float(x[i])
            powers = [float(y[i]), float(d[i]), c, b]
            total += sum(p * (last ** (k + 1) - first ** (k + 1)) / (k + 1) for k, p in enumerate(powers))
    return total


def _derivatives(h: Tensor, slope: Tensor) -> Tensor:
    """At the points: weighted harmonic means of the slopes beside them, three-point differences at the two ends."""
    if len(h) == 1:
        return slope.repeat(2)
    left, right = 2 * h[1:] + h[:-1], h[1:] + 2 * h[:-1]
    same_sign = slope[1:] * slope[:-1] > 0
    safe = [torch.where(same_sign, each, 1.0) for each in (slope[:-1], slope[1:])]
    inner = torch.where(same_sign, (left + right) / (left / safe[0] + right / safe[1]), 0.0)
    return torch.cat([_end(h[0], h[1], slope[0], slope[1]), inner, _end(h[-1], h[-2], slope[-1], slope[-2])])


def _end(h0: Tensor, h1: Tensor, slope0: Tensor, slope1: Tensor) -> Tensor:
    d = ((2 * h0 + h1) * slope0 - h0 * slope1) / (h0 + h1)
    if d * slope0 <= 0:
        d = torch.zeros_like(d)
    elif slope0 * slope1 <= 0 and d.abs() > 3 * slope0.abs():
        d = 3 * slope0
    return d[None]
