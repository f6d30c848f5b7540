import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from wellposed.data.boxes import open_boxes
from wellposed.data.pictures import Readings
from wellposed.errors import DataError, InvalidArgumentError
from wellposed.evaluation.discovery.corloc import corloc

REAL = Path(os.environ.get("WELLPOSED_DATA", Path(__file__).parents[2] / "shared" / "data"))


def picture(path: Path, height: int, width: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def voc_object(box: tuple[object, ...], more: str = "") -> str:
    edges = "".join(
        f"<{name}>{value}</{name}>" for name, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    )
    return f"<object><name>cat</name>{more}<bndbox>{edges}</bndbox></object>"


def voc(root: Path, objects: dict[str, str], size: tuple[int, int] = (30, 40)) -> Path:
    for name, inside in objects.items():
        picture(root / "JPEGImages" / f"{name}.jpg", *size)
        file = root / "Annotations" / f"{name}.xml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            f"<annotation><size><width>{size[1]}</width><height>{size[0]}</height></size>{inside}</annotation>"
        )
    listing = root / "ImageSets" / "Main" / "trainval.txt"
    listing.parent.mkdir(parents=True)
    listing.write_text("\n".join(objects) + "\n")
    return root


def test_voc_counts_every_object_from_the_first_pixel(tmp_path: Path) -> None:
    hard = "<truncated>1</truncated><difficult>1</difficult>"
    part = "<part><name>head</name><bndbox><xmin>2</xmin><ymin>2</ymin><xmax>3</xmax><ymax>3</ymax></bndbox></part>"
    inside = voc_object((1, 1, 40, 30)) + voc_object((5, 6, "10.5", 20), hard).replace("</object>", part + "</object>")
    data = open_boxes(f"voc:{voc(tmp_path, {'a': inside, 'none': ''})}")
    assert data.name == "voc trainval"
    assert [one.name for one in data.pictures] == ["a", "none"]
    pixels, boxes = data.pictures[0].read()
    assert pixels.shape == (3, 30, 40)
    assert pixels.dtype == torch.uint8
    assert boxes.tolist() == [[0, 0, 40, 30], [4, 5, 10.5, 20]]
    assert data.pictures[1].read()[1].shape == (0, 4)


@pytest.mark.parametrize("place", ["", "VOC2007", "VOCdevkit/VOC2012"])
def test_voc_is_found_where_its_archives_put_it(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    voc(tmp_path / place, {"a": voc_object((1, 1, 2, 2))})
    assert len(open_boxes(f"voc:{tmp_path}", "trainval").pictures) == 1


def test_two_years_of_voc_are_not_mixed(tmp_path: Path) -> None:
    for year in ("VOC2007", "VOC2012"):
        (tmp_path / year).mkdir()
        voc(tmp_path / year, {"a": voc_object((1, 1, 2, 2))})
    with pytest.raises(DataError, match=r"VOC2007 and .*VOC2012: choose one"):
        open_boxes(f"voc:{tmp_path}")


LAUGHS = '<!DOCTYPE a [<!ENTITY b "boo"><!ENTITY c "&b;&b;&b;">]>'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{LAUGHS}<annotation>&c;</annotation>", "declares a document type or entities"),
        ("<annotation><object>", "cannot be read as an annotation"),
        (f"<annotation>{voc_object((1, 'left', 2, 2))}</annotation>", "bndbox/ymin of <object> is 'left'"),
        (f"<annotation>{voc_object((9, 1, 2, 2))}</annotation>", "is no box"),
        (f"<annotation>{voc_object((1, 1, 'nan', 2))}</annotation>", "bndbox/xmax of <object> is 'nan'"),
        ("<annotation><object><name>cat</name></object></annotation>", "bndbox/xmin of <object> is None"),
        ("<annotation><size><width>41</width><height>30</height></size></annotation>", "30 x 41, which is 30 x 40"),
    ],
)
def test_broken_annotations_of_voc_are_named(tmp_path: Path, text: str, told: str) -> None:
    voc(tmp_path, {"good": voc_object((1, 1, 2, 2)), "bad": ""})
    (tmp_path / "Annotations" / "bad.xml").write_text(text)
    data, readings = open_boxes(f"voc:{tmp_path}"), Readings("skip")
    assert [readings.read(one.read) is None for one in data.pictures] == [False, True]
    assert len(readings.problems) == 1
    assert "bad.xml" in readings.problems[0]
    assert told in readings.problems[0]
    with pytest.raises(DataError, match="bad"):
        Readings("raise").read(data.pictures[1].read)


