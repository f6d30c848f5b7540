"""Bytes at equal score: one curve of a study of compressed adapters against another, and how far seeds move that."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from wellposed.compression import bd_rate, dominated
from wellposed.errors import InvalidArgumentError
from wellposed.studies.compression_config import Copy

RATE_COLUMNS = ("compared", "bits", "bytes at equal score", "seed by seed", "points left out")
_WORDS = ("all scores higher", "all scores lower", "no range in common")
_Places = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Point:
    """One method at one rank in one kind of copy: means over sets."""

    method: str
    rank: int
    copy: Copy
    nbytes: float
    error: float
    by_seed: dict[int, float]
    """The score of each seed."""

    @property
    def scores(self) -> list[float]:
        """One per seed."""
        return list(self.by_seed.values())

    @property
    def place(self) -> tuple[float, float]:
        """Bytes, and the mean score."""
        return self.nbytes, mean(self.scores)


@dataclass(frozen=True)
class Saving:
    """How many bytes a curve needs against another, at one number of bits or over all."""

    name: str
    bits: int | None
    curve: Sequence[Point]
    reference: Sequence[Point]

    @property
    def of_means(self) -> str:
        """The BD-rate of the means over seeds in percent, less is better; or which curve lies above."""
        found = _compared(*([point.place for point in points] for points in (self.curve, self.reference)))
        return found if isinstance(found, str) else f"{found:+.1f} %"

    @property
    def over_seeds(self) -> str:
        """From the least to the largest BD-rate of one seed's curve against the same seed's."""
        seeds = sorted(_seeds(self.curve) & _seeds(self.reference))
        if len(seeds) < 2:
            return "one seed" if seeds else "no seed in common"
        found = [_compared(_of_seed(self.curve, seed), _of_seed(self.reference, seed)) for seed in seeds]
        rates = [each for each in found if not isinstance(each, str)]
        told = []
        if rates:
            ends = dict.fromkeys(f"{pick(rates):+.1f}" for pick in (min, max))
            count = f"{len(rates)} of {len(seeds)}" if len(rates) < len(seeds) else len(seeds)
            told.append(f"{' to '.join(ends)} % over {count} seeds")
        told += [f"{word} in {found.count(word)} of {len(seeds)} seeds" for word in _WORDS if word in found]
        return ", ".join(told)

    @property
    def left_out(self) -> str:
        """How many points of the curve and of its reference another one of it dominates; nothing if none is."""
        counts = [dominated([point.place for point in points]) for points in (self.curve, self.reference)]
        sizes = len(self.curve), len(self.reference)
        shown = " and ".join(f"{count} of {size}" for count, size in zip(counts, sizes, strict=True))
        return shown if any(counts) else ""

    def row(self) -> tuple[str, ...]:
        """Under RATE_COLUMNS."""
        bits = "all" if self.bits is None else str(self.bits)
        return self.name, bits, self.of_means, self.over_seeds, self.left_out


def _compared(curve: _Places, reference: _Places) -> float | str:
    """The BD-rate in percent, or in words how the curves lie that have none."""
    try:
        return 100 * bd_rate(curve, reference)
    except InvalidArgumentError:
        (low, high), (reference_low, reference_high) = _reach(curve), _reach(reference)
        return _WORDS[0 if low > reference_high else 1 if high < reference_low else 2]


def _reach(curve: _Places) -> tuple[float, float]:
    """The least and the largest score of the points that none dominates."""
    return min(curve, key=lambda point: (point[0], -point[1]))[1], max(score for _, score in curve)


def _seeds(points: Sequence[Point]) -> set[int]:
    return {seed for point in points for seed in point.by_seed}


def _of_seed(points: Sequence[Point], seed: int) -> _Places:
    return [(point.nbytes, point.by_seed[seed]) for point in points if seed in point.by_seed]
