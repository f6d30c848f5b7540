"""What a study of compressed adapters found: scores over bytes, and how many bytes one curve saves against another."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import mean

from wellposed.studies.adapter_config import AdapterCell
from wellposed.studies.adapter_result import NAMES
from wellposed.studies.compression_config import HALF, SPLIT, CompressionStudy, Copy
from wellposed.studies.compression_rates import RATE_COLUMNS, Point, Saving
from wellposed.studies.compression_running import CopiesOutcome
from wellposed.studies.low_rank import spread

SCHEMES = {
    "kmeans": "k-means",
    "uniform": "uniform",
    "normal": "normal float",
    "stretched": "stretched k-means",
    HALF: "float16",
    SPLIT: "SVD split",
}
COLUMNS = ("method", "r", "held as", "bits", "KB", "score", "error of dW")


@dataclass(frozen=True)
class CompressionResult:
    """What a study of compressed adapters found, and its page."""

    config: CompressionStudy
    outcomes: tuple[CopiesOutcome, ...]
    report: Path
    facts: dict[str, str]
    missing: Mapping[AdapterCell, str] = field(default_factory=dict)
    """Adapters that no copies were made of, and why."""

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
        of_seed = {seed: [each.copies[str(copy)] for each in own if each.cell.seed == seed] for seed in seeds}
        scores = {seed: mean(point for each in of_seed[seed] for point in each.points.values()) for seed in seeds}
        return Point(
            method, rank, copy, mean(each.nbytes for each in copied), mean(each.error for each in copied), scores
        )

    @property
    def seeds(self) -> list[int]:
        """All that some point has a score of."""
        return sorted({each.cell.seed for each in self.outcomes})

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

    def against_lora(self) -> list[Saving]:
        """Every other method against LoRA: by bits, and all."""
        others = [method for method in self.methods if method != "lora" and "lora" in self.methods]
        return [each for other in others for each in self._savings(f"{NAMES[other]} against LoRA", other, "lora")]

    def between_schemes(self) -> list[Saving]:
        """The first scheme against others, and LoRA split against LoRA: by bits, and all."""
        first, found = SCHEMES[self.config.schemes[0]], list[Saving]()
        for scheme in self.config.schemes[1:]:
            for method in self.methods:
                found += self._savings(f"{NAMES[method]}, {first} against {SCHEMES[scheme]}", method, method, scheme)
        if split := self.curve("lora", SPLIT):
            for bits in (*self.config.bits, None):
                found.append(Saving(f"LoRA, SVD split against {first}", bits, split, self.curve("lora", bits=bits)))
        return found

    def _savings(self, name: str, method: str, other: str, other_scheme: str | None = None) -> list[Saving]:
        return [
            Saving(name, bits, self.curve(method, bits=bits), self.curve(other, other_scheme, bits))
            for bits in (*self.config.bits, None)
        ]

    def rates(self) -> list[tuple[str, ...]]:
        """A row per comparison and number of bits, and one of all bits."""
        return [saving.row() for saving in (*self.against_lora(), *self.between_schemes())]

    def rate_columns(self) -> tuple[str, ...]:
        """The headings of `rates`."""
        return RATE_COLUMNS

    def rows(self, *, brief: bool = False) -> list[tuple[str, ...]]:
        """A row per point: the mean score over seeds and, unless `brief`, from the least to the largest."""
        return [
            (
                *(NAMES[point.method], str(point.rank), SCHEMES[point.copy.scheme]),
                "2 and 1" if point.copy.scheme == SPLIT else str(point.copy.bits),
                f"{point.nbytes / 1e3:.1f}",
                (f"{mean(point.scores):.1f}" if brief else spread(point.scores, ".1f")) + self._fewer(point),
                "" if point.copy.scheme == HALF else f"{point.error:.3f}",
            )
            for point in self.points
        ]

    def _fewer(self, point: Point) -> str:
        count = len(self.seeds)
        return "" if len(point.scores) == count else f", {len(point.scores)} of {count} seeds"
