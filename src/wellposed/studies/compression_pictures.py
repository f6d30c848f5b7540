"""The words and the pictures of a study of compressed adapters."""

from statistics import mean
from typing import TYPE_CHECKING

from wellposed.reporting import Curves, Line, Section
from wellposed.studies.adapter_pictures import LOOKS
from wellposed.studies.adapter_result import NAMES
from wellposed.studies.compression_config import HALF, SPLIT
from wellposed.studies.compression_rates import Point, Saving
from wellposed.studies.compression_result import COLUMNS, SCHEMES

if TYPE_CHECKING:
    from wellposed.studies.compression_result import CompressionResult

_BYTES = "bytes of the adapter"


def over_bytes(result: "CompressionResult") -> list[Curves]:
    """The score against the bytes, a point per rank: a panel per number of bits, and one of float16."""
    panels = []
    for bits in (*result.config.bits, 16):
        scheme = HALF if bits == 16 else None
        lines = [_line(NAMES[method], result.curve(method, scheme, bits), method) for method in result.methods]
        if bits == 2 and (split := result.curve("lora", SPLIT)):
            lines.append(_line("LoRA, SVD split, 2 and 1 bits (dashed)", split, "lora", "--"))
        title = "float16" if bits == 16 else f"{bits} bit{'s' * (bits > 1)} a number"
        panels.append(Curves(f"{title}: score", lines, _BYTES, "", log_x=True))
    return panels


def over_bits(result: "CompressionResult") -> list[Curves]:
    """The score against the bits, a panel per rank: every method and scheme, down to the lowest of the first scheme."""
    panels = []
    for rank in sorted({point.rank for point in result.points}):
        lines = []
        for method in result.methods:
            for scheme, style in zip(result.config.schemes, ("-", ":", "--", "-."), strict=False):
                own = sorted(
                    (point for point in result.curve(method, scheme) if point.rank == rank),
                    key=lambda point: point.copy.bits,
                )
                name = f"{NAMES[method]}, {SCHEMES[scheme]}"
                x, y = [point.copy.bits for point in own], [mean(point.scores) for point in own]
                lines.append(Line(name, x, y, LOOKS[method][0], style))
        first = [
            point for point in result.points if (point.rank, point.copy.scheme) == (rank, result.config.schemes[0])
        ]
        floor = min(mean(point.scores) for point in first) - 1
        panels.append(Curves(f"rank {rank}: score", lines, "bits a number", "", floor=floor))
    return panels


def lead(result: "CompressionResult") -> str:
    """The first paragraph of the page: what is lost, who needs fewer bytes, and which codebooks."""
    counts = {len(point.scores) for point in result.points}
    seeds = f"{max(counts)} seed{'s' * (max(counts) > 1)}"
    several = f"{min(counts)} to {seeds} a point" if len(counts) > 1 else seeds
    told = [f"Adapters of {result.config.adapters.name}, {several}."]
    if len(counts) > 1:
        told.append("Means of points with fewer seeds are not of the same seeds: trust rates seed by seed.")
    if result.missing:
        told.append(f"Left out, for reasons given below: {', '.join(map(str, result.missing))}.")
    few = min(result.config.bits, key=lambda bits: abs(bits - 2))
    lost = {method: _lost(result, method, few) for method in result.methods}
    told.append(
        f"From float16 to {few} bit{'s' * (few > 1)}, {SCHEMES[result.config.schemes[0]]}, the mean over ranks changes "
        f"by {', '.join(f'{change:+.1f} for {NAMES[method]}' for method, change in lost.items())} points of 100."
    )
    shown = [saving for saving in result.against_lora() if saving.bits in {few, None}]
    for name in dict.fromkeys(saving.name for saving in shown):
        own = [_told(saving) for saving in shown if saving.name == name]
        told.append(f"{name}, bytes at equal score: {', '.join(own)}.")
    others = [saving for saving in result.between_schemes() if saving.bits == few]
    if others:
        listed = "; ".join(f"{saving.name} {saving.of_means}" for saving in others)
        told.append(f"Likewise at {few} bit{'s' * (few > 1)}, means over seeds (seed by seed below): {listed}.")
    if max(counts) == 1:
        told.append("There is one seed: another could change these rates by tens of percent.")
    if any(saving.left_out for saving in shown):
        told.append("Left out of a rate, of its curve and of its reference, are points that another one dominates.")
    return " ".join(told)


def left_out(result: "CompressionResult") -> list[str]:
    """The adapters that no copies were made of, and why."""
    return [f"{cell}: {why}" for cell, why in result.missing.items()]


def sections(result: "CompressionResult") -> list[Section]:
    """What the page shows."""
    return [
        Section(
            "Bytes at equal score",
            "Bjontegaard's delta rate: the mean change in bytes at equal score, less is better; at each number of bits "
            "the curve goes over the ranks, and that of all points over bits and ranks. First of the means over seeds, "
            "then of each seed's curve against the same seed's, from the least to the largest. Points that another of "
            "their curve dominates are left out of both, and counted, first of the one, then of its reference. Where "
            "the scores that are left have no range in common, there is no rate: those of the curve are all higher or "
            "all lower, or touch, or are a single one.",
            columns=result.rate_columns(),
            rows=result.rates(),
        ),
        *([Section("Left out", "No copies were made of these.", items=left_out(result))] if result.missing else []),
        Section(
            "Scores over bytes",
            "Each point is a rank; bars go from the least to the largest of the seeds. Bytes are those of codes, "
            "codebooks and DoRA's magnitudes, without heads that were trained beside the adapter and without headers.",
            [curves.svg() for curves in over_bytes(result)],
        ),
        Section(
            "Scores over bits",
            "Means over seeds. Lines that end at the lower edge go on below it.",
            [curves.svg() for curves in over_bits(result)],
            across=2,
        ),
        Section(
            "All numbers",
            "Scores as in the study of the adapters, the mean over its sets and over seeds and, in brackets, from the "
            "least to the largest seed. The error of dW is relative, the mean over layers.",
            columns=COLUMNS,
            rows=result.rows(),
        ),
    ]


def _line(name: str, points: list[Point], method: str, style: str | None = None) -> Line:
    places = [point.place for point in points]
    ends = [[pick(point.scores) for point in points] for pick in (min, max)]
    x, y = [nbytes for nbytes, _ in places], [score for _, score in places]
    return Line(name, x, y, LOOKS[method][0], style or LOOKS[method][1], low=ends[0], high=ends[1])


def _told(saving: Saving) -> str:
    where = "over all bits" if saving.bits is None else f"at {saving.bits} bit{'s' * (saving.bits > 1)}"
    over_seeds = saving.over_seeds.removeprefix(f"{saving.of_means} ")
    left_out = f"; {saving.left_out} points left out" if saving.left_out else ""
    return f"{saving.of_means} {where} ({over_seeds}{left_out})"


def _lost(result: "CompressionResult", method: str, bits: int) -> float:
    few, half = (result.curve(method, *which) for which in ((None, bits), (HALF, 16)))
    return mean(mean(point.scores) for point in few) - mean(mean(point.scores) for point in half)
