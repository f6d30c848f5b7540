"""Pictures of all sizes through a model and TokenCut, in batches of one size."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.data.boxes import BoxedPicture
from wellposed.data.pictures import Readings
from wellposed.errors import DataError
from wellposed.evaluation.backbones import Backbone
from wellposed.evaluation.discovery.tokencut import discover
from wellposed.evaluation.features import Kind
from wellposed.evaluation.pictures.chosen_images import spread
from wellposed.evaluation.stored import StoredPatches
from wellposed.families import trunk
from wellposed.runs import tracked


@dataclass(frozen=True)
class Found:
    """What was found in one picture, and what there was to find; boxes in its pixels: left, top, right, bottom."""

    name: str
    size: tuple[int, int]
    """Height and width."""
    truths: Tensor
    """(K, 4)."""
    boxes: Tensor
    """(L, 4), of each block."""
    seconds: float
    """That the cuts of all blocks took."""
    picture: Tensor | None
    """uint8 (3, height, width), where it is kept to be shown."""
    maps: tuple[Tensor, ...]
    """Where it is kept, of each block (height, width): the eigenvector under each pixel."""


@dataclass(frozen=True)
class _Waiting:
    """A picture that was read and waits for others of its size."""

    index: int
    name: str
    picture: Tensor
    fitted: Tensor
    truths: Tensor
    covered: tuple[int, int]
    """Height and width, in the picture's pixels, of what the fitted picture shows."""


def objects_in(
    pictures: Sequence[BoxedPicture],
    backbone: Backbone,
    layers: Sequence[int],
    *,
    kind: Kind = "keys",
    tau: float = 0.2,
    image_size: int | None = None,
    batch_size: int = 64,
    keep: int = 0,
    readings: Readings | None = None,
) -> list[Found]:
    """The object that `discover` finds in each picture that can be read, in their order.

    Args:
        pictures: of any sizes.
        backbone: whose features are cut.
        layers: the blocks to take them from.
        kind: "keys" or "tokens".
        tau: of `discover`.
        image_size: pixels a side of the squares the pictures are resized to; if None they keep their size and are
            filled up to whole patches, at the right and at the bottom, with the mean colour.
        batch_size: pictures of one size that go through the model together.
        keep: for so many of them, from all over the set, keep what is needed to show them.
        readings: what to do with those that cannot be read; the first ends it all if None.
    """
    kept = set(spread(range(len(pictures)), keep))
    found: dict[int, Found] = {}
    for batch in _batches(pictures, backbone, image_size, batch_size, readings or Readings()):
        features = backbone.features(torch.stack([one.fitted for one in batch]), layers, kind)
        found |= _cut(batch, [(layer.patches_BND, layer.grid) for layer in features], tau, kept)
    return [found[index] for index in sorted(found)]


def objects_stored(
    stored: StoredPatches, *, tau: float, batch_size: int, device: torch.device, keep: int = 0
) -> list[Found]:
    """`objects_in` for features on disk, with boxes and size beside them, and images if any are to be kept."""
    height, width = stored.beside["size"].tolist()
    images = stored.beside.get("images")
    if images is not None and images.shape[2:] != (height, width):
        raise DataError(f"images are {tuple(images.shape[2:])} and size is {(height, width)}: expected the same")
    pictures = torch.empty(1, 1, 1, 1).expand(len(stored), 3, height, width) if images is None else images
    kept = set(spread(range(len(stored)), 0 if images is None else keep))
    found: dict[int, Found] = {}
    for start in tracked(range(0, len(stored), batch_size), "cutting"):
        batch = [
            _Waiting(i, str(i), pictures[i], pictures[i], _with_area(stored.beside["boxes"][i]), (height, width))
            for i in range(start, min(start + batch_size, len(stored)))
        ]
        each = (layer[start : start + batch_size].to(device) for layer in stored.layers.values())
        layers = [(patches.flatten(1, 2), (patches.shape[1], patches.shape[2])) for patches in each]
        found |= _cut(batch, layers, tau, kept)
    return list(found.values())


def _with_area(boxes_K4: Tensor) -> Tensor:
    return boxes_K4[(boxes_K4[:, 2:] > boxes_K4[:, :2]).all(1)]


