"""A folder of images with one subfolder per class, read image by image."""

from pathlib import Path

import torch
from torch import Tensor

from wellposed.data.pictures import read_picture
from wellposed.errors import DataError


class FolderSet:
    """torchvision's ImageFolder, every image resized and cropped at its centre to one size."""

    name = "folder"

    def __init__(self, path: Path, image_size: int) -> None:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        try:
            self._files = ImageFolder(str(path), loader=_loaded)
        except (FileNotFoundError, OSError) as error:
            raise DataError(
                f"{path} is not a folder of images by class, such as {path / 'cat' / 'one.jpg'}: {error}"
            ) from error
        self._fit = v2.Compose([v2.Resize(image_size, antialias=True), v2.CenterCrop(image_size)])
        self.classes = tuple(self._files.classes)
        self.image_shape = (3, image_size, image_size)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self._files[index]
        fitted: Tensor = self._fit(image)
        return fitted.to(torch.uint8), label


def _loaded(path: str) -> Tensor:
    return read_picture(Path(path))


def read_folder(path: Path, split: str, image_size: int) -> FolderSet:
    """The images under `path`/train or `path`/val, or test where there is no val."""
    train = path / "train"
    test = next((path / name for name in ("val", "test") if (path / name).is_dir()), path / "val")
    folder = {"train": train, "test": test}[split]
    if not folder.is_dir():
        raise DataError(f"{path} has no folder {folder.name}; expected {folder / 'cat' / 'one.jpg'}")
    train_classes, test_classes = _classes(train), _classes(test)
    if train_classes and test_classes and train_classes != test_classes:
        raise DataError(
            f"{train} and {test} have different classes, so the same class would have two numbers; only one of them "
            f"has {', '.join(sorted(train_classes ^ test_classes)[:5])}"
        )
    return FolderSet(folder, image_size)


def _classes(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir() if entry.is_dir()} if folder.is_dir() else set()