def test_an_annotation_in_another_encoding_hides_nothing(tmp_path: Path) -> None:
    voc(tmp_path, {"bad": ""})
    text = f'<?xml version="1.0" encoding="utf-16"?>{LAUGHS}<annotation>&c;</annotation>'
    (tmp_path / "Annotations" / "bad.xml").write_text(text, encoding="utf-16")
    with pytest.raises(DataError, match=r"bad\.xml cannot be read"):
        open_boxes(f"voc:{tmp_path}").pictures[0].read()


@pytest.mark.parametrize("kind", ["missing", "empty", "cut short"])
def test_broken_pictures_are_named(tmp_path: Path, kind: str) -> None:
    voc(tmp_path, {"bad": voc_object((1, 1, 2, 2))})
    file = tmp_path / "JPEGImages" / "bad.jpg"
    content = {"missing": None, "empty": b"", "cut short": file.read_bytes()[:200]}[kind]
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.jpg"):
        open_boxes(f"voc:{tmp_path}").pictures[0].read()


def coco(root: Path, part: str = "train2014", folder: str = "train2014") -> Path:
    images = [
        {"id": 9, "file_name": f"COCO_{part}_000000000009.jpg", "height": 20, "width": 30},
        {"id": 25, "file_name": f"COCO_{part}_000000000025.jpg", "height": 30, "width": 20},
        {"id": 30, "file_name": f"COCO_{part}_000000000030.jpg", "height": 10, "width": 10},
    ]
    things = [
        {"image_id": 9, "bbox": [1.5, 2.0, 10.0, 5.0], "iscrowd": 0},
        {"image_id": 9, "bbox": [0, 0, 30, 20], "iscrowd": 1},
        {"image_id": 25, "bbox": [0, 0, 20, 30]},
        {"image_id": 25, "bbox": [3, 3, 0, 4], "iscrowd": 0},
    ]
    (root / "annotations").mkdir(exist_ok=True)
    (root / "annotations" / f"instances_{part}.json").write_text(json.dumps({"images": images, "annotations": things}))
    for image in images:
        picture(root / folder / str(image["file_name"]), int(str(image["height"])), int(str(image["width"])))
    return root


@pytest.mark.parametrize("folder", ["val2017", "images/val2017"])
def test_coco(tmp_path: Path, folder: str) -> None:
    data = open_boxes(f"coco:{coco(tmp_path, 'val2017', folder)}")
    assert data.name == "coco val2017"
    pixels, boxes = data.pictures[0].read()
    assert pixels.shape == (3, 20, 30)
    assert boxes.tolist() == [[1.5, 2.0, 11.5, 7.0]]
    assert [len(one.read()[1]) for one in data.pictures] == [1, 2, 0]


@pytest.mark.parametrize(
    "lines", ["train2014/COCO_train2014_000000000025.jpg\nCOCO_train2014_000000000009.jpg", "25 9"]
)
def test_coco_20k_is_a_list_of_train2014(tmp_path: Path, lines: str) -> None:
    coco(tmp_path)
    coco(tmp_path, "val2014", "val2014")
    (tmp_path / "annotations" / "coco_20k_filenames.txt").write_text(lines)
    data = open_boxes(f"coco:{tmp_path}")
    assert data.name == "coco 20k"
    assert [one.name[-6:] for one in data.pictures] == ["25.jpg", "09.jpg"]
    assert len(open_boxes(f"coco:{tmp_path}", "val2014").pictures) == 3


def test_coco_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the splits there are none"):
        open_boxes(f"coco:{tmp_path}")
    coco(tmp_path)
    with pytest.raises(DataError, match=r"expected instances_train2014\.json and coco_20k_filenames\.txt"):
        open_boxes(f"coco:{tmp_path}", "20k")
    with pytest.raises(DataError, match=r"instances_val2017\.json.*train2014"):
        open_boxes(f"coco:{tmp_path}", "val2017")
    (tmp_path / "annotations" / "coco_20k_filenames.txt").write_text("9 77")
    with pytest.raises(DataError, match="'77' names no picture"):
        open_boxes(f"coco:{tmp_path}")
    picture(tmp_path / "train2014" / "COCO_train2014_000000000009.jpg", 21, 30)
    with pytest.raises(DataError, match="20 x 30, which is 21 x 30"):
        open_boxes(f"coco:{tmp_path}", "train2014").pictures[0].read()
    (tmp_path / "annotations" / "instances_train2014.json").write_text('{"images": [{"id": 1}]}')
    with pytest.raises(DataError, match="cannot be read as COCO's instances"):
        open_boxes(f"coco:{tmp_path}", "train2014")


