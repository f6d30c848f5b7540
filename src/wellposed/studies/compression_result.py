"""What a study of compressed adapters found: scores over bytes, and how many bytes one curve saves against another."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean

from wellposed.compression import bd_rate, dominated
from wellposed.errors import InvalidArgumentError
from wellposed.studies.adapter_result import NAMES
from wellposed.studies.compression_config import HALF, SPLIT, CompressionStudy, Copy
from wellposed.studies.compression_running import CopiesOutcome
from wellposed.studies.low_rank import spread

SCHEMES = {"kmeans": "k-means", "uniform": "uniform", "normal": "normal float", HALF: "float16", SPLIT: "SVD split"}
COLUMNS = ("method", "r", "held as", "bits", "KB", "score", "error of dW")


@dataclass(frozen=True)
class Point:
    """One method at one rank in one kind of copy: means over sets, a score per seed."""

    method: str
    rank: int
    copy: Copy
    nbytes: float
    error: float
    scores: list[float]

    @property
    def place(self) -> tuple[float, float]:
        """Bytes, and the mean score."""
        return self.nbytes, mean(self.scores)


@dataclass(frozen=True)
class CompressionResult:
    """What a study of compressed adapters found, and its page."""

    config: CompressionStudy
    outcomes: tuple[CopiesOutcome, ...]
    report: Path
    facts: dict[str, str]

    @cached_property
    def points(self) -> list[Point]:
        """Every method at every rank in every copy."""
        keys = {(each.cell.method, each.cell.rank) for each in self.outcomes}
        order = sorted(keys, key=lambda key: (list(NAMES).index(key[0]), key[1]))
        return [self._point(method, rank, copy) for method, rank in order for copy in self.config.copies(method)]

    def _point(self, method: str, rank: int, copy: Copy) -> Point:
        own = [each for each in self.outcomes if (each.cell.method, each.cell.rank) == (method, rank)]
        copied = [each.copies[str(copy)] for each in own]
        seeds = dict.fromkeys(each.cell.seed for each in own)
        of_seed = [[each.copies[str(copy)] for each in own if each.cell.seed == seed] for seed in seeds]
        scores = [mean(point for each in copies for point in each.points.values()) for copies in of_seed]
        return Point(
            method, rank, copy, mean(each.nbytes for each in copied), mean(each.error for each in copied), scores
        )

    @property
    def methods(self) -> list[str]:
        """In the order of tables."""
        there = {point.method for point in self.points}
        return [method for method in NAMES if method in there]

    def curve(self, method: str, scheme: str | None = None, bits: int | None = None) -> list[Point]:
        """The points of a method by bytes: of one scheme, the first if None, and one number of bits or all."""
        chosen = scheme or self.config.schemes[0]
        own = [point for point in self.points if point.method == method and point.copy.scheme == chosen]
        return sorted((point for point in own if bits in {None, point.copy.bits}), key=lambda point: point.nbytes)

    def saved(self, curve: Sequence[Point], reference: Sequence[Point]) -> str:
        """The BD-rate in percent, less is better; nothing where the curves share no range of scores."""
        try:
            rate = bd_rate([point.place for point in curve], [point.place for point in reference])
        except InvalidArgumentError:
            return ""
        return f"{100 * rate:+.1f} %"

    def rates(self) -> list[tuple[str, ...]]:
        """A row per comparison: over the ranks at each number of bits, and of all points of both."""
        found = []
        for method in self.methods:
            if method != "lora" and "lora" in self.methods:
                found.append(self._rates(f"{NAMES[method]} against LoRA", method, None, "lora", None))
        first = SCHEMES[self.config.schemes[0]]
        for scheme in self.config.schemes[1:]:
            for method in self.methods:
                found.append(
                    self._rates(f"{NAMES[method]}, {first} against {SCHEMES[scheme]}", method, None, method, scheme)
                )
        if split := self.curve("lora", SPLIT):
            cells = [self.saved(split, self.curve("lora", bits=bits)) for bits in self.config.bits]
            found.append((f"LoRA, SVD split against {first}", *cells, self.saved(split, self.curve("lora"))))
        return found

    def _rates(
        self, name: str, method: str, scheme: str | None, other: str, other_scheme: str | None
    ) -> tuple[str, ...]:
        cells = [
            self.saved(self.curve(method, scheme, bits), self.curve(other, other_scheme, bits))
            for bits in (*self.config.bits, None)
        ]
        return (name, *cells)

    def rate_columns(self) -> tuple[str, ...]:
        """The headings of `rates`."""
        return ("bytes at equal score", *(f"{bits} bit{'s' * (bits > 1)}" for bits in self.config.bits), "all")

    def rows(self, *, brief: bool = False) -> list[tuple[str, ...]]:
        """A row per point: the mean score over seeds and, unless `brief`, from the least to the largest."""
        return [
            (
                *(NAMES[point.method], str(point.rank), SCHEMES[point.copy.scheme]),
                "2 and 1" if point.copy.scheme == SPLIT else str(point.copy.bits),
                f"{point.nbytes / 1e3:.1f}",
                f"{mean(point.scores):.1f}" if brief else spread(point.scores, ".1f"),
                "" if point.copy.scheme == HALF else f"{point.error:.3f}",
            )
            for point in self.points
        ]

    def left_out(self) -> dict[str, int]:
        """How many points of each method's curve of all points another one dominates, by its name."""
        return {NAMES[method]: dominated([each.place for each in self.curve(method)]) for method in self.methods}
