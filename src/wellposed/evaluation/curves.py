"""How what the features know grows through training: numbers at steps, as a table, a picture and a page."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.errors import InvalidArgumentError
from wellposed.reporting import Curves, Line, Section, curves_figure, page, text_table
from wellposed.runs import atomic_path, writing_to

PNG, HTML = "curve.png", "curve.html"
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44", "#66ccee")


@dataclass(frozen=True)
class Point:
    """What was measured of one checkpoint."""

    step: int
    epoch: float | None
    """None where the folder does not say how long an epoch is."""
    name: str
    """Of the checkpoint."""
    fingerprint: str
    """Of its weights and its recipe."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class Curve:
    """What was measured of every checkpoint of a training, the earliest first."""

    points: tuple[Point, ...]
    skipped: tuple[str, ...] = ()
    """What was wrong with each checkpoint that could not be read."""

    @property
    def measures(self) -> list[str]:
        """The names of what was measured."""
        return list(dict.fromkeys(name for point in self.points for name in point.values))

    @property
    def unit(self) -> str:
        """What the checkpoints are counted in: "epoch" where all of them know theirs, else "step"."""
        return "epoch" if all(point.epoch is not None for point in self.points) else "step"

    def line(self, measure: str, unit: str) -> tuple[list[float], list[float]]:
        """Steps or epochs, and the values of one measure there."""
        points = [point for point in self.points if measure in point.values]
        return [getattr(point, unit) for point in points], [point.values[measure] for point in points]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns, and a row for each checkpoint."""
        rows = [
            [f"{getattr(point, self.unit):g}", *(_shown(point.values.get(name)) for name in self.measures)]
            for point in self.points
        ]
        return [self.unit, *self.measures], rows

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        points = [{**vars(point), "values": dict(point.values)} for point in self.points]
        return {"points": points, "skipped": list(self.skipped)}

    def __str__(self) -> str:
        lines = [text_table(*self.table())]
        if self.skipped:
            lines += [f"{len(self.skipped)} checkpoints were skipped:", *(f"  {problem}" for problem in self.skipped)]
        return "\n".join(lines)


def draw_curves(
    curves: Mapping[str, Curve], out: Path, facts: Mapping[str, str], title: str = "Through training"
) -> tuple[Path, Path]:
    """Write curve.png and curve.html into `out`, a panel for each measure with a line for each training.

    Args:
        curves: by the name of the training.
        out: made where it does not exist.
        facts: how to get the numbers again, as `runs.provenance` has them.
        title: of the page.
    """
    if not any(curve.points for curve in curves.values()):
        raise InvalidArgumentError("there is nothing to draw: expected a curve with a point at least")
    panels = _panels(curves)
    lead = "The model is frozen at every checkpoint, and what its features know is measured."
    sections = [
        Section(
            "Curves", f"What was measured, over the {panels[0].x}s of the training.", [panel.svg() for panel in panels]
        )
    ]
    for name, curve in curves.items():
        columns, rows = curve.table()
        left_out = [f"Left out: {problem}" for problem in curve.skipped]
        sections.append(Section(name, f"{len(rows)} checkpoints.", items=left_out, columns=columns, rows=rows))
    png, html = out / PNG, out / HTML
    with writing_to(out):
        curves_figure(panels, across=min(3, len(panels)), path=png)
        with atomic_path(html) as file:
            file.write_text(page(title, lead, sections, facts), encoding="utf-8")
    return png, html


def _panels(curves: Mapping[str, Curve]) -> list[Curves]:
    drawn = {name: curve for name, curve in curves.items() if curve.points}
    unit = "epoch" if all(curve.unit == "epoch" for curve in drawn.values()) else "step"
    measures = dict.fromkeys(measure for curve in drawn.values() for measure in curve.measures)
    panels = []
    for measure in measures:
        lines = [
            Line(name, *curve.line(measure, unit), _COLOURS[i % len(_COLOURS)])
            for i, (name, curve) in enumerate(drawn.items())
            if measure in curve.measures
        ]
        panels.append(Curves(measure, lines, unit, measure))
    return panels


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
