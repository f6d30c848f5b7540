"""How large a difference must be before it is more than the chance of the seed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, variance


@dataclass(frozen=True)
class Chance:
    """How far runs differ that differ in their seed alone; the same for all that are compared."""

    deviation: float
    freedom: int

    def margin(self, one: int, other: int) -> float:
        """What the means of so many runs each must differ by, to be told apart at 95 % (Student's t, two-sided)."""
        from scipy.stats import t

        return float(t.ppf(0.975, self.freedom)) * self.deviation * sqrt(1 / one + 1 / other)


def pooled(groups: Iterable[Sequence[float]]) -> Chance | None:
    """The spread within the groups, each of runs that differ in their seed; None where no group has two of them.

    Example:
        >>> chance = pooled([[1.0, 2.0], [5.0, 6.0], [3.0]])
        >>> chance.freedom, round(chance.deviation, 3), round(chance.margin(2, 2), 2)
        (2, 0.707, 3.04)
    """
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    if not freedom:
        return None
    return Chance(sqrt(sum((len(group) - 1) * variance(group) for group in several) / freedom), freedom)


def is_sure(one: Sequence[float], other: Sequence[float], chance: Chance | None) -> bool:
    """Whether the means of two groups differ by more than the chance of the seed; never, where that is not known."""
    return chance is not None and abs(mean(one) - mean(other)) > chance.margin(len(one), len(other))


def judged(one: Sequence[float], other: Sequence[float], chance: Chance | None) -> str:
    """The same in words."""
    return "more than seeds make" if is_sure(one, other, chance) else "which seeds alone could make"
