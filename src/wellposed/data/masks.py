"""Pictures with a class for every pixel: `name` or `name:path`, in the layouts their users have on disk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from wellposed.data.images import ImageSet
from wellposed.data.mask_layouts import IGNORED, LAYOUTS, Files
from wellposed.data.pictures import Readings, read_picture
from wellposed.data.sets import open_data
from wellposed.errors import DataError, InvalidArgumentError

MASKED_SETS = {
    "shapes": "generated: background and ten silhouettes",
    "voc": "voc:PATH with JPEGImages, SegmentationClass and ImageSets/Segmentation; tested on val",
    "voc-aug": "likewise with SegmentationClassAug and trainaug.txt, 10,582 images to train on",
    "ade20k": "ade20k:PATH with images/ and annotations/{training,validation}; 150 classes",
    "coco-stuff": "coco-stuff:PATH with images/ and annotations/ or stuffthingmaps/{train2017,val2017}; 171 classes",
    "pet": "pet:PATH, the trimaps of Oxford-IIIT Pet: background and animal, the border between them ignored",
    "pet-border": "likewise, with the border as a third class",
    "camvid": "camvid:PATH with {train,test} and {train,test}annot, of indices; 11 classes",
    "masks": "masks:PATH with images/, masks/ and the names of the classes, one a line, in classes.txt",
}


@dataclass(frozen=True)
class MaskedSet:
    """Pictures of any size, each with a mask of the same size.

    An item is the picture, uint8 (3, H, W), and the mask, int64 (H, W), of classes from 0 on or `ignored`.
    """

    name: str
    """The set's name, as `open_masks` knows it."""
    split: str
    classes: tuple[str, ...]
    items: tuple[str, ...]
    """What each picture is called."""
    read: Callable[[int], tuple[Tensor, Tensor]]
    """The item of a number, counted before any were left out."""
    numbers: tuple[int, ...]
    """Of the items that are in this set."""
    ignored: int = IGNORED

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.read(self.numbers[index])

    def some(self, count: int) -> "MaskedSet":
        """At most `count` of the items, from all over the set."""
        if count < 1:
            raise InvalidArgumentError(f"count={count}: expected at least 1")
        return self if count >= len(self) else self.only([i * len(self) // count for i in range(count)])

    def only(self, indices: Sequence[int]) -> "MaskedSet":
        """The set with these items alone."""
        return replace(
            self,
            items=tuple(self.items[index] for index in indices),
            numbers=tuple(self.numbers[index] for index in indices),
        )


def open_masks(
    spec: str, split: str = "train", *, image_size: int | None = None, readings: Readings | None = None
) -> MaskedSet:
    """The `split` of the set that `spec` names; nothing is downloaded, and no picture is read yet.

    Args:
        spec: one of `MASKED_SETS`, with a path where the set lies on disk.
        split: "train" or "test"; the latter is what numbers are reported on, such as VOC's val.
        image_size: pixels a side of generated pictures; others have sizes of their own.
        readings: what becomes of a picture whose mask is missing, or the other way round; an error if None.
    """
    name, _, path = spec.partition(":")
    if name not in MASKED_SETS:
        raise InvalidArgumentError(
            f"data={spec!r}: expected one of {', '.join(MASKED_SETS)}, with a path as in voc:PATH"
        )
    if split not in {"train", "test"}:
        raise InvalidArgumentError(f"split={split!r}: expected 'train' or 'test'")
    if name == "shapes":
        return _shapes(spec, split, image_size)
    if not path:
        raise DataError(f"data={spec!r}: this set lies on disk; say where, as in {name}:PATH")
    if not Path(path).is_dir():
        raise DataError(f"data={spec!r}: there is no folder {path}")
    files = LAYOUTS[name](Path(path), split)
    if not files.names:
        raise DataError(f"data={spec!r}: there is no picture in {files.images}, the {split} split")
    readings = readings or Readings()
    whole = [i for i in range(len(files.names)) if readings.read(partial(_existing, files, i))]
    if not whole:
        raise DataError(f"data={spec!r}: none of its pictures has a mask; the first: {readings.problems[0]}")
    every = MaskedSet(
        name, split, files.classes, tuple(files.names), partial(_read, files), tuple(range(len(files.names)))
    )
    return every.only(whole)


def read_mask(path: Path, table_256: Tensor) -> Tensor:
    """The mask as int64 (height, width), its values turned into classes by `table_256`, where -1 is an error.

    A palette is not looked at: what counts is the number of the colour.
    """
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as file:
            if file.mode not in {"P", "L", "1", "I", "I;16"}:
                raise DataError(
                    f"{path} is a mask of mode {file.mode}, of colours; expected one number per pixel (grey or palette)"
                )
            values = torch.from_numpy(np.array(file).astype(np.int64))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as a mask: {error}") from error
    known = values.clamp(0, 255)
    labels = torch.where(values == known, table_256[known], -1)
    if labels.min() < 0:
        wrong = values[labels < 0].unique()
        raise DataError(f"{path} holds the label {int(wrong[0])}, expected {_allowed(table_256)}")
    return labels


def _read(files: Files, index: int) -> tuple[Tensor, Tensor]:
    image, path = files.pair(index)
    picture, mask = read_picture(image), read_mask(path, files.table)
    if picture.shape[1:] != mask.shape:
        (h, w), (mask_h, mask_w) = picture.shape[1:], mask.shape
        raise DataError(f"{path} is {mask_w} x {mask_h} pixels, its picture {image} is {w} x {h}; expected the same")
    return picture, mask


def _existing(files: Files, index: int) -> bool:
    image, mask = files.pair(index)
    if image.name not in files.images_present:
        raise DataError(f"{image} is missing, the picture of {mask}")
    if mask.name not in files.masks_present:
        raise DataError(f"{mask} is missing, the mask of {image}")
    return True


def _shapes(spec: str, split: str, image_size: int | None) -> MaskedSet:
    if spec != "shapes":
        raise InvalidArgumentError(f"data={spec!r}: shapes is built in and takes no path")
    data = open_data(spec, split, image_size)
    assert isinstance(data, ImageSet)
    numbers = tuple(range(len(data)))
    names = tuple(f"{split} {i}" for i in numbers)
    return MaskedSet("shapes", split, ("background", *data.classes), names, partial(_shape, data), numbers)


def _shape(data: ImageSet, index: int) -> tuple[Tensor, Tensor]:
    assert data.masks is not None
    return data.images[index], data.masks[index] * (data.labels[index] + 1)


def _allowed(table_256: Tensor) -> str:
    """The values that stand for something, as in "0 to 20, 255"."""
    values = (table_256 >= 0).nonzero().flatten().tolist()
    starts = [value for value in values if value - 1 not in values]
    ends = [value for value in values if value + 1 not in values]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))
