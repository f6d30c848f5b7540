"""A folder of images with one subfolder per class, read image by image."""

from pathlib import Path

import torch
from torch import Tensor

from wellposed.errors import DataError


class FolderSet:
    """torchvision's ImageFolder, every image resized and cropped at its centre to one size."""

    name = "folder"

    def __init__(self, path: Path, image_size: int) -> None:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        try:
            self._files = ImageFolder(str(path))
        except (FileNotFoundError, OSError) as error:
            raise DataError(
                f"{path} is not a folder of images by class, such as {path / 'cat' / 'one.jpg'}: {error}"
            ) from error
        self._fit = v2.Compose([v2.PILToTensor(), v2.Resize(image_size, antialias=True), v2.CenterCrop(image_size)])
        self.classes = tuple(self._files.classes)
        self.image_shape = (3, image_size, image_size)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            image, label = self._files[index]
        except OSError as error:
            raise DataError(f"{self._files.samples[index][0]} cannot be read: {error}") from error
        fitted: Tensor = self._fit(image)
        return fitted.to(torch.uint8), label


def read_folder(path: Path, split: str, image_size: int) -> FolderSet:
    """The images under `path`/train or `path`/val, or test where there is no val."""
    names = {"train": ("train",), "test": ("val", "test")}[split]
    for name in names:
        if (path / name).is_dir():
            return FolderSet(path / name, image_size)
    raise DataError(f"{path} has no folder {' or '.join(names)}; expected {path / names[0] / 'cat' / 'one.jpg'}")