def _cut(
    batch: Sequence[_Waiting], layers: Sequence[tuple[Tensor, tuple[int, int]]], tau: float, kept: set[int]
) -> dict[int, Found]:
    """What `discover` finds in the pictures of a batch, whose features (B, N, D) are given for each layer."""
    start = time.perf_counter()
    cuts = [discover(patches_BND, grid, tau) for patches_BND, grid in layers]
    boxes_LB4 = torch.stack([cut.boxes for cut in cuts]).cpu()  # waits for the device
    seconds = (time.perf_counter() - start) / len(batch)
    found = {}
    for i, one in enumerate(batch):
        grids = [cut.masks.shape[1:] for cut in cuts]
        boxes = [_pixels(box, grid, one) for box, grid in zip(boxes_LB4[:, i], grids, strict=True)]
        shown = one.index in kept
        found[one.index] = Found(
            name=one.name,
            size=(one.picture.shape[1], one.picture.shape[2]),
            truths=one.truths,
            boxes=torch.stack(boxes),
            seconds=seconds,
            picture=one.picture if shown else None,
            maps=tuple(_spread(cut.eigenvectors[i].view(cut.masks.shape[1:]), one) for cut in cuts if shown),
        )
    return found


def whole_boxes(found: Sequence[Found]) -> Tensor:
    """The box that is the whole picture, (B, 4)."""
    return torch.tensor([[0, 0, one.size[1], one.size[0]] for one in found], dtype=torch.float32)


def middle_boxes(found: Sequence[Found]) -> Tensor:
    """The box in the middle of the picture, of its aspect and half its area, (B, 4)."""
    whole_B4 = whole_boxes(found)
    middle_B4 = (whole_B4[:, 2:] / 2).repeat(1, 2)
    return middle_B4 + (whole_B4 - middle_B4) * 0.5**0.5


def filled_up(picture_CHW: Tensor, patch: tuple[int, int], mean_C11: Tensor) -> Tensor:
    """The picture with the mean colour at its right and bottom, so that height and width are whole patches."""
    height, width = picture_CHW.shape[1:]
    rows, columns = -(-height // patch[0]) * patch[0], -(-width // patch[1]) * patch[1]
    colour = (255 * mean_C11).round().to(picture_CHW).expand(len(picture_CHW), 1, 1)
    filled = colour.repeat(1, rows, columns)
    filled[:, :height, :width] = picture_CHW
    return filled


def _batches(
    pictures: Sequence[BoxedPicture], backbone: Backbone, image_size: int | None, batch_size: int, readings: Readings
) -> Iterator[list[_Waiting]]:
    from torchvision.transforms.v2.functional import resize

    patch, mean = trunk(backbone.model).patch, backbone.mean.cpu()
    waiting: dict[torch.Size, list[_Waiting]] = {}
    for index in tracked(range(len(pictures)), backbone.name):
        read = readings.read(pictures[index].read)
        if read is None:
            continue
        picture, truths = read
        if image_size is None:
            fitted = filled_up(picture, patch, mean)
            covered = fitted.shape[1], fitted.shape[2]
        else:
            fitted = resize(picture, [image_size, image_size], antialias=True)
            covered = picture.shape[1], picture.shape[2]
        waiting.setdefault(fitted.shape, []).append(
            _Waiting(index, pictures[index].name, picture, fitted, truths, covered)
        )
        most = max(waiting, key=lambda size: len(waiting[size]))
        too_many = sum(map(len, waiting.values())) > 16 * batch_size  # many sizes, and few pictures of each
        if len(waiting[most]) == batch_size or too_many:
            yield waiting.pop(most)
    yield from waiting.values()


def _pixels(box_4: Tensor, grid: Sequence[int], one: _Waiting) -> Tensor:
    """The box, given in patches, in pixels of the picture, of which it does not leave the frame."""
    (rows, columns), (height, width) = grid, one.covered
    box_4 = box_4.float() * torch.tensor([width / columns, height / rows] * 2)
    height, width = one.picture.shape[1:]
    return torch.minimum(box_4, torch.tensor([width, height] * 2, dtype=torch.float32))


def _spread(map_hw: Tensor, one: _Waiting) -> Tensor:
    """The map under the picture's pixels, (height, width)."""
    spread = F.interpolate(map_hw[None, None].float().cpu(), one.covered, mode="nearest-exact")[0, 0]
    height, width = one.picture.shape[1:]
    return spread[:height, :width]
