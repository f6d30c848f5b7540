"""Small pictures as inline SVG, drawn in the colour of the text around them so that they suit light and dark pages."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from wellposed.runs import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 3.5, 2.6
_INK = "#010203"  # stands for the colour of the text
_MOST_INSIDE = 6  # names that fit among the curves; more stand below them


@dataclass(frozen=True)
class Line:
    """A named curve."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    style: str = "-"
    """Of matplotlib: "-", "--", "-." or ":"."""
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """The ends of a bar at each point, or none."""


def line_panel(title: str, lines: Sequence[Line], *, x: str, y: str, log: bool = False) -> str:
    """Curves over one another, on a logarithmic scale if `log`."""
    return Curves(title, lines, x, y, log).svg()


@dataclass(frozen=True)
class Curves:
    """A panel of curves over one another."""

    title: str
    lines: Sequence[Line]
    x: str
    y: str
    log: bool = False
    """On a logarithmic scale."""
    whole: bool = True
    """Ticks at whole numbers only, of blocks and epochs."""
    log_x: bool = False
    """On a logarithmic scale from left to right too, with a mark at each point."""
    marked: bool = False
    """A mark at each point of the lines that are not broken, whatever the scale."""
    floor: float | None = None
    """Where the panel ends below, whatever lies under it."""

    def svg(self) -> str:
        """As inline SVG."""
        with _panel(self.title, height=HEIGHT + self.below) as (axes, drawn):
            self.draw(axes)
        return drawn[0]

    @property
    def below(self) -> float:
        """Inches that the names take below the panel, where they are too many to stand in it."""
        return 0.14 * -(-len(self.lines) // 2) if len(self.lines) > _MOST_INSIDE else 0.0

    def draw(self, axes: Any) -> None:
        """On axes of matplotlib."""
        for line in self.lines:
            is_marked = self.log_x or (self.marked and line.style == "-")
            marker = "o" if len(line.x) == 1 or is_marked else ""
            how = {"linewidth": 1.8, "marker": marker, "markersize": 4 if is_marked else 6}
            axes.plot(line.x, line.y, line.style, color=line.colour, label=line.name, **how)
            if line.low:
                axes.vlines(line.x, line.low, line.high, colors=line.colour, linewidth=1, alpha=0.6)
        axes.set(xlabel=self.x, ylabel=self.y, yscale="log" if self.log else "linear")
        if self.floor is not None:
            top = max(y for line in self.lines for y in line.y)
            axes.set_ylim(self.floor, top + 0.05 * (top - self.floor))
        if self.log_x:
            _log_ticks(axes, both=self.log)
        if self.whole and not self.log_x:
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25, linewidth=0.5, color=_INK)
        place = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.2), "ncols": 2} if self.below else {}
        axes.legend(fontsize=7, frameon=False, labelcolor=_INK, **place)


def _log_ticks(axes: Any, *, both: bool) -> None:
    """Few ticks from left to right, as 20 k or 5 M, and upwards too if `both`."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    for axis in (axes.xaxis, axes.yaxis) if both else (axes.xaxis,):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(EngFormatter())
        axis.set_minor_formatter(NullFormatter())


def curves_figure(
    panels: Sequence[Curves], *, across: int, share_y: bool = False, path: str | Path | None = None
) -> "Figure":
    """Panels side by side on white, `across` in a row, also written to the picture file `path` if given."""
    from matplotlib.figure import Figure

    down = -(-len(panels) // across)
    width, height = 1.3 * WIDTH * min(across, len(panels)), 1.2 * HEIGHT + max(panel.below for panel in panels)
    figure = Figure(figsize=(width, height * down), layout="constrained")
    grid = list(figure.subplots(down, min(across, len(panels)), sharey=share_y, squeeze=False).flat)
    for axes, panel in zip(grid, panels, strict=False):
        axes.set_title(panel.title)
        axes.spines[["top", "right"]].set_visible(False)
        panel.draw(axes)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if path is not None:
        with atomic_path(Path(path)) as file:
            figure.savefig(file, format=Path(path).suffix.removeprefix(".") or "png", dpi=150)
    return figure


def heat_panel(
    title: str, values: ArrayLike, *, x: str, y: str, low: float, high: float, label: str = "", first_row: int = 0
) -> str:
    """A matrix in colours from `low` to `high`, its rows counted from `first_row`."""
    with _panel(title) as (axes, drawn):
        rows, columns = np.shape(values)
        extent = (-0.5, columns - 0.5, first_row + rows - 0.5, first_row - 0.5)
        picture = axes.imshow(
            values, extent=extent, aspect="auto", vmin=low, vmax=high, cmap="viridis", interpolation="nearest"
        )
        axes.set(xlabel=x, ylabel=y)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        bar = axes.figure.colorbar(picture, ax=axes, shrink=0.9)
        bar.outline.set_edgecolor(_INK)
        bar.ax.tick_params(colors=_INK, labelsize=7)
        bar.set_label(label, color=_INK, fontsize=8)
    return drawn[0]


def image_panel(title: str, image: ArrayLike, *, low: float | None = None, high: float | None = None) -> str:
    """A small picture without axes; grey values are shown from `low` to `high`."""
    with _panel(title, width=1.25, height=1.45) as (axes, drawn):
        axes.imshow(image, cmap="viridis" if low is not None else "gray", vmin=low, vmax=high, interpolation="nearest")
        axes.set_axis_off()
    return drawn[0]


@contextmanager
def _panel(title: str, width: float = WIDTH, height: float = HEIGHT) -> Iterator[tuple[Any, list[str]]]:
    """Axes to draw on; afterwards the list holds the SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK)
    style = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 8, "axes.titlesize": 9, **ink}
    drawn: list[str] = []
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        axes.set_facecolor("none")
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        yield axes, drawn
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn.append(_inline(file.getvalue(), title))


def _inline(svg: str, title: str) -> str:
    """The `svg` element alone, in the colour of the text, for people who see it and for those who have it read out."""
    from html import escape

    element = svg[svg.index("<svg") :].replace(_INK, "currentColor").strip()
    return re.sub(r"<svg ", f'<svg role="img" aria-label="{escape(title, quote=True)}" ', element, count=1)