def pet(root: Path, trimap: np.ndarray) -> Path:
    picture(root / "images" / "Sphynx_1.jpg", 20, 24)
    (root / "annotations" / "trimaps").mkdir(parents=True)
    Image.fromarray(trimap).save(root / "annotations" / "trimaps" / "Sphynx_1.png")
    (root / "annotations" / "test.txt").write_text("#Image CLASS-ID SPECIES BREED ID\nSphynx_1 1 1 1\n")
    return root


def test_pet_boxes_hold_the_animal_and_its_border(tmp_path: Path) -> None:
    trimap = np.full((20, 24), 2, dtype=np.uint8)
    trimap[4:11, 5:16] = 3
    trimap[5:10, 6:15] = 1
    (one,) = open_boxes(f"pet:{pet(tmp_path, trimap)}").pictures
    rows, columns = ndimage.find_objects((trimap != 2).astype(int))[0]
    assert one.read()[1].tolist() == [[columns.start, rows.start, columns.stop, rows.stop]]


def test_pet_without_an_animal_has_no_box(tmp_path: Path) -> None:
    (one,) = open_boxes(f"pet:{pet(tmp_path, np.full((20, 24), 2, dtype=np.uint8))}").pictures
    assert one.read()[1].shape == (0, 4)


@pytest.mark.parametrize(
    ("shape", "value", "told"), [((20, 24), 7, "holds the label 7"), ((24, 20), 1, "24 x 20, which is 20 x 24")]
)
def test_trimaps_that_are_none_are_refused(tmp_path: Path, shape: tuple[int, int], value: int, told: str) -> None:
    (one,) = open_boxes(f"pet:{pet(tmp_path, np.full(shape, value, dtype=np.uint8))}").pictures
    with pytest.raises(DataError, match=told):
        one.read()


def test_shapes_know_their_boxes() -> None:
    data = open_boxes("shapes", "train", image_size=32)
    pixels, boxes = data.pictures[3].read()
    assert pixels.shape == (3, 32, 32)
    assert boxes.shape == (1, 4)
    for split in ("train", "test"):
        read = [one.read() for one in open_boxes("shapes", split, image_size=32).pictures[40:120]]
        assert len({image.numpy().tobytes() for image, _ in read}) == 80
        assert not any(torch.equal(image, pixels) for image, _ in read)
    assert torch.equal(open_boxes("shapes", "train", image_size=32).pictures[3].read()[0], pixels)


@pytest.mark.parametrize(
    ("spec", "split", "told"),
    [
        ("cifar10:x", None, "expected shapes, voc:PATH"),
        ("voc", None, "expected shapes, voc:PATH"),
        ("shapes:x", None, "expected shapes, voc:PATH"),
        ("shapes", "val", "shapes has train and test"),
        ("voc:nowhere", None, "there is no folder nowhere"),
    ],
)
def test_unknown_sets_are_refused(spec: str, split: str | None, told: str) -> None:
    with pytest.raises((DataError, InvalidArgumentError), match=told):
        open_boxes(spec, split)


@pytest.mark.parametrize(
    "make", [lambda path: voc(path, {"a": ""}), lambda path: pet(path, np.ones((20, 24), np.uint8))]
)
def test_splits_that_are_not_there_are_refused_with_those_that_are(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    name = "voc" if make(tmp_path).joinpath("JPEGImages").exists() else "pet"
    with pytest.raises(DataError, match=r"no .*holdout\.txt; expected one of (trainval|test)"):
        open_boxes(f"{name}:{tmp_path}", "holdout")
    listing = next(tmp_path.rglob("t*.txt"))
    listing.write_text("\n")
    with pytest.raises(DataError, match="names no picture"):
        open_boxes(f"{name}:{tmp_path}", listing.stem)


@pytest.mark.skipif(not (REAL / "oxford-iiit-pet").is_dir(), reason="Oxford-IIIT Pet is not in WELLPOSED_DATA")
def test_the_whole_picture_is_right_for_a_known_part_of_the_pets() -> None:
    read = [one.read() for one in open_boxes(f"pet:{REAL / 'oxford-iiit-pet'}", "test").pictures[:200]]
    whole = torch.tensor([[0, 0, pixels.shape[2], pixels.shape[1]] for pixels, _ in read])
    assert corloc(whole, [boxes for _, boxes in read]) == pytest.approx(0.715)
