"""Where each public set keeps its pictures, its masks and the names of its splits, and what its numbers mean."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from wellposed.data.mask_classes import CAMVID, COCO_STUFF, VOC
from wellposed.errors import DataError

IGNORED = 255
"""The class of pixels that have none."""
_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
_UNUSED_THINGS = {11, 25, 28, 29, 44, 65, 67, 68, 70, 82, 90}  # numbers that COCO left out


@dataclass(frozen=True)
class Files:
    """The files of one split."""

    classes: tuple[str, ...]
    table: Tensor
    """(256,) int64: the class that each value of a mask stands for, `IGNORED`, or -1 where it stands for nothing."""
    names: list[str]
    images: Path
    masks: Path
    mask_ending: str = ".png"

    def pair(self, index: int) -> tuple[Path, Path]:
        """Picture and mask, whether they are there or not."""
        name = self.names[index]
        image = next((name + ending for ending in _PICTURES if name + ending in self.images_present), f"{name}.jpg")
        return self.images / image, self.masks / (name + self.mask_ending)

    @cached_property
    def images_present(self) -> frozenset[str]:
        """The names of the files in the folder of pictures."""
        return _listed(self.images)

    @cached_property
    def masks_present(self) -> frozenset[str]:
        """The names of the files in the folder of masks."""
        return _listed(self.masks)


def _voc(path: Path, split: str, augmented: bool = False) -> Files:
    root = found_root(path, "JPEGImages", "VOC2012", "VOCdevkit/VOC2012", "VOC2007", "VOCdevkit/VOC2007")
    listed = {"train": "trainaug" if augmented else "train", "test": "val"}[split]
    names = _lines(root / "ImageSets" / "Segmentation" / f"{listed}.txt")
    masks = root / ("SegmentationClassAug" if augmented else "SegmentationClass")
    return Files(VOC, value_table({i: i for i in range(21)}, IGNORED), names, root / "JPEGImages", masks)


def _ade20k(path: Path, split: str) -> Files:
    root = found_root(path, "annotations", "ADEChallengeData2016")
    folder = {"train": "training", "test": "validation"}[split]
    images, masks = root / "images" / folder, root / "annotations" / folder
    table = value_table({i: i - 1 for i in range(1, 151)}, 0)
    return Files(_ade20k_classes(root / "objectInfo150.txt"), table, _stems(images), images, masks)


def _ade20k_classes(path: Path) -> tuple[str, ...]:
    """The first name of each class, from the table that comes with the set; numbers where it is not there."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:] if path.is_file() else []
    names = [line.split("\t")[-1].split(",")[0].strip() for line in lines if line.strip()]
    return tuple(names) if len(names) == 150 else tuple(map(str, range(1, 151)))


def _coco_stuff(path: Path, split: str) -> Files:
    folder = {"train": "train2017", "test": "val2017"}[split]
    images = _first_folder(path, (f"images/{folder}", folder))
    places = ("stuffthingmaps", "stuffthingmaps_trainval2017", "annotations")
    masks = _first_folder(path, [f"{place}/{folder}" for place in places])
    names = _stems(images)
    if names and f"{names[0]}.png" not in _listed(masks) and f"{names[0]}_labelTrainIds.png" in _listed(masks):
        table = value_table({i: i for i in range(171)}, IGNORED)
        return Files(COCO_STUFF, table, names, images, masks, "_labelTrainIds.png")
    used = [value for value in range(182) if value not in _UNUSED_THINGS]
    return Files(COCO_STUFF, value_table({v: i for i, v in enumerate(used)}, IGNORED), names, images, masks)


def _pet(path: Path, split: str, border: bool = False) -> Files:
    root = found_root(path, "annotations/trimaps", "oxford-iiit-pet")
    names = _lines(root / "annotations" / {"train": "trainval.txt", "test": "test.txt"}[split])
    masks = root / "annotations" / "trimaps"
    if border:
        return Files(("background", "animal", "border"), value_table({2: 0, 1: 1, 3: 2}), names, root / "images", masks)
    return Files(("background", "animal"), value_table({2: 0, 1: 1}, 3), names, root / "images", masks)


def _camvid(path: Path, split: str) -> Files:
    root = found_root(path, "trainannot", "CamVid")
    images = _first_folder(root, (split,))
    return Files(CAMVID, value_table({i: i for i in range(11)}, 11), _stems(images), images, root / f"{split}annot")


def _plain(path: Path, split: str) -> Files:
    """images/train + masks/train, or images + masks with lists of names in train.txt and val.txt."""
    try:
        classes = tuple(_lines(path / "classes.txt", whole=True))
    except DataError as error:
        raise DataError(f"{path} has no classes.txt: write the names of the classes into it, one a line") from error
    table = value_table({i: i for i in range(len(classes))}, IGNORED)
    images, masks = path / "images", path / "masks"
    for name in {"train": ("train",), "test": ("val", "test")}[split]:
        if (images / name).is_dir():
            return Files(classes, table, _stems(images / name), images / name, masks / name)
        if (path / f"{name}.txt").is_file():
            return Files(classes, table, _lines(path / f"{name}.txt"), images, masks)
    wanted = "train" if split == "train" else "val"
    raise DataError(
        f"{path} has no {split} split: expected images/{wanted}/ and masks/{wanted}/, or {wanted}.txt with the names "
        "of pictures in images/ and masks in masks/"
    )


LAYOUTS: dict[str, Callable[[Path, str], Files]] = {
    "voc": _voc,
    "voc-aug": partial(_voc, augmented=True),
    "ade20k": _ade20k,
    "coco-stuff": _coco_stuff,
    "pet": _pet,
    "pet-border": partial(_pet, border=True),
    "camvid": _camvid,
    "masks": _plain,
}


def value_table(classes: Mapping[int, int], *ignored: int) -> Tensor:
    """The `Files.table` in which each key of `classes` stands for its value, and those `ignored` for no class."""
    if max(classes.values()) >= IGNORED:
        raise DataError(f"{len(classes)} classes: expected at most {IGNORED}, since {IGNORED} stands for none")
    table = torch.full((256,), -1)
    for value, label in [*classes.items(), *((value, IGNORED) for value in ignored)]:
        table[value] = label
    return table


def found_root(path: Path, sign: str, *below: str) -> Path:
    """`path`, or the folder in it, that holds `sign`."""
    return _first_folder(path, [Path(sign), *(Path(inner) / sign for inner in below)]).parents[
        len(Path(sign).parts) - 1
    ]


def _first_folder(path: Path, choices: Iterable[str | Path]) -> Path:
    tried = [path / choice for choice in choices]
    found = next((folder for folder in tried if folder.is_dir()), None)
    if found is None:
        raise DataError(f"{path} is laid out otherwise: expected the folder {' or '.join(map(str, tried))}")
    return found


def _lines(path: Path, whole: bool = False) -> list[str]:
    """What stands in the lines of a list, up to the first blank unless `whole`; # begins a comment."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a list of names: {error}") from error
    return [line if whole else line.split()[0] for line in lines if line and not line.startswith("#")]


def _stems(folder: Path) -> list[str]:
    found = (Path(name) for name in _listed(folder))
    return sorted({path.stem for path in found if path.suffix.lower() in _PICTURES and not path.name.startswith(".")})


def _listed(folder: Path) -> frozenset[str]:
    return frozenset(entry.name for entry in folder.iterdir()) if folder.is_dir() else frozenset()
