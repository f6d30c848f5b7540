"""What the patches of a model look like, layer by layer: principal components as colours, on a sheet and on a page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellposed.data.pictures import Readings
from wellposed.errors import DataError
from wellposed.evaluation.backbones import Backbone, open_backbone
from wellposed.evaluation.command import ON_DISK
from wellposed.evaluation.features import chosen_layers
from wellposed.evaluation.pictures.chosen_images import chosen_images, spread, squared
from wellposed.evaluation.pictures.command import PcaConfig
from wellposed.evaluation.pictures.pca import PcaScores, pca_scores
from wellposed.evaluation.stored import read_patches
from wellposed.families import trunk
from wellposed.reporting import Section, page, text_table
from wellposed.reporting.contact_sheet import Group, Pixels, contact_sheet, picture_panel
from wellposed.runs import atomic_path, device_named, provenance, tracked, writing_to

PNG, HTML = "pca.png", "pca.html"
_LAYERS = 4  # where none are named


@dataclass(frozen=True)
class PcaResult:
    """Where the pictures are, and how much of the features they show."""

    png: Path
    html: Path
    images: tuple[str, ...]
    """Names of the images, from the top."""
    explained: dict[str, dict[str, float]]
    """For each model and block, the fraction of the features' variance that the three components hold."""
    skipped: tuple[str, ...]
    """What was wrong with each picture that could not be read."""

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        return {
            "png": str(self.png),
            "html": str(self.html),
            "images": list(self.images),
            "explained": self.explained,
            "skipped": list(self.skipped),
        }

    def __str__(self) -> str:
        columns, rows = _explained_table(self.explained)
        lines = [f"{len(self.images)} images", text_table(columns, rows)]
        if self.skipped:
            lines += [f"{len(self.skipped)} pictures were skipped:", *(f"  {problem}" for problem in self.skipped)]
        return "\n".join([*lines, f"written: {self.png}", f"written: {self.html}"])


def shown(config: PcaConfig) -> PcaResult:
    """Look at the images through the model, or both, and write the sheet and the page."""
    device, readings = device_named(config.device), Readings(config.on_error)
    out = config.out or Path("runs") / f"pca-{Path(config.model).name}"
    on_disk = config.model.startswith(ON_DISK)
    images, names, seen = _stored(config, device) if on_disk else _looked_at(config, readings)
    scores: list[PcaScores] = []
    for one in seen:
        like = scores[0] if scores else None
        scores.append(pca_scores(one.patches, one.grids, foreground=config.foreground, like=like))
    titles = _titles([one.name for one in seen], [config.model, config.other or ""])
    groups = [Group("image", [""], [[_pixels(image)] for image in images])]
    groups += [_group(title, one.layers, own) for title, one, own in zip(titles, seen, scores, strict=True)]
    explained = {
        title: dict(zip(one.layers, own.explained.sum(1).tolist(), strict=True))
        for title, one, own in zip(titles, seen, scores, strict=True)
    }
    result = PcaResult(out / PNG, out / HTML, tuple(names), explained, tuple(readings.problems))
    sheet = contact_sheet(groups, names, config.upsampling)
    text = _page(config, groups, result, provenance(device, seed=config.seed))
    with writing_to(out):
        with atomic_path(result.png) as file:
            sheet.save(file, "PNG", optimize=True)
        with atomic_path(result.html) as file:
            file.write_text(text, encoding="utf-8")
    return result


def _opened(config: PcaConfig, source: str, checkpoint: Path | None, model_args: Mapping[str, Any]) -> Backbone:
    return open_backbone(
        source,
        checkpoint=checkpoint,
        model_args=model_args,
        image_size=config.image_size,
        device=config.device,
        data=config.data,
        seed=config.seed,
    )


@dataclass(frozen=True)
class _Seen:
    """The images as one model sees them."""

    name: str
    layers: list[str]
    patches: list[Tensor]
    """Of each layer (B, N, D)."""
    grids: list[tuple[int, int]]


def _looked_at(config: PcaConfig, readings: Readings) -> tuple[Sequence[Tensor], list[str], list[_Seen]]:
    """Images, their names, and their patches in each of the models."""
    opened = [_opened(config, config.model, config.checkpoint, config.model_args)]
    if config.other is not None:
        opened.append(_opened(config, config.other, config.other_checkpoint, config.other_args))
    size = max(backbone.image_size for backbone in opened)
    images, names = chosen_images(config.images, config.data or "shapes", config.count, size, readings)
    return images, names, [_patches(config, backbone, images) for backbone in opened]


