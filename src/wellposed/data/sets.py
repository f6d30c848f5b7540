"""Sets by name: `name` or `name:path`, as --data takes them."""

from collections.abc import Callable
from pathlib import Path

import torch

from wellposed.data.cifar import read_cifar
from wellposed.data.folder import read_folder
from wellposed.data.images import Dataset, ImageSet
from wellposed.data.pets import read_pets
from wellposed.data.shapes import make_shapes
from wellposed.errors import DataError, InvalidArgumentError

SETS = {
    "shapes": "generated: textured objects on textured backgrounds, with masks and boxes",
    "digits": "scikit-learn's scanned digits, 8 x 8",
    "cifar10": "cifar10:PATH, the official binary files (plain, .gz, .xz) or torchvision's folder",
    "cifar100": "cifar100:PATH, likewise",
    "pet": "pet:PATH, the Oxford-IIIT pets by breed: images/ and annotations/",
    "folder": "folder:PATH, with PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg",
}
_SHAPES_COUNT = {"train": 10_000, "test": 2_000}
_SHAPES_SEED = {"train": 0, "test": 1}


def open_data(spec: str, split: str = "train", image_size: int | None = None) -> Dataset:
    """The `split` ("train" or "test") of the set that `spec` names.

    Args:
        spec: one of `SETS`, with a path where the set lies on disk. Nothing is downloaded.
        split: "train" or "test".
        image_size: pixels a side, for sets that have no size of their own: shapes (32 by default), pet and folder
            (224).
    """
    name, _, path = spec.partition(":")
    if name not in SETS:
        raise InvalidArgumentError(
            f"data={spec!r}: expected one of {', '.join(SETS)}, some with a path as in cifar10:PATH"
        )
    if split not in {"train", "test"}:
        raise InvalidArgumentError(f"split={split!r}: expected 'train' or 'test'")
    if name in {"shapes", "digits"} and path:
        raise InvalidArgumentError(f"data={spec!r}: {name} is built in and takes no path")
    if name in {"digits", "cifar10", "cifar100"} and image_size is not None:
        raise InvalidArgumentError(f"image_size={image_size}: the images of {name} have a size of their own")
    readers: dict[str, Callable[[], Dataset]] = {
        "shapes": lambda: make_shapes(_SHAPES_COUNT[split], image_size or 32, _SHAPES_SEED[split]),
        "digits": lambda: read_digits(split),
        "cifar10": lambda: read_cifar(name, _existing(spec, path), split),
        "cifar100": lambda: read_cifar(name, _existing(spec, path), split),
        "pet": lambda: read_pets(_existing(spec, path), split, image_size or 224),
        "folder": lambda: read_folder(_existing(spec, path), split, image_size or 224),
    }
    return readers[name]()


def read_digits(split: str) -> ImageSet:
    """scikit-learn's digits: 1437 to train on and 360 to test, the same ones always, classes in equal parts."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    train, test = train_test_split(range(len(digits.target)), test_size=360, stratify=digits.target, random_state=0)
    chosen = torch.tensor(train if split == "train" else test)
    images = (torch.from_numpy(digits.images) * (255 / 16)).round().to(torch.uint8)[:, None]
    labels = torch.from_numpy(digits.target).long()
    return ImageSet("digits", tuple(map(str, range(10))), images[chosen], labels[chosen])


def _existing(spec: str, path: str) -> Path:
    if not path:
        raise DataError(f"data={spec!r}: this set lies on disk; say where, as in {spec.partition(':')[0]}:PATH")
    if not Path(path).is_dir():
        raise DataError(f"data={spec!r}: there is no folder {path}")
    return Path(path)
