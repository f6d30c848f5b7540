"""The features of a whole labelled set, one vector per image and layer.

Shapes: N images, width D.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.data import Dataset, ImageSet, open_data, open_loader
from wellposed.data.pictures import Readings
from wellposed.errors import DataError, InvalidArgumentError
from wellposed.evaluation.backbones import Backbone
from wellposed.evaluation.features import Kind, chosen_layers, layer_features
from wellposed.evaluation.labelled import Labelled
from wellposed.families import trunk
from wellposed.runs import tracked

Pool = Literal["summary", "mean"]
_LARGEST_SHAPES = 64
_UNREAD = -(2**40)


def open_for(backbone: Backbone, spec: str, split: str) -> Dataset:
    """The set that `spec` names, at the backbone's image size where it has none of its own.

    `shapes` are drawn at 64 pixels at most; `extract` enlarges them.
    """
    name = spec.partition(":")[0]
    own = backbone.image_size
    sizes = {"folder": own, "pet": own, "shapes": min(own, _LARGEST_SHAPES)}
    return open_data(spec, split, sizes.get(name))


def extract(
    backbone: Backbone,
    data: Dataset,
    layers: Sequence[int] | None = (-1,),
    *,
    kind: Kind = "tokens",
    pool: Pool = "summary",
    batch_size: int = 64,
    workers: int = 4,
    on_error: Literal["raise", "skip"] = "raise",
) -> dict[int, Labelled]:
    """Features of every image of `data`, in its order, for each layer; float32 on the CPU.

    Args:
        backbone: the model.
        data: images of one size; those of another size than the backbone's are resized to it.
        layers: which blocks, from 0; negative ones count from the end; None for all.
        kind: outputs of the blocks, or keys of their attention.
        pool: what stands for an image: what the model's head reads (class token, mean, ...); or the patches' mean.
        batch_size: images that go through the model together.
        workers: processes that read a set which is not in memory.
        on_error: end at an image that cannot be read, or name, count and leave it out.
    """
    if not len(data):
        raise DataError(f"{data.name} holds no image")
    if batch_size < 1:
        raise InvalidArgumentError(f"batch_size={batch_size}: expected at least 1")
    chosen = list(dict.fromkeys(chosen_layers(len(trunk(backbone.model).blocks), layers)))
    channels = data.image_shape[0]
    loader = open_loader(
        data if on_error == "raise" or isinstance(data, ImageSet) else _Tolerant(data),
        min(batch_size, len(data)),
        device=backbone.device,
        shuffle=False,
        workers=workers,
        mean=torch.zeros(channels, 1, 1),
        std=torch.ones(channels, 1, 1),
    )
    vectors: dict[int, list[Tensor]] = {layer: [] for layer in chosen}
    labels = []
    batches = iter(loader)
    for _ in tracked(range(len(loader)), f"features of {data.name}"):
        images_BCHW, labels_B = next(batches)
        found = layer_features(backbone.model, backbone.standardized(fitted(images_BCHW, backbone)), chosen, kind)
        for layer, features in zip(chosen, found, strict=True):
            vectors[layer].append((features.summary_BD if pool == "summary" else features.patches_BND.mean(1)).cpu())
        labels.append(labels_B.cpu())
    labels_N = torch.cat(labels)
    was_read_N = labels_N != _UNREAD if on_error == "skip" else torch.ones_like(labels_N, dtype=torch.bool)
    _report_unread(data, (~was_read_N).nonzero().flatten().tolist())
    labels_N = labels_N[was_read_N]
    _check_labels(labels_N, data)
    return {
        layer: Labelled.checked(f"block {layer} on {data.name}", torch.cat(parts)[was_read_N].float(), labels_N)
        for layer, parts in vectors.items()
    }


class _Tolerant:
    """A set in which what cannot be read is black, with a label that no class has."""

    def __init__(self, data: Dataset) -> None:
        self._data = data
        self.name, self.classes, self.image_shape = data.name, data.classes, data.image_shape

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            return self._data[index]
        except DataError:
            return torch.zeros(self.image_shape, dtype=torch.uint8), _UNREAD


def _report_unread(data: Dataset, indices: Sequence[int]) -> None:
    """Say which images of the set were left out, and why."""
    readings = Readings("skip")
    for index in indices[:3]:
        readings.read(partial(data.__getitem__, index))
    if indices:
        named = "; ".join(readings.problems)
        print(f"wellposed: {len(indices)} images cannot be read and are left out: {named}", file=sys.stderr)
    if len(indices) == len(data):
        raise DataError(f"no image of {data.name} can be read: {readings.problems[0]}")


def fitted(images_BCHW: Tensor, backbone: Backbone) -> Tensor:
    """Images in [0, 1] at the backbone's size, by antialiased bicubic resampling where they are not."""
    size = (backbone.image_size, backbone.image_size)
    if tuple(images_BCHW.shape[-2:]) == size:
        return images_BCHW
    return F.interpolate(images_BCHW, size, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)


def _check_labels(labels_N: Tensor, data: Dataset) -> None:
    wrong = labels_N[(labels_N < 0) | (labels_N >= len(data.classes))]
    if len(wrong):
        raise DataError(f"{data.name} holds the label {int(wrong[0])}: expected 0 to {len(data.classes) - 1}")
