"""The Oxford-IIIT pets by breed, in the layout of their own archives, as one set in memory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from wellposed.data.images import ImageSet
from wellposed.data.mask_layouts import LAYOUTS
from wellposed.data.pictures import read_picture
from wellposed.errors import DataError


def read_pets(path: Path, split: str, image_size: int) -> ImageSet:
    """The pictures that annotations/trainval.txt or test.txt lists, each resized and cropped at its centre."""
    files = {part: LAYOUTS["pet"](path, part) for part in ("train", "test")}
    breeds = sorted({_breed(name) for part in files.values() for name in part.names}, key=str.lower)
    names, folder = files[split].names, files[split].images
    if not names:
        raise DataError(f"{path}: the list of its {split} pictures is empty; expected names such as Abyssinian_1")
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(lambda name: _fitted(folder / f"{name}.jpg", image_size), names))
    return ImageSet("pet", tuple(breeds), torch.stack(images), torch.tensor([breeds.index(_breed(n)) for n in names]))


def _breed(name: str) -> str:
    return name.rpartition("_")[0] or name


def _fitted(file: Path, image_size: int) -> Tensor:
    from torchvision.transforms.v2 import functional as F

    resized = F.resize(read_picture(file), [image_size], antialias=True)
    return F.center_crop(resized, [image_size])
