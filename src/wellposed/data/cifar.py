"""CIFAR-10 and CIFAR-100 as their authors publish them: binary files, plain or compressed, or pickled ones."""

import gzip
import lzma
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from wellposed.data.images import ImageSet
from wellposed.errors import DataError

_PIXELS = 3 * 32 * 32
_OPENERS: dict[str, Any] = {"": open, ".gz": gzip.open, ".xz": lzma.open}


@dataclass(frozen=True)
class _Layout:
    """Where one of the two sets keeps its images."""

    folder: str
    pickled: str
    files: dict[str, tuple[str, ...]]
    label_bytes: int
    class_names: str
    class_count: int


_LAYOUTS = {
    "cifar10": _Layout(
        "cifar-10-batches-bin",
        "cifar-10-batches-py",
        {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)},
        label_bytes=1,
        class_names="batches.meta.txt",
        class_count=10,
    ),
    "cifar100": _Layout(
        "cifar-100-binary",
        "cifar-100-python",
        {"train": ("train.bin",), "test": ("test.bin",)},
        label_bytes=2,  # the coarse class, then the fine one
        class_names="fine_label_names.txt",
        class_count=100,
    ),
}


def read_cifar(name: str, path: Path, split: str) -> ImageSet:
    """The `split` of "cifar10" or "cifar100" in `path`, which is its folder or the one that holds it.

    Binary files may be compressed with gzip or xz. The pickled layout is read by torchvision, which checks its
    checksums before it unpickles anything.
    """
    layout = _LAYOUTS[name]
    for folder in (path, path / layout.folder):
        if _found(folder / layout.files[split][0]) is not None:
            return _read_binary(name, layout, folder, split)
    for folder in (path.parent, path):
        if (folder / layout.pickled).is_dir():
            return _read_pickled(name, folder, split)
    raise DataError(
        f"no {name} in {path}: expected {layout.files[split][0]}, plain or as .gz or .xz, there or in "
        f"{layout.folder}/, or the folder {layout.pickled}/"
    )


def _read_binary(name: str, layout: _Layout, folder: Path, split: str) -> ImageSet:
    record = layout.label_bytes + _PIXELS
    files = []
    for file in layout.files[split]:
        found = _found(folder / file)
        if found is None:
            raise DataError(f"{folder / file} is missing, as are its .gz and .xz; download the set again")
        files.append(found)
    parts = []
    with ThreadPoolExecutor() as threads:  # which all decompress at a time
        contents = list(threads.map(_content, files))
    for found, content in zip(files, contents, strict=True):
        if not content or len(content) % record:
            raise DataError(f"{found} holds {len(content)} bytes, not a multiple of {record}; download it again")
        parts.append(torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, record))
    records = torch.cat(parts)
    labels = records[:, layout.label_bytes - 1].long()
    if labels.max() >= layout.class_count:
        raise DataError(f"{folder} holds the label {labels.max()}, {name} has {layout.class_count} classes")
    images = records[:, layout.label_bytes :].reshape(-1, 3, 32, 32).contiguous()
    return ImageSet(name, _classes(layout, folder), images, labels)


def _read_pickled(name: str, folder: Path, split: str) -> ImageSet:
    import torchvision

    reader = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}[name]
    try:
        pickled = reader(folder, train=split == "train", download=False)
    except RuntimeError as error:
        raise DataError(f"{folder / _LAYOUTS[name].pickled} is not the official set, or not whole: {error}") from error
    images = torch.from_numpy(pickled.data).permute(0, 3, 1, 2).contiguous()
    return ImageSet(name, tuple(pickled.classes), images, torch.tensor(pickled.targets))


def _found(path: Path) -> Path | None:
    candidates = (path.with_name(path.name + ending) for ending in _OPENERS)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _content(path: Path) -> bytes:
    opener = _OPENERS[path.suffix if path.suffix in _OPENERS else ""]
    try:
        file: IO[bytes]
        with opener(path, "rb") as file:
            return file.read()
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read ({error}); download it again") from error


def _classes(layout: _Layout, folder: Path) -> tuple[str, ...]:
    names = folder / layout.class_names
    listed = names.read_text(encoding="utf-8").split() if names.is_file() else []
    return tuple(listed) if len(listed) == layout.class_count else tuple(map(str, range(layout.class_count)))
