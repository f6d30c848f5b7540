"""Pictures with the boxes of their objects, in the layouts their users have on disk: VOC, COCO, Oxford-IIIT Pet.

What is counted follows the evaluation of LOST (arXiv 2109.14279), which TokenCut and its successors share: every object
of VOC, "difficult" and "truncated" ones too; every object of COCO except crowds.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor

from wellposed.data.images import ImageSet, boxes_of
from wellposed.data.mask_layouts import found_root, value_table
from wellposed.data.masks import read_mask
from wellposed.data.pictures import read_picture
from wellposed.data.shapes import make_shapes
from wellposed.errors import DataError, InvalidArgumentError

BOX_SETS = {
    "shapes": "generated, one object an image",
    "voc": "voc:PATH, with PATH/JPEGImages, PATH/Annotations and PATH/ImageSets/Main (VOC2007, VOC2012)",
    "coco": "coco:PATH, with PATH/annotations/instances_*.json and the folders of pictures",
    "pet": "pet:PATH, with PATH/images and PATH/annotations/trimaps (Oxford-IIIT Pet)",
}
_20K = "coco_20k_filenames.txt"
_GROUP = 50  # shapes drawn together, when the first of them is needed
_SHAPES_SEED = {"train": 10_000, "test": 20_000}  # of the first group


@dataclass(frozen=True)
class BoxedPicture:
    """A picture that is read only when it is needed, with its objects' boxes."""

    name: str
    read: Callable[[], tuple[Tensor, Tensor]]
    """Gives uint8 (3, height, width) and float32 (K, 4): left, top, right, bottom, the last two exclusive; K may be 0.

    Raises DataError, with the file's name, where either cannot be read.
    """


@dataclass(frozen=True)
class BoxSet:
    """Pictures of any size."""

    name: str
    """Of the set and its part, such as "voc trainval"."""
    pictures: tuple[BoxedPicture, ...]


def open_boxes(spec: str, split: str | None = None, image_size: int = 224) -> BoxSet:
    """The part `split` of the set that `spec` names.

    Args:
        spec: one of `BOX_SETS`, with a path where the set lies on disk. Nothing is downloaded.
        split: which part; if None the one that object discovery is measured on.
            voc: a list in ImageSets/Main, trainval if None.
            coco: the part of an instances_*.json, such as val2017; or 20k, the pictures of train2014 that
            coco_20k_filenames.txt beside the annotations lists; if None the latter where there is such a list, else
            the only part there is.
            pet: trainval or test, test if None. shapes: train or test, test if None.
        image_size: pixels a side of `shapes`, which have no size of their own.
    """
    name, _, path = spec.partition(":")
    if name not in BOX_SETS or (name == "shapes") == bool(path):
        raise InvalidArgumentError(
            f"data={spec!r}: expected shapes, voc:PATH, coco:PATH or pet:PATH; others have no boxes that are known"
        )
    if name == "shapes":
        return _shapes(split or "test", image_size)
    if not Path(path).is_dir():
        raise DataError(f"data={spec!r}: there is no folder {path}")
    return {"voc": _voc, "coco": _coco, "pet": _pet}[name](Path(path), split)


def _shapes(split: str, image_size: int, count: int = 2_000) -> BoxSet:
    if split not in _SHAPES_SEED:
        raise InvalidArgumentError(f"split={split!r}: shapes has train and test")
    seed = _SHAPES_SEED[split]
    pictures = (BoxedPicture(f"shapes-{split}-{i}", partial(_read_shape, seed, image_size, i)) for i in range(count))
    return BoxSet(f"shapes {split}", tuple(pictures))


def _read_shape(seed: int, image_size: int, index: int) -> tuple[Tensor, Tensor]:
    group, place = divmod(index, _GROUP)
    made = _shapes_group(seed + group, image_size)
    assert made.boxes is not None
    return made.images[place], made.boxes[place : place + 1].float()


@lru_cache(maxsize=2)
def _shapes_group(seed: int, image_size: int) -> ImageSet:
    return make_shapes(_GROUP, image_size, seed)


