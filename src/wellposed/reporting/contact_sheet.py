"""Many small pictures on one sheet: images down, what models make of them across."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

Pixels = NDArray[np.uint8]
"""A picture, (height, width, 3)."""
Upsampling = Literal["nearest", "bicubic"]

CELL, GAP, BETWEEN, MARGIN = 168, 6, 22, 18
_LINE = 20
_PAPER, _INK, _SOFT = "#ffffff", "#1c1e21", "#6b7076"


@dataclass(frozen=True)
class Group:
    """Columns that belong together, such as the layers of one model."""

    title: str
    columns: Sequence[str]
    """What stands above each column."""
    rows: Sequence[Sequence[Pixels]]
    """For each row of the sheet a picture for each column, of any size."""


def contact_sheet(groups: Sequence[Group], names: Sequence[str], upsampling: Upsampling = "nearest") -> "Image":
    """The pictures of all groups on white, a row for each of `names`, which stand below the first picture of a row."""
    from PIL import Image, ImageDraw

    widths = [len(group.columns) * (CELL + GAP) - GAP for group in groups]
    height = 2 * _LINE + len(names) * (CELL + _LINE + GAP)
    width = sum(widths) + BETWEEN * (len(groups) - 1)
    sheet = Image.new("RGB", (width + 2 * MARGIN, height + 2 * MARGIN - GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    large, small = _font(15), _font(13)
    left = MARGIN
    for group, span in zip(groups, widths, strict=True):
        draw.text((left, MARGIN - 4), shortened(group.title, large, span), fill=_INK, font=large)
        for i, title in enumerate(group.columns):
            at = left + i * (CELL + GAP)
            draw.text((at, MARGIN + _LINE - 2), shortened(title, small, CELL), fill=_SOFT, font=small)
            for j, row in enumerate(group.rows):
                picture = enlarged(row[i], CELL, upsampling)
                sheet.paste(picture, (at, MARGIN + 2 * _LINE + j * (CELL + _LINE + GAP)))
        left += span + BETWEEN
    for j, name in enumerate(names):
        below = MARGIN + 2 * _LINE + j * (CELL + _LINE + GAP) + CELL + 1
        draw.text((MARGIN, below), shortened(name, small, CELL), fill=_SOFT, font=small)
    return sheet


def enlarged(pixels: Pixels, size: int, upsampling: Upsampling = "nearest") -> "Image":
    """The picture with `size` pixels a side; one that is larger is reduced with care."""
    from PIL import Image

    picture = Image.fromarray(pixels)
    if max(picture.size) > size:
        return picture.resize((size, size), Image.Resampling.LANCZOS)
    kinds = {"nearest": Image.Resampling.NEAREST, "bicubic": Image.Resampling.BICUBIC}
    return picture.resize((size, size), kinds[upsampling])


def picture_panel(title: str, pixels: Pixels, upsampling: Upsampling = "nearest", across: int = 5) -> str:
    """The picture under its title as inline SVG, with every pixel as it is: the browser enlarges it.

    Unlike `reporting.image_panel` it does not resample, so that a map of 28 x 28 takes two kilobytes. The title is
    legible where `across` panels share the width of a page.
    """
    from PIL import Image

    picture, file = Image.fromarray(pixels), io.BytesIO()
    if max(picture.size) > 2 * CELL:
        picture = enlarged(pixels, 2 * CELL)
    if max(picture.size) >= CELL:  # a photograph
        kind = "jpeg"
        picture.save(file, "JPEG", quality=88)
    else:
        kind = "png"
        picture.save(file, "PNG", optimize=True)
    link = f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
    rendering = "pixelated" if upsampling == "nearest" else "auto"
    text = min(max(2 * across, 10), 22)
    top = round(1.5 * text)
    return (
        f'<svg role="img" aria-label="{escape(title, quote=True)}" viewBox="0 0 {CELL} {CELL + top}" '
        f'xmlns="http://www.w3.org/2000/svg">'
        f'<text x="0" y="{text}" font-size="{text}" fill="currentColor">'
        f"{escape(shortened(title, _font(text), CELL))}</text>"
        f'<image href="{link}" y="{top}" width="{CELL}" height="{CELL}" preserveAspectRatio="none" '
        f'style="image-rendering: {rendering}"/></svg>'
    )


def shortened(text: str, font: "FreeTypeFont", width: int) -> str:
    """`text`, or its beginning and its end with dots between, where it would be wider than `width` pixels."""
    for kept in range(len(text), 0, -1):
        head = (kept + 1) // 2
        shown = text if kept == len(text) else f"{text[:head]}…{text[len(text) - kept + head :]}"
        if font.getlength(shown) <= width:
            return shown
    return ""


def _font(size: int) -> "FreeTypeFont":
    """DejaVu Sans, which comes with matplotlib."""
    import matplotlib as mpl
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)
