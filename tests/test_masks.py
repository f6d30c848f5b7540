"""Sets with masks: small files in the layouts of the public ones, the bad ones among them, and the real pets."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from wellposed.data import make_shapes
from wellposed.data.mask_classes import CAMVID, COCO_STUFF, VOC
from wellposed.data.masks import MASKED_SETS, MaskedSet, open_masks, read_mask
from wellposed.data.pictures import Readings
from wellposed.errors import DataError, InvalidArgumentError

REAL = Path(os.environ.get("WELLPOSED_DATA", Path(__file__).parents[2] / "shared" / "data"))
VALUES = {"voc": [0, 1, 20, 255], "ade20k": [0, 1, 150, 2], "camvid": [0, 10, 11, 3], "pet": [1, 2, 3, 1]}


def picture(path: Path, width: int = 6, height: int = 4) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.arange(3 * width * height, dtype=np.uint8).reshape(height, width, 3)
    Image.fromarray(values).save(path)


def mask(path: Path, values: list[int], width: int = 6, height: int = 4, palette: bool = False) -> None:
    """Rows of the values in turn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = np.array([values[i % len(values)] for i in range(height)], dtype=np.uint8)
    image = Image.fromarray(np.repeat(rows[:, None], width, 1))
    if palette:
        image = image.copy()
        image.putpalette([(7 * i) % 256 for i in range(768)])
        assert image.mode == "P"
    image.save(path)