def _voc(path: Path, split: str | None) -> BoxSet:
    root, split = _voc_root(path), split or "trainval"
    names = _listed(root / "ImageSets" / "Main", split)
    return BoxSet(f"voc {split}", tuple(BoxedPicture(name, partial(_read_voc, root, name)) for name in names))


def _voc_root(path: Path) -> Path:
    found = [
        place
        for place in (path, *sorted(path.glob("VOC20*")), *sorted(path.glob("VOCdevkit/VOC20*")))
        if _is_voc(place)
    ]
    if len(found) != 1:
        years = f"; it has {' and '.join(str(place) for place in found)}: choose one" if found else ""
        raise DataError(f"voc:{path}: expected JPEGImages, Annotations and ImageSets/Main in this folder{years}")
    return found[0]


def _is_voc(place: Path) -> bool:
    return all((place / name).is_dir() for name in ("JPEGImages", "Annotations", "ImageSets/Main"))


def _read_voc(root: Path, name: str) -> tuple[Tensor, Tensor]:
    file = root / "Annotations" / f"{name}.xml"
    annotation = _parsed(file)
    boxes = []
    for thing in annotation.findall("object"):
        # Pixels are counted from 1 and both ends belong to the box: 1 to W is the whole width, here 0 to W.
        left, top, right, bottom = (_number(file, thing, f"bndbox/{edge}") for edge in ("xmin", "ymin", "xmax", "ymax"))
        boxes.append([left - 1, top - 1, right, bottom])
    picture = read_picture(root / "JPEGImages" / f"{name}.jpg")
    if annotation.find("size") is not None:
        size = tuple(int(_number(file, annotation, f"size/{side}")) for side in ("height", "width"))
        _check_size(picture, size, file)
    return picture, _as_boxes(boxes, file)


def _parsed(file: Path) -> ElementTree.Element:
    """The XML of `file`; one that declares entities, which can be made to expand without end, is refused."""
    try:
        text = file.read_text(encoding="utf-8")
        if "<!DOCTYPE" in text or "<!ENTITY" in text:
            raise DataError(f"{file} declares a document type or entities: expected the plain XML of VOC")
        return ElementTree.fromstring(text)
    except (OSError, UnicodeDecodeError, ElementTree.ParseError) as error:
        raise DataError(f"{file} cannot be read as an annotation: {error}") from error


def _number(file: Path, element: ElementTree.Element, place: str) -> float:
    text = element.findtext(place)
    try:
        value = float(text or "")
        if not math.isfinite(value):
            raise ValueError("not finite")
        return value
    except ValueError as error:
        raise DataError(f"{file}: {place} of <{element.tag}> is {text!r}, expected a number") from error


def _coco(path: Path, split: str | None) -> BoxSet:
    annotations = path / "annotations"
    parts = sorted(file.stem.removeprefix("instances_") for file in annotations.glob("instances_*.json"))
    listing = next((place / _20K for place in (annotations, path) if (place / _20K).is_file()), None)
    if split is None:
        split = "20k" if listing is not None else parts[0] if len(parts) == 1 else None
    part = "train2014" if split == "20k" else split
    if part is None or part not in parts or (split == "20k" and listing is None):
        wanted = f"instances_{part or 'val2017'}.json" + (f" and {_20K}" if split == "20k" else "")
        raise DataError(
            f"coco:{path}: expected {wanted} in {annotations} for split={split!r}; the splits there are "
            f"{', '.join(parts) or 'none'}"
        )
    file = annotations / f"instances_{part}.json"
    records = _coco_records(file)
    if split == "20k" and listing is not None:
        records = _chosen(records, listing)
    folder = next((place for place in (path / part, path / "images" / part) if place.is_dir()), path / part)
    pictures = (BoxedPicture(record.name, partial(_read_coco, record, folder, file)) for record in records.values())
    return BoxSet(f"coco {split}", tuple(pictures))


