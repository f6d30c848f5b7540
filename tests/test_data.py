"""The built-in sets, and the real ones in small files of their layout; CIFAR-10 itself where it is at hand."""

import gzip
import lzma
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier
from sklearn.neighbors import KNeighborsClassifier
from torchvision.ops import masks_to_boxes

from wellposed.data import SETS, Dataset, ImageSet, make_shapes, open_data
from wellposed.data.shapes import SILHOUETTES
from wellposed.errors import DataError, InvalidArgumentError

REAL = Path(os.environ.get("WELLPOSED_DATA", Path(__file__).parents[2] / "shared" / "data"))


def opened(spec: str, **options: Any) -> ImageSet:
    data = open_data(spec, **options)
    assert isinstance(data, ImageSet)
    return data


# --- shapes


def test_shapes_are_what_they_say() -> None:
    data = make_shapes(200, image_size=48, seed=3)
    assert data.images.shape == (200, 3, 48, 48)
    assert data.images.dtype == torch.uint8
    assert data.image_shape == (3, 48, 48)
    assert data.classes == tuple(SILHOUETTES)
    assert data.labels.bincount().tolist() == [20] * 10
    assert data.masks is not None
    assert data.boxes is not None
    expected = masks_to_boxes(data.masks)
    expected[:, 2:] += 1
    assert torch.equal(data.boxes, expected.long())
    filled = data.masks.float().mean((1, 2))
    assert filled.min() > 0.02
    assert filled.max() < 0.5
    inside = torch.tensor([data.images[i][:, data.masks[i]].float().mean(1).tolist() for i in range(200)])
    outside = torch.tensor([data.images[i][:, ~data.masks[i]].float().mean(1).tolist() for i in range(200)])
    assert (inside - outside).abs().amax(1).min() > 40, "every object can be told from its background by its colour"


def test_shapes_depend_on_the_seed_alone() -> None:
    one, two, other = (make_shapes(30, 32, seed) for seed in (5, 5, 6))
    torch.manual_seed(9)
    three = make_shapes(30, 32, 5)
    assert torch.equal(one.images, two.images)
    assert torch.equal(one.images, three.images)
    assert torch.equal(one.labels, three.labels)
    assert not torch.equal(one.images, other.images)
    train, test = opened("shapes", image_size=16), opened("shapes", split="test", image_size=16)
    assert (len(train), len(test)) == (10_000, 2_000)
    assert not torch.equal(train.images[:100], test.images[:100])


def test_shapes_are_hard_for_a_linear_classifier_and_clear_in_their_masks() -> None:
    train, test = make_shapes(2000, 24, 0), make_shapes(400, 24, 1)
    assert train.masks is not None
    assert test.masks is not None
    linear = RidgeClassifier(alpha=100.0).fit(train.images.flatten(1) / 255, train.labels)
    assert linear.score(test.images.flatten(1) / 255, test.labels) < 0.2
    # Area and extent of the mask alone, which no place or rotation changes much, already tell many classes apart.
    features = [torch.stack([_area(d.masks), _spread(d.masks)], 1) for d in (train, test)]
    neighbours = KNeighborsClassifier(9).fit(features[0], train.labels)
    assert neighbours.score(features[1], test.labels) > 0.4


def _spread(masks: Any) -> torch.Tensor:
    """Second moment of each mask about its centre over its area: a disc's is the least."""
    axis = torch.arange(masks.shape[1], dtype=torch.float32)
    weight = masks / masks.sum((1, 2), keepdim=True)
    y, x = (weight.sum(2) * axis).sum(1), (weight.sum(1) * axis).sum(1)
    distance = (axis[:, None] - y[:, None, None]) ** 2 + (axis - x[:, None, None]) ** 2
    return (weight * distance).sum((1, 2)) / masks.sum((1, 2))


def _area(masks: Any) -> torch.Tensor:
    """Area of each mask over that of the smallest circle about its centre that holds it."""
    axis = torch.arange(masks.shape[1], dtype=torch.float32)
    weight = masks / masks.sum((1, 2), keepdim=True)
    y, x = (weight.sum(2) * axis).sum(1), (weight.sum(1) * axis).sum(1)
    distance = (axis[:, None] - y[:, None, None]) ** 2 + (axis - x[:, None, None]) ** 2
    return masks.sum((1, 2)) / (distance * masks).amax((1, 2)) / 3.2


@pytest.mark.parametrize("arguments", [(0, 32), (5, 8)])
def test_shapes_out_of_range(arguments: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="at least 16"):
        make_shapes(*arguments)


# --- digits


def test_digits_are_scikit_learns() -> None:
    train, test = opened("digits"), opened("digits", split="test")
    assert (len(train), len(test)) == (1437, 360)
    assert train.image_shape == (1, 8, 8)
    assert torch.equal(opened("digits").images, train.images)
    everything = {
        (tuple(i.flatten().tolist()), int(label)) for d in (train, test) for i, label in (d[k] for k in range(len(d)))
    }
    source = load_digits()
    assert everything == {
        (tuple((torch.from_numpy(image).flatten() * 255 / 16).round().int().tolist()), int(label))
        for image, label in zip(source.images, source.target, strict=True)
    }
    assert test.labels.bincount().min() >= 34


