"""Pictures beside their true and their predicted masks, as one picture file and as panels of a page."""

import colorsys
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wellposed.evaluation.segmentation.iou import IGNORED
from wellposed.evaluation.segmentation.probe import Example
from wellposed.evaluation.segmentation.views import resized, resized_mask
from wellposed.reporting.contact_sheet import CELL, MARGIN, Group, contact_sheet, picture_panel

if TYPE_CHECKING:
    from PIL.Image import Image

_WHITE = (255, 255, 255)
_COLUMNS = ("picture", "truth", "predicted")
_LINE = 20


def palette(classes: int) -> list[tuple[int, int, int]]:
    """A colour for each class: dark grey for the first, then hues as far from the last ones as can be.

    Example:
        >>> palette(2)
        [(60, 60, 60), (232, 84, 23)]
    """
    colours = [(60, 60, 60)]
    for i in range(1, classes):
        lightness, saturation = ((0.5, 0.82), (0.35, 0.7), (0.7, 0.75))[(i - 1) // 8 % 3]
        parts = colorsys.hls_to_rgb((0.0486 + 0.618034 * (i - 1)) % 1, lightness, saturation)
        colours.append((round(255 * parts[0]), round(255 * parts[1]), round(255 * parts[2])))
    return colours[:classes]


def coloured(mask: Tensor, classes: int) -> Tensor:
    """The mask as a picture, uint8 (H, W, 3); pixels without a class are white."""
    table = torch.tensor([*palette(classes), *[_WHITE] * (256 - classes)], dtype=torch.uint8)
    return table[mask]


def mask_sheet(examples: Sequence[Example], classes: Sequence[str]) -> "Image":
    """A row for each example: the picture, the truth, the prediction; below, the classes that occur."""
    from PIL import Image, ImageDraw, ImageFont

    rows = [[picture.numpy() for picture in _pictures(example, len(classes), CELL)] for example in examples]
    sheet = contact_sheet([Group("", _COLUMNS, rows)], [example.name for example in examples])
    legend, across = _legend(examples, classes), sheet.width // CELL
    whole = Image.new("RGB", (sheet.width, sheet.height + _LINE * -(-len(legend) // across) + MARGIN), "white")
    whole.paste(sheet, (0, 0))
    draw, font = ImageDraw.Draw(whole), ImageFont.load_default(13)
    for i, (name, colour) in enumerate(legend):
        x, y = MARGIN + i % across * CELL, sheet.height + _LINE * (i // across)
        draw.rectangle((x, y, x + 13, y + 13), fill=colour, outline="#6b7076")
        draw.text((x + 20, y - 2), name, fill="#1c1e21", font=font)
    return whole


def mask_panels(examples: Sequence[Example], classes: Sequence[str]) -> list[str]:
    """The same as inline SVG, three for each example."""
    # One pixel less than a photograph has, so that the colours of the masks are kept as they are.
    return [
        picture_panel(title, picture.numpy(), across=3)
        for example in examples
        for title, picture in zip(
            (example.name, *_COLUMNS[1:]), _pictures(example, len(classes), CELL - 1), strict=True
        )
    ]


def legend_panel(examples: Sequence[Example], classes: Sequence[str]) -> str:
    """The colours of the classes that occur, as inline SVG."""
    rows = _legend(examples, classes)
    entries = "".join(
        f'<rect x="0" y="{18 * i + 2}" width="14" height="14" fill="{_hex(colour)}" stroke="currentColor" '
        f'stroke-width="0.5"/><text x="22" y="{18 * i + 13}" font-size="12" fill="currentColor">{escape(name)}</text>'
        for i, (name, colour) in enumerate(rows)
    )
    height = 18 * len(rows) + 4
    return f'<svg role="img" aria-label="colours of the classes" viewBox="0 0 360 {height}">{entries}</svg>'


def _pictures(example: Example, classes: int, size: int) -> list[Tensor]:
    """Picture, truth and prediction, uint8 (size, size, 3)."""
    shown = resized(example.picture, (size, size)).movedim(0, -1).contiguous()
    masks = (example.truth, example.predicted)
    return [shown, *(coloured(resized_mask(mask, (size, size)), classes) for mask in masks)]


def _legend(examples: Sequence[Example], classes: Sequence[str]) -> list[tuple[str, tuple[int, int, int]]]:
    seen = torch.cat([torch.cat([e.truth.flatten(), e.predicted.flatten()]).unique() for e in examples]).unique()
    names, colours = [*classes], palette(len(classes))
    return [("no class", _WHITE) if label == IGNORED else (names[label], colours[label]) for label in seen.tolist()]


def _hex(colour: tuple[int, int, int]) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)