def listed(path: Path, names: list[str], after: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{name}{after}\n" for name in names), encoding="utf-8")


def voc(root: Path, names: tuple[str, ...] = ("a", "b"), aug: bool = False) -> Path:
    kind = "SegmentationClassAug" if aug else "SegmentationClass"
    for name in (*names, "v"):
        picture(root / "JPEGImages" / f"{name}.jpg")
        mask(root / kind / f"{name}.png", VALUES["voc"], palette=not aug)
    lists = root / "ImageSets" / "Segmentation"
    listed(lists / ("trainaug.txt" if aug else "train.txt"), list(names))
    listed(lists / "val.txt", ["v"])
    return root


def columns(item: torch.Tensor) -> list[int]:
    assert item.dtype == torch.int64
    return item[:, 0].tolist()


# --- layouts


@pytest.mark.parametrize("below", ["", "VOC2012", "VOCdevkit/VOC2012"])
def test_voc_reads_palettes_as_numbers(tmp_path: Path, below: str) -> None:
    voc(tmp_path / below)
    train, test = (open_masks(f"voc:{tmp_path}", split) for split in ("train", "test"))
    assert train.classes == VOC
    assert (len(VOC), VOC[0], VOC[15], VOC[20]) == (21, "background", "person", "tv monitor")
    assert (train.items, test.items) == (("a", "b"), ("v",))
    image, labels = train[1]
    assert (image.shape, image.dtype, labels.shape) == ((3, 4, 6), torch.uint8, (4, 6))
    assert columns(labels) == [0, 1, 20, 255]


def test_voc_with_the_augmented_masks(tmp_path: Path) -> None:
    voc(tmp_path, ("a", "b", "c"), aug=True)
    assert len(open_masks(f"voc-aug:{tmp_path}")) == 3
    with pytest.raises(DataError, match=r"train\.txt"):
        open_masks(f"voc:{tmp_path}")


@pytest.mark.parametrize("below", ["", "ADEChallengeData2016"])
def test_ade20k_shifts_by_one_and_ignores_zero(tmp_path: Path, below: str) -> None:
    root = tmp_path / below
    for split, name in (("training", "ADE_train_1"), ("validation", "ADE_val_1")):
        picture(root / "images" / split / f"{name}.jpg")
        mask(root / "annotations" / split / f"{name}.png", VALUES["ade20k"])
    test = open_masks(f"ade20k:{tmp_path}", "test")
    assert test.items == ("ADE_val_1",)
    assert columns(test[0][1]) == [255, 0, 149, 1]
    assert len(test.classes) == 150
    rows = "\n".join(f"{i}\t0.1\t9\t9\tname {i}, other" for i in range(1, 151))
    (root / "objectInfo150.txt").write_text(f"Idx\tRatio\tTrain\tVal\tName\n{rows}\n", encoding="utf-8")
    assert open_masks(f"ade20k:{tmp_path}", "test").classes[149] == "name 150"


@pytest.mark.parametrize("place", ["annotations", "stuffthingmaps", "stuffthingmaps_trainval2017"])
def test_coco_stuff_closes_the_gaps_of_cocos_numbers(tmp_path: Path, place: str) -> None:
    picture(tmp_path / "images" / "train2017" / "000000000009.jpg")
    mask(tmp_path / place / "train2017" / "000000000009.png", [0, 12, 181, 255])
    data = open_masks(f"coco-stuff:{tmp_path}")
    assert columns(data[0][1]) == [0, 11, 170, 255]  # 11, the street sign, is not used
    assert (len(COCO_STUFF), len(set(COCO_STUFF))) == (171, 171)
    assert (COCO_STUFF[11], COCO_STUFF[79], COCO_STUFF[80], COCO_STUFF[170]) == (
        "stop sign",
        "toothbrush",
        "banner",
        "wood",
    )
    mask(tmp_path / place / "train2017" / "000000000009.png", [0, 11])
    with pytest.raises(DataError, match=r"000000000009\.png holds the label 11, expected 0 to 10, 12 to 24"):
        data[0]


def test_coco_stuff_with_numbers_already_closed(tmp_path: Path) -> None:
    picture(tmp_path / "val2017" / "1.jpg")
    mask(tmp_path / "annotations" / "val2017" / "1_labelTrainIds.png", [0, 11, 170, 255])
    data = open_masks(f"coco-stuff:{tmp_path}", "test")
    assert columns(data[0][1]) == [0, 11, 170, 255]


def test_pets_with_and_without_their_border(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "cat_1.jpg")
    mask(tmp_path / "annotations" / "trimaps" / "cat_1.png", VALUES["pet"])
    listed(tmp_path / "annotations" / "trainval.txt", ["# name", "cat_1"], after=" 1 1 1")
    pet, border = (open_masks(f"{name}:{tmp_path}") for name in ("pet", "pet-border"))
    assert (pet.classes, columns(pet[0][1])) == (("background", "animal"), [1, 0, 255, 1])
    assert (border.classes[2], columns(border[0][1])) == ("border", [1, 0, 2, 1])


def test_camvid(tmp_path: Path) -> None:
    for split in ("train", "test"):
        picture(tmp_path / split / "0001TP_1.png")
        mask(tmp_path / f"{split}annot" / "0001TP_1.png", VALUES["camvid"])
    data = open_masks(f"camvid:{tmp_path}", "test")
    assert (data.classes, len(CAMVID)) == (CAMVID, 11)
    assert columns(data[0][1]) == [0, 10, 255, 3]


@pytest.mark.parametrize("lists", [False, True])
def test_plain_folders(tmp_path: Path, lists: bool) -> None:
    listed(tmp_path / "classes.txt", ["sky", "all else"])
    for split in ("train", "val"):
        below = "" if lists else split
        picture(tmp_path / "images" / below / f"{split}.webp")
        mask(tmp_path / "masks" / below / f"{split}.png", [0, 1])
        if lists:
            listed(tmp_path / f"{split}.txt", [split])
    (tmp_path / "images" / ("" if lists else "train") / "._train.jpg").touch()
    train, test = (open_masks(f"masks:{tmp_path}", split) for split in ("train", "test"))
    assert (train.classes, train.items, test.items) == (("sky", "all else"), ("train",), ("val",))
    (tmp_path / "classes.txt").unlink()
    with pytest.raises(DataError, match=r"classes\.txt: write the names"):
        open_masks(f"masks:{tmp_path}")


def test_shapes_have_their_class_where_their_object_is() -> None:
    data, expected = open_masks("shapes", "test", image_size=16), make_shapes(2000, 16, 1)
    assert data.classes[0] == "background"
    assert data.classes[1:] == expected.classes
    assert expected.masks is not None
    image, labels = data[7]
    assert torch.equal(image, expected.images[7])
    assert torch.equal(labels > 0, expected.masks[7])
    assert labels.max() == expected.labels[7] + 1


def test_some_of_a_set_come_from_all_over_it(tmp_path: Path) -> None:
    data = open_masks("shapes", "test", image_size=16)
    few = data.some(4)
    assert (len(few), few.items[-1]) == (4, "test 1500")
    assert torch.equal(few[3][0], data[1500][0])
    assert len(data.some(10**6)) == 2000
    assert few.some(2).items == ("test 0", "test 1000")
    with pytest.raises(InvalidArgumentError, match="count=0"):
        data.some(0)


# --- what is wrong


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("nothing:x", InvalidArgumentError, "expected one of shapes, voc"),
        ("voc", DataError, "voc:PATH"),
        ("voc:/no/such/folder", DataError, "there is no folder"),
        ("shapes:x", InvalidArgumentError, "built in"),
    ],
)
def test_specs_that_name_nothing(spec: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_masks(spec)


@pytest.mark.parametrize("name", sorted(set(MASKED_SETS) - {"shapes"}))
def test_a_folder_of_another_layout_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        open_masks(f"{name}:{tmp_path}")
    with pytest.raises(InvalidArgumentError, match="split='val'"):
        open_masks(f"{name}:{tmp_path}", "val")


def test_an_empty_split(tmp_path: Path) -> None:
    listed(voc(tmp_path) / "ImageSets" / "Segmentation" / "val.txt", [])
    with pytest.raises(DataError, match=r"no picture in .*JPEGImages, the test split"):
        open_masks(f"voc:{tmp_path}", "test")


def test_missing_masks_are_an_error_or_are_counted(tmp_path: Path) -> None:
    voc(tmp_path, ("a", "b", "c"))
    (tmp_path / "SegmentationClass" / "b.png").unlink()
    (tmp_path / "JPEGImages" / "c.jpg").unlink()
    with pytest.raises(DataError, match=r"b\.png is missing, the mask of .*b\.jpg"):
        open_masks(f"voc:{tmp_path}")
    readings = Readings("skip")
    data = open_masks(f"voc:{tmp_path}", readings=readings)
    assert data.items == ("a",)
    assert columns(data[0][1]) == [0, 1, 20, 255]
    assert len(readings.problems) == 2
    (tmp_path / "SegmentationClass" / "a.png").unlink()
    with pytest.raises(DataError, match="none of its pictures has a mask"):
        open_masks(f"voc:{tmp_path}", readings=Readings("skip"))


def test_a_mask_of_another_size(tmp_path: Path) -> None:
    data = open_masks(f"voc:{voc(tmp_path)}")
    mask(tmp_path / "SegmentationClass" / "a.png", [0], width=5, height=4)
    with pytest.raises(DataError, match=r"a\.png is 5 x 4 pixels, its picture .*a\.jpg is 6 x 4"):
        data[0]


def test_labels_out_of_range_are_named(tmp_path: Path) -> None:
    data = open_masks(f"voc:{voc(tmp_path)}")
    mask(tmp_path / "SegmentationClass" / "a.png", [0, 21], palette=True)
    with pytest.raises(DataError, match=r"a\.png holds the label 21, expected 0 to 20, 255"):
        data[0]


def test_masks_that_are_no_numbers(tmp_path: Path) -> None:
    data: MaskedSet = open_masks(f"voc:{voc(tmp_path)}")
    picture(tmp_path / "SegmentationClass" / "a.png")
    with pytest.raises(DataError, match=r"a\.png is a mask of mode RGB"):
        data[0]
    (tmp_path / "SegmentationClass" / "a.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(DataError, match=r"a\.png cannot be read as a mask"):
        data[0]
    (tmp_path / "JPEGImages" / "b.jpg").write_bytes((tmp_path / "JPEGImages" / "b.jpg").read_bytes()[:300])
    with pytest.raises(DataError, match=r"b\.jpg cannot be read"):
        data[1]


def test_masks_of_sixteen_bits_and_of_one(tmp_path: Path) -> None:
    table = torch.full((256,), -1)
    table[:2] = torch.tensor([0, 1])
    Image.fromarray(np.array([[0, 1], [1, 300]], dtype=np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match="holds the label 300, expected 0 to 1"):
        read_mask(tmp_path / "deep.png", table)
    Image.fromarray(np.array([[True, False]])).save(tmp_path / "bit.png")
    assert read_mask(tmp_path / "bit.png", table).tolist() == [[1, 0]]


@pytest.mark.skipif(not (REAL / "oxford-iiit-pet").is_dir(), reason="needs WELLPOSED_DATA/oxford-iiit-pet")
def test_the_pets_themselves() -> None:
    path = REAL / "oxford-iiit-pet"
    train, test = (open_masks(f"pet:{path}", split) for split in ("train", "test"))
    assert not set(train.items) & set(test.items)
    image, labels = test[3]
    raw = np.asarray(Image.open(path / "annotations" / "trimaps" / f"{test.items[3]}.png"))
    assert image.shape[1:] == labels.shape == raw.shape
    for value, label in ((1, 1), (2, 0), (3, 255)):
        assert np.array_equal(raw == value, labels.numpy() == label)