# --- CIFAR


def write_cifar(folder: Path, ending: str, label_bytes: int, names: dict[str, int]) -> dict[str, torch.Tensor]:
    opener: Any = {"": open, ".gz": gzip.open, ".xz": lzma.open}[ending]
    folder.mkdir(parents=True)
    written = {}
    for number, (name, count) in enumerate(names.items()):
        records = torch.randint(0, 10, (count, label_bytes + 3072), generator=torch.Generator().manual_seed(number))
        written[name] = records.to(torch.uint8)
        with opener(folder / f"{name}{ending}", "wb") as file:
            file.write(written[name].numpy().tobytes())
    return written


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
@pytest.mark.parametrize("inside", [True, False])
def test_cifar10_binary(ending: str, inside: bool, tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    names = {f"data_batch_{i}.bin": 4 for i in range(1, 6)} | {"test_batch.bin": 3}
    written = write_cifar(folder, ending, 1, names)
    (folder / "batches.meta.txt").write_text("\n".join(f"class{i}" for i in range(10)) + "\n\n")
    spec = f"cifar10:{folder if inside else tmp_path}"
    train, test = opened(spec), opened(spec, split="test")
    assert (len(train), len(test)) == (20, 3)
    assert train.classes[3] == "class3"
    assert torch.equal(train.labels[4:8], written["data_batch_2.bin"][:, 0].long())
    image, label = test[1]
    assert torch.equal(image[2, 5], written["test_batch.bin"][1, 1 + 2 * 1024 + 5 * 32 :][:32])
    assert label == written["test_batch.bin"][1, 0]


def test_cifar100_binary_has_two_labels(tmp_path: Path) -> None:
    written = write_cifar(tmp_path / "cifar-100-binary", "", 2, {"train.bin": 5, "test.bin": 2})
    train = opened(f"cifar100:{tmp_path}")
    assert torch.equal(train.labels, written["train.bin"][:, 1].long())
    assert len(train.classes) == 100


def test_pickled_cifar_is_checked_before_it_is_read(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("data_batch_1", "test_batch", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    for spec in (f"cifar10:{tmp_path}", f"cifar10:{folder}"):
        with pytest.raises(DataError, match="not the official set"):
            open_data(spec)
    assert not (tmp_path / "exploded").exists()


def test_damaged_cifar(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    write_cifar(folder, ".xz", 2, {"train.bin": 5, "test.bin": 2})
    whole = (folder / "train.bin.xz").read_bytes()
    (folder / "train.bin.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"train\.bin\.xz cannot be read"):
        open_data(f"cifar100:{tmp_path}")
    (folder / "train.bin").write_bytes(b"12345")
    with pytest.raises(DataError, match="5 bytes, not a multiple of 3074"):
        open_data(f"cifar100:{tmp_path}")
    (folder / "train.bin").write_bytes(bytes([0, 200]) + bytes(3072))
    with pytest.raises(DataError, match="label 200"):
        open_data(f"cifar100:{tmp_path}")
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").write_bytes(bytes(3073))
    with pytest.raises(DataError, match=r"data_batch_2\.bin is missing"):
        open_data(f"cifar10:{tmp_path}")


@pytest.mark.skipif(not (REAL / "cifar-10-batches-bin").is_dir(), reason="CIFAR-10 is not in WELLPOSED_DATA")
def test_real_cifar10() -> None:
    test = opened(f"cifar10:{REAL}", split="test")
    assert len(test) == 10_000
    assert test.labels.bincount().tolist() == [1000] * 10
    assert test.classes[:3] == ("airplane", "automobile", "bird")
    means = test.images.float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(means, torch.tensor([0.4942, 0.4851, 0.4504]), rtol=0, atol=2e-3)


# --- folders


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for split, name, colour in (
        ("train", "cat", "red"),
        ("train", "dog", "blue"),
        ("val", "dog", "blue"),
        ("val", "cat", "red"),
    ):
        place = tmp_path / split / name
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (60, 40), colour).save(tmp_path / place / "one.png")
        Image.new("L", (30, 50)).save(tmp_path / place / "grey.jpg")
    return tmp_path


def test_folder(photographs: Path) -> None:
    train, test = (open_data(f"folder:{photographs}", split=split, image_size=32) for split in ("train", "test"))
    assert (len(train), len(test)) == (4, 4)
    assert train.classes == ("cat", "dog")
    assert train.image_shape == (3, 32, 32)
    for data in (train, test):
        for index in range(4):
            image, label = data[index]
            assert image.shape == (3, 32, 32)
            assert image.dtype == torch.uint8
            assert label == index // 2
    assert train[1][0][:, 16, 16].tolist() == [255, 0, 0]


def test_folder_that_is_none(photographs: Path) -> None:
    with pytest.raises(DataError, match="no folder train"):
        open_data(f"folder:{photographs / 'train'}")
    (photographs / "train" / "cat" / "broken.png").write_bytes(b"not a picture")
    data = open_data(f"folder:{photographs}", image_size=32)
    with pytest.raises(DataError, match=r"broken\.png cannot be read"):
        data[0]
    for file in (photographs / "val").rglob("*.*"):
        file.unlink()
    with pytest.raises(DataError, match="not a folder of images by class"):
        open_data(f"folder:{photographs}", split="test")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.jpg", b"\xff\xd8\xff"),
        ("a.ppm", b"P6 four 4 255 "),
        ("bomb.bmp", b"BM" + bytes(12) + b"\x28\0\0\0" + b"\xff\xff\xff\x0f" * 2 + b"\1\0\x18\0" + bytes(24)),
    ],
    ids=["cut", "header", "bomb"],
)
def test_a_damaged_image_is_named(name: str, content: bytes, photographs: Path) -> None:
    (photographs / "train" / "cat" / name).write_bytes(content)
    data = open_data(f"folder:{photographs}", image_size=32)
    with pytest.raises(DataError, match=rf"{name} cannot be read"):
        data[0]


def test_folders_of_other_classes(photographs: Path) -> None:
    (photographs / "val" / "cow").mkdir()
    for split in ("train", "test"):
        with pytest.raises(DataError, match=r"different classes, .* has cow"):
            open_data(f"folder:{photographs}", split=split)
    shutil.rmtree(photographs / "val")
    (photographs / "test").mkdir()  # without classes, as that of ImageNet
    assert len(open_data(f"folder:{photographs}")) == 4


# --- pets


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Two breeds, whose numbers are those of the archive: in the order of the alphabet, whatever the case."""
    (tmp_path / "images").mkdir()
    (tmp_path / "annotations" / "trimaps").mkdir(parents=True)
    lists = {"trainval": ["beagle_2", "Abyssinian_10"], "test": ["yorkshire_terrier_7", "beagle_1"]}
    for number, name in enumerate(lists["trainval"] + lists["test"]):
        Image.new("RGB", (40, 30), (50 * number, 0, 0)).save(tmp_path / "images" / f"{name}.jpg", quality=100)
    for split, names in lists.items():
        (tmp_path / "annotations" / f"{split}.txt").write_text("".join(f"{name} 1 1 1\n" for name in names))
    return tmp_path


def test_pets_by_breed(pets: Path) -> None:
    train, test = (opened(f"pet:{pets}", split=split, image_size=16) for split in ("train", "test"))
    assert train.classes == test.classes == ("Abyssinian", "beagle", "yorkshire_terrier")
    assert train.image_shape == (3, 16, 16)
    assert train.labels.tolist() == [1, 0]
    assert test.labels.tolist() == [2, 1]
    for data, red in ((train, [0, 50]), (test, [100, 150])):
        torch.testing.assert_close(data.images[:, 0].float().mean((1, 2)), torch.tensor(red).float(), atol=3, rtol=0)
    (pets / "images" / "beagle_1.jpg").unlink()
    with pytest.raises(DataError, match="beagle_1"):
        open_data(f"pet:{pets}", split="test")
    (pets / "annotations" / "test.txt").write_text("")
    with pytest.raises(DataError, match="list of its test pictures is empty"):
        open_data(f"pet:{pets}", split="test")


@pytest.mark.skipif(not (REAL / "oxford-iiit-pet").is_dir(), reason="no pets under WELLPOSED_DATA")
def test_real_pets() -> None:
    data = opened(f"pet:{REAL / 'oxford-iiit-pet'}", split="test", image_size=32)
    assert len(data.classes) == 37
    assert data.labels.bincount().min() > 0
    stated = [line.split() for line in (REAL / "oxford-iiit-pet" / "annotations" / "test.txt").read_text().splitlines()]
    assert data.labels.tolist() == [int(words[1]) - 1 for words in stated if words and words[0][0] != "#"]


# --- by name


@pytest.mark.parametrize(
    ("spec", "options", "error", "message"),
    [
        ("imagenet", {}, InvalidArgumentError, "expected one of shapes, digits"),
        ("shapes:/somewhere", {}, InvalidArgumentError, "takes no path"),
        ("digits", {"split": "validation"}, InvalidArgumentError, "'train' or 'test'"),
        ("digits", {"image_size": 32}, InvalidArgumentError, "a size of their own"),
        ("cifar10", {}, DataError, "say where"),
        ("cifar10:/no/such/folder", {}, DataError, "no folder /no/such/folder"),
    ],
)
def test_bad_names(spec: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_data(spec, **options)


def test_a_folder_without_the_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no cifar100 in .*expected train\.bin"):
        open_data(f"cifar100:{tmp_path}")


def test_every_set_is_a_dataset() -> None:
    data: Dataset = open_data("digits")
    assert data.name == "digits"
    assert set(SETS) == {"shapes", "digits", "cifar10", "cifar100", "pet", "folder"}
