"""A few images to look at, from all over a folder or a set, as squares."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from wellposed.data import Dataset, make_shapes, open_data
from wellposed.data.pictures import Readings, picture_files, read_picture
from wellposed.errors import DataError
from wellposed.evaluation.segmentation.views import resized

Item = TypeVar("Item")


def chosen_images(
    files: Sequence[Path], data: str, count: int, size: int, readings: Readings
) -> tuple[list[Tensor], list[str]]:
    """At most `count` images, uint8 (3, side, side), and their names.

    Args:
        files: pictures and folders of them; where there are none, test images of `data` are taken.
        data: a set as `open_data` has it.
        count: images to choose; those that cannot be read are not replaced.
        size: pixels a side, but for sets that have a size of their own.
        readings: what happens to a picture that cannot be read, and where it is named.
    """
    images, names = [], []
    for name, reader in _of_files(files, count, size) if files else _of_data(data, count, size):
        image = readings.read(reader)
        if image is not None:
            images.append(image)
            names.append(name)
    if not images:
        raise DataError(f"none of the {count} pictures chosen can be read: {'; '.join(readings.problems[:3])}")
    return images, names


def squared(image_CHW: Tensor, size: int) -> Tensor:
    """The largest square at the centre of an image, with `size` pixels a side: its aspect stays, the rest is lost."""
    height, width = image_CHW.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return resized(image_CHW[:, top : top + side, left : left + side], (size, size))


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` of the items, from all over them.

    Example:
        >>> spread(range(10), 3)
        [0, 3, 6]
    """
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def _of_files(files: Sequence[Path], count: int, size: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    for path in spread(picture_files(files), count):
        yield path.name, partial(_picture, path, size)


def _of_data(data: str, count: int, size: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    if data == "shapes":  # made for these few images: the whole set would be gigabytes at the size of some models
        dataset: Dataset = make_shapes(count, size, seed=1)
    else:
        dataset = open_data(data, "test", size if data.startswith(("folder:", "pet:")) else None)
    for i in spread(range(len(dataset)), count):
        yield f"{dataset.name} {i}", partial(_image, dataset, i)


def _picture(path: Path, size: int) -> Tensor:
    return squared(read_picture(path, upright=True), size)


def _image(dataset: Dataset, index: int) -> Tensor:
    return dataset[index][0].expand(3, -1, -1)
