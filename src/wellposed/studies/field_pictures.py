"""What a comparison of ranks shows: a table, quality over rank and over bytes, and pictures under a slider."""

from collections.abc import Sequence

from wellposed.fields.results import FITTED, TRUTH, FieldResult
from wellposed.reporting import Curves, Line, Section
from wellposed.reporting.slider import slider_panel

_COLOURS = {"full": "#7a7f85", "low-rank": "#4477aa", "sine": "#cc3311"}
_UNITS = {"psnr": "PSNR, dB", "ssim": "SSIM", "iou": "IoU"}


def columns_of(results: Sequence[FieldResult]) -> list[str]:
    """The headings of the table."""
    scores = [_UNITS[name] for name in results[0].scores]
    return ["layers", "parameters", "of full rank", "bytes", *scores, "seconds"]


def rows_of(results: Sequence[FieldResult]) -> list[list[str]]:
    """A row for each run."""
    return [
        [
            *(result.name, f"{result.parameters:,}", f"{result.parameters / result.full_parameters:.1%}"),
            f"{result.bytes:,}",
            *(_shown(name, value) for name, value in result.scores.items()),
            f"{result.seconds:.0f}",
        ]
        for result in results
    ]


def lead(results: Sequence[FieldResult]) -> str:
    """What came out, in a sentence or two."""
    main = next(iter(results[0].scores))
    pairs = _pairs(results)
    if not pairs:
        best = max(results, key=lambda result: result.scores[main])
        return f"Best: {best.name}, {_with_unit(main, best.scores[main])}."
    gains = [(sine.rank, sine.scores[main] - low.scores[main]) for low, sine in pairs]
    listed = ", ".join(f"{_with_unit(main, gain, '+')} at k = {rank}" for rank, gain in gains)
    full = next((result for result in results if result.rank is None), None)
    said = f"With as many parameters, the sine changes the {main.upper().replace('IOU', 'IoU')} by {listed}."
    lost = [rank for rank, gain in gains if gain <= 0]
    said += f" It does not win at k = {', '.join(map(str, lost))}." if lost else ""
    return said if full is None else f"{said} Full rank has {_with_unit(main, full.scores[main])}."


def rank_curves(results: Sequence[FieldResult]) -> list[Curves]:
    """The main score over the rank, and over the bytes of the weights file."""
    main = next(iter(results[0].scores))
    over_rank, over_bytes = [], []
    ranks = [result.rank for result in results if result.rank is not None]
    for kind, colour in _COLOURS.items():
        chosen = [result for result in results if result.kind == kind]
        if not chosen:
            continue
        scores = [result.scores[main] for result in chosen]
        over_bytes.append(Line(kind, [float(result.bytes) for result in chosen], scores, colour))
        if kind != "full":
            over_rank.append(Line(kind, [float(result.rank or 0) for result in chosen], scores, colour))
        elif ranks:
            over_rank.append(Line(kind, [min(ranks), max(ranks)], scores * 2, colour, "--"))
    curves = [Curves("Quality over rank", over_rank, "rank k", _UNITS[main], marked=True)] if over_rank else []
    return [*curves, Curves("Quality over size", over_bytes, "bytes of the weights file", _UNITS[main], log_x=True)]


def sections(results: Sequence[FieldResult]) -> list[Section]:
    """The parts of the page."""
    shown = [
        Section(
            "Quality, size and time",
            "The rank k is that of the hidden layers; low-rank and sine layers of one rank have as many parameters.",
            [curves.svg() for curves in rank_curves(results)] if len(results) > 1 else [],
            columns=columns_of(results),
            rows=rows_of(results),
            across=2,
        )
    ]
    pairs = [
        slider_panel(f"k = {low.rank}", *((_caption(each), each.out / FITTED) for each in (low, sine)))
        for low, sine in _pairs(results)
    ]
    if pairs:
        shown.append(Section("Low-rank or sine", "Move the handle: both have as many parameters.", pairs, across=2))
    truth = ("the original", results[0].out / TRUTH)
    alone = [slider_panel(each.name, truth, (_caption(each), each.out / FITTED)) for each in results]
    return [*shown, Section("Beside the original", "Left of the handle is what was to be fitted.", alone, across=2)]


def _pairs(results: Sequence[FieldResult]) -> list[tuple[FieldResult, FieldResult]]:
    """Low-rank and sine of the same rank."""
    low = {result.rank: result for result in results if result.kind == "low-rank"}
    return [(low[each.rank], each) for each in results if each.kind == "sine" and each.rank in low]


def _caption(result: FieldResult) -> str:
    main = next(iter(result.scores))
    return f"{result.name}: {_with_unit(main, result.scores[main])}, {result.bytes:,} bytes"


def _with_unit(name: str, value: float, sign: str = "") -> str:
    return f"{value:{sign}.2f} dB" if name == "psnr" else f"{value:{sign}.4f}"


def _shown(name: str, value: float) -> str:
    return f"{value:.2f}" if name == "psnr" else f"{value:.4f}"