def _patches(config: PcaConfig, backbone: Backbone, images: Sequence[Tensor]) -> _Seen:
    depth = len(trunk(backbone.model).blocks)
    layers = spread_layers(depth, _LAYERS) if config.layers is None else chosen_layers(depth, config.layers)
    fitting_BCHW = torch.stack([squared(image, backbone.image_size) for image in images])
    batches = list(fitting_BCHW.split(config.batch_size))
    seen = [backbone.features(batch, layers, config.kind) for batch in tracked(batches, backbone.name)]
    patches = [torch.cat([features.patches_BND for features in layer]) for layer in zip(*seen, strict=True)]
    return _Seen(
        backbone.name, [f"block {layer}" for layer in layers], patches, [features.grid for features in seen[0]]
    )


def _stored(config: PcaConfig, device: torch.device) -> tuple[Sequence[Tensor], list[str], list[_Seen]]:
    """The same of features on disk, which lie beside their images."""
    seen: list[_Seen] = []
    images = torch.empty(0)
    for source in filter(None, (config.model, config.other)):
        stored = read_patches(Path(source.removeprefix(ON_DISK)), "test", "images")
        if seen and not torch.equal(images, stored.beside["images"]):
            raise DataError(f"{config.model} and {source} hold different images: expected the same, to compare them")
        images = stored.beside["images"]
        chosen = spread(range(len(images)), config.count)
        layers = [layer[chosen].to(device) for layer in stored.layers.values()]
        patches, grids = (
            [layer.flatten(1, 2) for layer in layers],
            [(layer.shape[1], layer.shape[2]) for layer in layers],
        )
        seen.append(_Seen(Path(source).name, list(stored.layers), patches, grids))
    return list(images[chosen]), [str(i) for i in chosen], seen


def _page(config: PcaConfig, groups: Sequence[Group], result: PcaResult, facts: Mapping[str, str]) -> str:
    across = sum(len(group.columns) for group in groups)
    panels = [
        picture_panel(_head(group, column, len(groups)) or name, pixels, config.upsampling, across)
        for j, name in enumerate(result.images)
        for group in groups
        for column, pixels in zip(group.columns, group.rows[j], strict=True)
    ]
    shown = "the keys of its attention" if config.kind == "keys" else "the block's output"
    text = f"Every patch is coloured by {shown}. Blocks are counted from 0."
    if len(groups) > 2:
        text += f" The models are {groups[1].title} and {groups[2].title}."
    if config.foreground:
        text += " Black is background: one side of the last layer's first component."
    columns, rows = _explained_table(result.explained)
    sections = [
        Section("Images down, blocks across", text, panels, across=across, strip=True),
        Section(
            "How much of the features this is",
            "The part of the variance of a block's features, over all of these images, that its three components "
            "hold. What is not in them cannot be seen above.",
            columns=columns,
            rows=rows,
        ),
    ]
    if result.skipped:
        text = f"{len(result.skipped)} pictures could not be read."
        sections.append(Section("Skipped", text, items=result.skipped))
    lead = (
        "Patches of like colour have like features. The colours are three principal components of a block's "
        "features over all of these images, so they mean the same in every image; each block is turned to the one "
        "after it, so that they can be followed from block to block."
    )
    titles = [group.title for group in groups[1:]]
    seen = f"{titles[0]} sees" if len(titles) == 1 else f"{' and '.join(title[3:] for title in titles)} see"
    return page(f"Patches as {seen} them", lead, sections, facts)


def spread_layers(depth: int, count: int) -> list[int]:
    """`count` blocks from all over a model with `depth` of them, the last among them.

    Example:
        >>> spread_layers(12, 4)
        [2, 5, 8, 11]
    """
    count = min(count, depth)
    return [math.ceil(i * depth / count) - 1 for i in range(1, count + 1)]


def _titles(names: Sequence[str], sources: Sequence[str]) -> list[str]:
    """What to call the models: by letters too where there are two, and by their whole path where names are the same."""
    if len(names) == 1:
        return list(names)
    names = names if len(set(names)) > 1 else sources
    return [f"{letter}: {name}" for letter, name in zip("AB", names, strict=True)]


def _head(group: Group, column: str, groups: int) -> str:
    """What stands above a picture on the page, where every picture has a title of its own."""
    return f"{group.title[0]} {column}" if groups > 2 and column else column


def _group(title: str, layers: Sequence[str], scores: PcaScores) -> Group:
    pictures_BLHWC = (scores.colours() * 255).round().to(torch.uint8).movedim(0, 1).cpu().numpy()
    return Group(title, list(layers), list(map(list, pictures_BLHWC)))


def _pixels(image_CHW: Tensor) -> Pixels:
    return image_CHW.movedim(0, -1).contiguous().numpy()


def _explained_table(explained: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [name, layer, f"{100 * fraction:.1f} %"] for name, own in explained.items() for layer, fraction in own.items()
    ]
    return ["model", "layer", "variance shown"], rows