@dataclass(frozen=True)
class _Record:
    """A picture of COCO's."""

    name: str
    size: tuple[int, int]
    boxes: list[list[float]]


def _coco_records(file: Path) -> dict[int, _Record]:
    """The pictures by their numbers."""
    try:
        read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        boxes: dict[int, list[list[float]]] = {int(image["id"]): [] for image in read["images"]}
        for thing in read["annotations"]:
            if not thing.get("iscrowd"):
                left, top, width, height = map(float, thing["bbox"])
                boxes[int(thing["image_id"])].append([left, top, left + width, top + height])
        return {
            int(image["id"]): _Record(
                Path(image["file_name"]).name, (int(image["height"]), int(image["width"])), boxes[int(image["id"])]
            )
            for image in read["images"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{file} cannot be read as COCO's instances: {error!r}") from error


def _chosen(records: dict[int, _Record], listing: Path) -> dict[int, _Record]:
    """The records of the pictures that `listing` names, a file name or a number a line, in its order."""
    chosen = {}
    for line in listing.read_text(encoding="utf-8").split():
        digits = re.findall(r"\d+", Path(line).stem)
        if not digits or int(digits[-1]) not in records:
            raise DataError(f"{listing}: {line!r} names no picture of instances_train2014.json")
        chosen[int(digits[-1])] = records[int(digits[-1])]
    return chosen


def _read_coco(record: _Record, folder: Path, source: Path) -> tuple[Tensor, Tensor]:
    picture = read_picture(folder / record.name)
    _check_size(picture, record.size, source)
    return picture, _as_boxes(record.boxes, source)


def _pet(path: Path, split: str | None) -> BoxSet:
    split, path = split or "test", found_root(path, "annotations/trimaps", "oxford-iiit-pet")
    names = _listed(path / "annotations", split)
    return BoxSet(f"pet {split}", tuple(BoxedPicture(name, partial(_read_pet, path, name)) for name in names))


def _read_pet(path: Path, name: str) -> tuple[Tensor, Tensor]:
    """The box around the animal, 1 in the trimap, and the border around it, 3, which is half animal."""
    file = path / "annotations" / "trimaps" / f"{name}.png"
    picture, animal_HW = read_picture(path / "images" / f"{name}.jpg"), read_mask(file, value_table({1: 1, 2: 0, 3: 1}))
    _check_size(picture, tuple(animal_HW.shape), file)
    mask_1HW = animal_HW[None] == 1
    return picture, boxes_of(mask_1HW).float() if mask_1HW.any() else torch.zeros(0, 4)


def _listed(folder: Path, split: str) -> list[str]:
    """The first word of every line of `split`.txt; not of comments, which begin with #, nor where the second is -1.

    That is how VOC's lists of a class, such as cat_trainval, say that a picture has none.
    """
    file = folder / f"{split}.txt"
    if not file.is_file():
        there = sorted(found.stem for found in folder.glob("*.txt"))
        raise DataError(f"there is no {file}; expected one of {', '.join(there[:8]) or 'trainval.txt and the like'}")
    lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    names = [words[0] for words in lines if words and not words[0].startswith("#") and words[1:2] != ["-1"]]
    if not names:
        raise DataError(f"{file} names no picture")
    return names


def _check_size(picture: Tensor, size: tuple[int, ...], source: Path) -> None:
    if tuple(picture.shape[1:]) != size:
        raise DataError(
            f"{source} is for a picture of {size[0]} x {size[1]}, which is {picture.shape[1]} x {picture.shape[2]}: "
            "boxes would not fit; was one of them resized?"
        )


def _as_boxes(boxes: list[list[float]], source: Path) -> Tensor:
    boxes_K4 = torch.tensor(boxes, dtype=torch.float32).view(-1, 4)
    wrong = ~(boxes_K4.isfinite().all(1) & (boxes_K4[:, :2] <= boxes_K4[:, 2:]).all(1))
    if wrong.any():
        raise DataError(f"{source}: {boxes_K4[wrong][0].tolist()} is no box (left, top, right, bottom)")
    return boxes_K4
