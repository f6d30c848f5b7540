"""What every set of labelled images offers."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Dataset(Protocol):
    """Images of one size with a class each."""

    @property
    def name(self) -> str:
        """The set's name, as `open_data` knows it."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their numbers."""
        ...

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The image, uint8 (channels, height, width), and its class."""
        ...


@dataclass(frozen=True)
class ImageSet:
    """A set that is wholly in memory.

    Shapes: images_NCHW uint8, labels_N int64; where the set knows its objects, masks_NHW bool and boxes_N4 int64
    (left, top, right, bottom; the last two exclusive).
    """

    name: str
    classes: tuple[str, ...]
    images: Tensor
    labels: Tensor
    masks: Tensor | None = None
    boxes: Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.images.shape[1:]
        return channels, height, width


def boxes_of(masks_NHW: Tensor) -> Tensor:
    """The tight box around each mask, (N, 4) as left, top, right, bottom; every mask must hold something."""
    columns, rows = masks_NHW.any(1), masks_NHW.any(2)
    return torch.stack([_first(columns), _first(rows), _last(columns) + 1, _last(rows) + 1], dim=1)


def _first(present: Tensor) -> Tensor:
    return present.int().argmax(1)


def _last(present: Tensor) -> Tensor:
    return present.shape[1] - 1 - _first(present.flip(1))
