"""What `wellposed evaluate discover` leaves behind: every box as JSON, some pictures with boxes as PNG and HTML."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from wellposed.evaluation.discovery.command import DiscoverResult
from wellposed.evaluation.discovery.corloc import box_iou
from wellposed.evaluation.discovery.finding import Found
from wellposed.reporting import Section, page
from wellposed.reporting.contact_sheet import CELL, Group, Pixels, contact_sheet, picture_panel
from wellposed.runs import atomic_path, write_json, writing_to

JSON, PNG, HTML = "discover.json", "discover.png", "discover.html"
_TRUE, _RIGHT, _WRONG = "#ffffff", "#18b26b", "#e5484d"
_ACROSS = 6  # panels side by side on the page, where the blocks of a picture leave room for another's


def write_found(out: Path, result: DiscoverResult, found: Sequence[Found], facts: Mapping[str, str]) -> tuple[str, ...]:
    """Write all boxes, and the sheet and the page of those pictures that were kept; the paths of what was written."""
    shown = [one for one in found if one.picture is not None]
    blocks = list(result.corloc)
    with writing_to(out):
        write_json(out / JSON, {**result.to_dict(), "found": [_plain(one, blocks) for one in found]})
        if not shown:
            return (str(out / JSON),)
        groups = [
            Group(block, ["box", "cut"], [[_boxed(one, i), _coloured(one.maps[i])] for one in shown])
            for i, block in enumerate(blocks)
        ]
        names = [one.name for one in shown]
        with atomic_path(out / PNG) as file:
            contact_sheet(groups, names).save(file, "PNG", optimize=True)
        with atomic_path(out / HTML) as file:
            file.write_text(_page(result, groups, names, facts), encoding="utf-8")
    return tuple(str(out / name) for name in (JSON, PNG, HTML))


def _plain(one: Found, blocks: Sequence[str]) -> dict[str, object]:
    return {
        "name": one.name,
        "size": list(one.size),
        "truths": one.truths.tolist(),
        "boxes": dict(zip(blocks, one.boxes.tolist(), strict=True)),
        "iou": dict(zip(blocks, box_iou(one.boxes, one.truths).amax(1).tolist(), strict=True)),
    }


def _boxed(one: Found, block: int) -> Pixels:
    """The picture on a square, the true boxes in white and the found one green where it is right and red if not."""
    from PIL import Image, ImageDraw

    assert one.picture is not None
    scale = 2 * CELL / max(one.size)
    picture = Image.fromarray(one.picture.permute(1, 2, 0).contiguous().numpy())
    picture = picture.resize((max(1, round(scale * one.size[1])), max(1, round(scale * one.size[0]))))
    draw = ImageDraw.Draw(picture)
    is_right = bool(box_iou(one.boxes[block][None], one.truths).amax() >= 0.5)
    for box, colour, width in [
        *((truth, _TRUE, 3) for truth in one.truths),
        (one.boxes[block], _RIGHT if is_right else _WRONG, 5),
    ]:
        left, top, right, bottom = (scale * box).round().int().tolist()
        draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour, width=width)
    return _squared(np.asarray(picture))


def _coloured(map_HW: Tensor) -> Pixels:
    from matplotlib import colormaps

    values = map_HW.numpy()
    low, high = values.min(), values.max()
    scaled = (values - low) / (high - low) if high > low else np.full_like(values, 0.5)
    return _squared((255 * colormaps["viridis"](scaled)[..., :3]).round().astype(np.uint8))


def _squared(pixels: Pixels) -> Pixels:
    """The picture in the upper left corner of a white square, so that it keeps its aspect on the sheet."""
    side = max(pixels.shape[:2])
    square = np.full((side, side, 3), 255, dtype=np.uint8)
    square[: pixels.shape[0], : pixels.shape[1]] = pixels
    return square


def _page(result: DiscoverResult, groups: Sequence[Group], names: Sequence[str], facts: Mapping[str, str]) -> str:
    own = 2 * len(groups)
    across = own * max(1, _ACROSS // own)
    panels = [
        picture_panel(f"{name}, {group.title}" if column == "box" else column, pixels, across=across)
        for j, name in enumerate(names)
        for group in groups
        for column, pixels in zip(group.columns, group.rows[j], strict=True)
    ]
    baselines = {"the whole picture": result.whole_picture, "its middle": result.middle}
    sections = [
        Section(
            "How often the box is right",
            f"TokenCut, {result.protocol}; {result.pictures} pictures of {result.data}, "
            f"{result.without_objects} more have no object and are not counted.",
            columns=("box from", "CorLoc"),
            rows=[[name, f"{value:.3f}"] for name, value in {**result.corloc, **baselines}.items()],
        ),
        Section(
            "Pictures from all over the set",
            "White: the true boxes. Green: the box that was found, where it is right; red where it is not. Beside it "
            "the eigenvector that was cut, bright on what was taken for the object.",
            panels,
            across=across,
            strip=True,
        ),
    ]
    if result.skipped:
        sections.append(Section("Skipped", "Pictures that could not be read.", items=result.skipped))
    best = max(result.corloc, key=lambda block: result.corloc[block])
    lead = (
        f"The patch features of {best} put a box around an object in {100 * result.corloc[best]:.1f} % of the "
        f"pictures, without labels; the whole picture as a box would be right in {100 * result.whole_picture:.1f} %."
    )
    return page(f"What {result.model} finds", lead, sections, facts)
