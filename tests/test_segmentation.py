"""The dense linear probe: numbers against scikit-learn's, parts against torch's, the whole on known pictures."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score
from torch import Tensor
from torch.nn import functional as F

from browser import check_in_a_browser, needs_chromium
from wellposed.data.masks import MaskedSet
from wellposed.data.pictures import Readings
from wellposed.errors import DataError, DivergedError, InvalidArgumentError
from wellposed.evaluation.segmentation import heads as dense
from wellposed.evaluation.segmentation.command import SegmentConfig
from wellposed.evaluation.segmentation.heads import dense_probe, patch_labels, predicted_mask, upsampled
from wellposed.evaluation.segmentation.iou import agreement, confusion, mean_iou, most_frequent
from wellposed.evaluation.segmentation.probe import _Probe, segment
from wellposed.evaluation.segmentation.protocols import DENSE_PROTOCOLS, DenseProtocol, dense_protocol
from wellposed.evaluation.segmentation.report import SegmentResult, write_result
from wellposed.evaluation.segmentation.sheets import coloured, palette
from wellposed.evaluation.segmentation.views import random_window, resized_mask, training_view, whole, windows

COLOURS = torch.tensor([[10, 10, 10], [250, 20, 20], [20, 240, 30], [30, 30, 230]], dtype=torch.uint8)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 2}


def masks_of_colours(
    split: str, count: int, size: tuple[int, int] | None = None, broken: int | None = None
) -> MaskedSet:
    """Pictures of any size whose quarters have a colour each, which is their class; a corner has no class."""

    def read(index: int) -> tuple[Tensor, Tensor]:
        if index == broken:
            raise DataError(f"picture {index} is broken")
        generator = torch.Generator().manual_seed(index + 1000 * (split == "test"))
        height, width = size or torch.randint(40, 90, (2,), generator=generator).tolist()
        quarters = torch.randint(4, (2, 2), generator=generator)
        mask = resized_mask(quarters, (height, width))
        picture = COLOURS[mask].movedim(-1, 0)
        mask[:8, :8] = 255
        return picture, mask

    names = tuple(f"{split} {i}" for i in range(count))
    return MaskedSet("colours", split, ("black", "red", "green", "blue"), names, read, tuple(range(count)))


def patch_colours(pictures: Tensor) -> Tensor:
    return F.avg_pool2d(pictures.float() / 255, 4)


def quick(**changes: Any) -> DenseProtocol:
    return dense_protocol("quick", **{"size": 32, **changes})


# --- intersection over union


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_iou_is_scikit_learns(device: str, dtype: torch.dtype) -> None:
    truth, predicted = torch.randint(0, 7, (2, 3, 20, 30)).to(dtype)
    truth[truth == 6], predicted[predicted == 6] = 255, 2
    truth[truth == 5], predicted[predicted == 5] = 4, 4  # 5 to 7 then occur in neither
    counts = confusion(predicted.to(device), truth.to(device), 8)
    assert (counts.dtype, counts.device.type) == (torch.int64, device)
    y, z = truth[truth != 255], predicted[truth != 255]
    assert np.array_equal(counts.cpu(), confusion_matrix(y, z, labels=range(8)))
    found = agreement(counts)
    each = jaccard_score(y, z, labels=range(5), average=None)
    assert found.class_iou == (*map(pytest.approx, each), None, None, None)
    assert found.mean_iou == pytest.approx(each.mean())
    assert mean_iou(counts) == found.mean_iou
    assert found.pixel_accuracy == pytest.approx(accuracy_score(y, z))


def test_iou_is_torchmetrics() -> None:
    classification = pytest.importorskip("torchmetrics.classification", reason="torchmetrics is not installed")
    truth, predicted = torch.randint(0, 6, (2, 4, 33, 20))
    truth[:, :3] = 255
    truth[truth == 5], predicted[predicted == 5] = 0, 1
    metric = classification.MulticlassJaccardIndex(6, ignore_index=255, average="macro")
    assert mean_iou(confusion(predicted, truth, 6)) == pytest.approx(float(metric(predicted, truth)))


def test_iou_of_nothing_and_of_what_is_out_of_range() -> None:
    nothing = agreement(confusion(torch.tensor([0, 1]), torch.tensor([255, 255]), 2))
    assert np.isnan(nothing.mean_iou)
    assert nothing.class_iou == (None, None)
    with pytest.raises(InvalidArgumentError, match="truth holds the class 3: expected 0 to 2"):
        confusion(torch.tensor([0, 0]), torch.tensor([3, 0]), 3)
    with pytest.raises(InvalidArgumentError, match="predicted holds the class -1"):
        confusion(torch.tensor([-1, 0]), torch.tensor([1, 0]), 3)
    with pytest.raises(InvalidArgumentError, match="same shape"):
        confusion(torch.zeros(2, 3), torch.zeros(3, 2), 3)


def test_the_commonest_class_everywhere() -> None:
    truth = torch.tensor([0, 1, 1, 1, 2, 255])
    counts = confusion(torch.tensor([2, 0, 1, 2, 2, 1]), truth, 4)
    assert torch.equal(most_frequent(counts), confusion(torch.ones_like(truth), truth, 4))


# --- the head


@pytest.mark.parametrize(("grid", "size"), [((4, 6), (32, 48)), ((1, 1), (5, 7)), ((7, 3), (10, 2)), ((5, 5), (5, 5))])
def test_upsampling_is_torchs_bilinear(grid: tuple[int, int], size: tuple[int, int]) -> None:
    logits = torch.randn(2, 3, *grid, dtype=torch.float64, requires_grad=True)
    expected = F.interpolate(logits, size, mode="bilinear")
    found = upsampled(logits, size)
    assert torch.allclose(found, expected)
    weight = torch.randn_like(expected)
    gradients = [torch.autograd.grad((out * weight).sum(), logits)[0] for out in (found, expected)]
    assert torch.allclose(*gradients)


def test_masks_are_predicted_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, 6, 4)
    expected = F.interpolate(logits[None], (50, 30), mode="bilinear")[0].argmax(0)
    monkeypatch.setattr(dense, "_PIECE", 5 * 30 * 7)
    assert (predicted_mask(logits, (50, 30)) == expected).float().mean() > 0.999


def test_a_patch_has_its_commonest_class() -> None:
    labels = torch.randint(0, 4, (3, 12, 8))
    labels[labels == 3] = 255
    labels[0, :4, :4] = 255
    found = patch_labels(labels, (3, 2), 3)
    for n, row, column in np.ndindex(3, 3, 2):
        inside = labels[n, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        counts = inside[inside != 255].bincount(minlength=3)
        assert found[n, row, column] == (counts.argmax() if counts.sum() else 255)


def test_the_head_is_logistic_regression() -> None:
    features = torch.randn(40, 5, 4, 4)
    labels = (features[:, :3] + 0.7 * torch.randn(40, 3, 4, 4)).argmax(1)
    labels[:, 0, 0] = 255
    protocol = quick(batch_norm=False, batch_size=40, steps=1500, lr=0.05, weight_decay=0.0)
    head = dense_probe(features, labels, 3, protocol)
    rows, known = features.movedim(1, -1).reshape(-1, 5), labels.flatten() != 255
    reference = LogisticRegression(C=1e6).fit(rows[known], labels.flatten()[known])
    with torch.no_grad():
        found = head(features).softmax(1).movedim(1, -1).reshape(-1, 3)
    assert np.abs(found.numpy() - reference.predict_proba(rows)).max() < 5e-3


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_head_learns_in_every_precision_and_depends_on_the_seed(
    device: str, dtype: torch.dtype, optimizer: str
) -> None:
    labels = torch.randint(0, 3, (24, 2, 2), device=device).repeat_interleave(8, 1).repeat_interleave(8, 2)
    features = F.one_hot(labels[:, ::8, ::8], 3).movedim(-1, 1).to(dtype)
    protocol = dense_protocol("linear-last", lr=0.3, steps=40, optimizer=optimizer)
    one, two, other = (dense_probe(features, labels, 3, protocol, seed) for seed in (0, 0, 1))
    assert not one.training
    assert torch.equal(one[-1].weight, two[-1].weight)  # type: ignore[index]
    assert not torch.equal(one[-1].weight, other[-1].weight)  # type: ignore[index]
    assert torch.equal(one(features.float()).argmax(1), labels[:, ::8, ::8])


def test_what_a_head_cannot_learn_from() -> None:
    features, labels = torch.randn(4, 3, 2, 2), torch.full((4, 8, 8), 255)
    with pytest.raises(DataError, match="no pixel of the training images has a class"):
        dense_probe(features, labels, 2, quick())
    with pytest.raises(InvalidArgumentError, match="labels hold 7: expected 0 to 1, or 255"):
        dense_probe(features, torch.full((4, 8, 8), 7), 2, quick())
    with pytest.raises(InvalidArgumentError, match="with the same N"):
        dense_probe(features, labels[:3], 2, quick())
    with pytest.raises(DivergedError, match="lower lr"):
        dense_probe(1e30 * features, 0 * labels, 2, quick(lr=1e30, batch_norm=False, optimizer="sgd"))


# --- views


def test_nearest_masks_are_torchs() -> None:
    mask = torch.randint(0, 9, (13, 22))
    expected = F.interpolate(mask[None, None].double(), (31, 17), mode="nearest-exact")[0, 0].long()
    assert torch.equal(resized_mask(mask, (31, 17)), expected)
    assert torch.equal(resized_mask(mask, (13, 22)), mask)


@pytest.mark.parametrize("draws", [[0.0, 0.5, 0.5, 0.1], [0.5, 0.0, 0.999, 0.9], [0.999, 0.7, 0.2, 0.1]])
def test_windows_of_picture_and_mask_stay_together(draws: list[float]) -> None:
    picture, mask = masks_of_colours("train", 1, (50, 80))[0]
    picture[:, :8, :8] = 128
    for seen, labels in (
        random_window(picture, mask, 32, torch.tensor(draws)),
        training_view(picture, mask, 32, torch.tensor(draws), crop=True, flip=True),
        whole(picture, mask, 32),
    ):
        assert (seen.shape, labels.shape) == ((3, 32, 32), (32, 32))
        nearest = (seen.movedim(0, -1)[:, :, None].float() - COLOURS.float()).abs().sum(-1).argmin(-1)
        known = labels != 255
        assert (nearest == labels)[known].float().mean() > 0.93, "only the seams are mixed"
    outside = random_window(picture, mask, 32, torch.zeros(4))[1]
    assert (outside[16:] == 255).all(), "at half the size there is nothing below the picture"


@pytest.mark.parametrize("shape", [(32, 32), (32, 100), (90, 40)])
def test_windows_cover_the_picture(shape: tuple[int, int]) -> None:
    picture = torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
    seen, places, (height, width) = windows(picture, 32)
    assert min(height, width) == 32
    covered = torch.zeros(height, width)
    for top, left in places:
        covered[top : top + 32, left : left + 32] += 1
    assert covered.min() > 0
    assert seen.shape == (len(places), 3, 32, 32)
    if shape == (32, 32):
        assert torch.equal(seen[0], picture)


# --- protocols


def test_protocols_say_what_they_are() -> None:
    assert {"linear-last", "linear-last4", "dinov2-like", "quick"} <= set(DENSE_PROTOCOLS)
    assert not any(protocol.changes for protocol in DENSE_PROTOCOLS.values())
    text = str(dense_protocol("linear-last4", lr=0.5))
    assert "linear-last4 (changed lr 0.5)" in text
    assert "the layer and the 3 before it" in text
    assert "448 x 448" in text
    assert "original size of the masks" in text
    assert dense_protocol("dinov2-like", epochs=3).steps is None
    assert not replace(DENSE_PROTOCOLS["quick"], size=64).changes
    assert replace(DENSE_PROTOCOLS["linear-last"], size=64).changes == {"size": 64}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("linear", {}, "expected one of linear-last"),
        ("quick", {"speed": 3}, "change has speed"),
        ("quick", {"name": "mine"}, "change has name"),
        ("quick", {"epochs": 0}, "epochs=0"),
        ("quick", {"size": 2.5}, "size=2.5"),
        ("quick", {"epochs": 3, "steps": 3}, "expected one of them"),
        ("quick", {"optimizer": "lion"}, "adamw, sgd"),
        ("quick", {"lr": 0}, "lr > 0"),
        ("dinov2-like", {"test_labels": "grid"}, "original size"),
        ("dinov2-like", {"train_labels": "grid"}, "size of the input"),
    ],
)
def test_protocols_that_cannot_be(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        dense_protocol(name, **changes)


# --- the whole


@pytest.mark.parametrize("name", sorted(DENSE_PROTOCOLS))
def test_the_probe_learns_what_the_features_show(name: str) -> None:
    protocol = dense_protocol(name, size=32, steps=150, lr=0.05, warmup=0)
    train, test = masks_of_colours("train", 30), masks_of_colours("test", 11)
    found = segment(patch_colours, train, test, protocol, batch_size=8, examples=3)
    assert found.agreement.mean_iou > 0.85
    assert found.baseline.mean_iou < 0.2
    assert (found.train_images, found.test_images, found.skipped) == (30, 11, ())
    assert [example.name for example in found.examples] == ["test 0", "test 3", "test 7"]
    for example in found.examples:
        assert example.picture.shape[1:] == example.truth.shape == example.predicted.shape
        right = (example.predicted == example.truth)[example.truth != 255]
        assert right.float().mean() > 0.85


def test_the_numbers_are_those_of_the_masks() -> None:
    test = masks_of_colours("test", 9)
    found = segment(patch_colours, masks_of_colours("train", 20), test, quick(), batch_size=4, examples=9)
    truth, predicted = (
        torch.cat([getattr(example, name).flatten() for example in found.examples]) for name in ("truth", "predicted")
    )
    assert len(found.examples) == 9
    known = truth != 255
    expected = jaccard_score(truth[known], predicted[known], average="macro")
    assert found.agreement.mean_iou == pytest.approx(expected)
    commonest = truth[known].mode().values
    guess = jaccard_score(truth[known], commonest.expand(int(known.sum())), average="macro", zero_division=0)
    assert found.baseline.mean_iou == pytest.approx(guess)


def test_features_kept_and_features_computed_again_give_the_same() -> None:
    train, test = masks_of_colours("train", 20), masks_of_colours("test", 5)
    calls: list[int] = []

    def counted(pictures: Tensor) -> Tensor:
        calls.append(len(pictures))
        return patch_colours(pictures)

    kept = segment(counted, train, test, quick(epochs=3))
    assert sum(calls) == 20 + 5
    calls.clear()
    again = segment(counted, train, test, quick(epochs=3), memory_gb=0.0)
    assert sum(calls) > 3 * 20
    assert again.agreement == kept.agreement
    assert segment(patch_colours, train, test, quick(epochs=3)).agreement == kept.agreement
    rounded = segment(lambda pictures: patch_colours(pictures).bfloat16(), train, test, quick(epochs=3))
    for name, weight in rounded.head.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(weight, kept.head.state_dict()[name])  # type: ignore[union-attr]
    crops = [segment(patch_colours, train, test, quick(epochs=2, flip=True), seed=seed) for seed in (3, 3)]
    assert crops[0].agreement == crops[1].agreement


def test_one_window_is_the_whole_picture() -> None:
    train, test = masks_of_colours("train", 20), masks_of_colours("test", 5, size=(48, 48))
    one, other = (segment(patch_colours, train, test, quick(test_view=view)) for view in ("whole", "windows"))
    assert one.agreement.mean_iou == pytest.approx(other.agreement.mean_iou, abs=0.02)


def test_windows_that_overlap_are_averaged() -> None:
    probe = _Probe(patch_colours, quick(), 32, 3, 2, Readings())
    picture = COLOURS[1].view(3, 1, 1).expand(3, 40, 110)
    logits = probe._in_windows(torch.nn.Identity(), picture)
    assert logits.shape == (3, 32, 88)
    assert torch.allclose(logits, (COLOURS[1] / 255).bfloat16().float().view(3, 1, 1).expand(3, 32, 88))


def test_where_masks_are_compared_changes_the_number() -> None:
    train, test = masks_of_colours("train", 20), masks_of_colours("test", 10)
    numbers = [
        segment(patch_colours, train, test, quick(test_labels=labels)).agreement.mean_iou
        for labels in ("original", "input", "grid")
    ]
    assert len(set(numbers)) == 3


def test_broken_pictures_end_it_or_are_skipped() -> None:
    train, test = masks_of_colours("train", 12, broken=5), masks_of_colours("test", 5, broken=0)
    for protocol in (quick(epochs=2), quick(epochs=2, flip=True)):
        with pytest.raises(DataError, match="picture 5 is broken"):
            segment(patch_colours, train, test, protocol, batch_size=3)
        found = segment(patch_colours, train, test, protocol, batch_size=3, readings=Readings("skip"), examples=2)
        assert found.skipped == ("picture 5 is broken", "picture 0 is broken")
        assert found.test_images == 4
    only = masks_of_colours("train", 1, broken=0)
    with pytest.raises(DataError, match="no picture of colours can be read; the first: picture 0"):
        segment(patch_colours, only, test, quick(), readings=Readings("skip"))


def test_what_cannot_be_probed() -> None:
    train, test = masks_of_colours("train", 3), masks_of_colours("test", 2)
    with pytest.raises(InvalidArgumentError, match="different classes"):
        segment(patch_colours, train, replace(test, classes=("a", "b")), quick())
    beyond = replace(train, read=lambda index: (torch.zeros(3, 40, 40, dtype=torch.uint8), torch.full((40, 40), 260)))
    with pytest.raises(InvalidArgumentError, match="labels hold 260: expected 0 to 3, or 255"):
        segment(patch_colours, beyond, test, quick(flip=True))
    with pytest.raises(InvalidArgumentError, match=r"protocol\.size is None"):
        segment(patch_colours, train, test, DENSE_PROTOCOLS["quick"])
    with pytest.raises(InvalidArgumentError, match=r"expected \(B, D, h, w\)"):
        segment(lambda pictures: patch_colours(pictures).mean((2, 3)), train, test, quick())
    with pytest.raises(InvalidArgumentError, match="batch_size=0"):
        segment(patch_colours, train, test, quick(), batch_size=0)


# --- the command


def test_its_flags() -> None:
    words = "--model m --data pet:x --protocol quick --layers 0 -1"
    pairs = "--change epochs 5 lr 0.01 optimizer sgd --model-args depth 2"
    config = tyro.cli(SegmentConfig, args=f"{words} {pairs}".split())
    assert config.change == {"epochs": 5, "lr": 0.01, "optimizer": "sgd"}
    assert (config.layers, config.model_args, config.protocol) == ((0, -1), {"depth": 2}, "quick")


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The pictures of colours as files."""
    root = tmp_path_factory.mktemp("colours")
    for split, count in (("train", 12), ("val", 6)):
        data = masks_of_colours("test" if split == "val" else split, count)
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
        for i in range(count):
            picture, mask = data[i]
            Image.fromarray(picture.movedim(0, -1).contiguous().numpy()).save(root / "images" / split / f"{i}.png")
            Image.fromarray(mask.to(torch.uint8).numpy()).save(root / "masks" / split / f"{i}.png")
    (root / "classes.txt").write_text("\n".join(data.classes))
    return f"masks:{root}"


def tiny(data: str = "shapes", **options: Any) -> SegmentConfig:
    defaults: dict[str, Any] = {
        "model": "vit_tiny_patch16_224",
        "data": data,
        "protocol": "quick",
        "change": {"epochs": 2},
        "model_args": TINY,
        "limit": 8,
        "device": "cpu",
    }
    return SegmentConfig(**{**defaults, **options})


def test_the_command_writes_numbers_pictures_and_the_head(tmp_path: Path, on_disk: str) -> None:
    result = tiny(on_disk, out=tmp_path / "new", layers=(0, -1), examples=2).run()
    assert list(result.layers) == [0, 3]
    assert (result.best.train_images, result.best.test_images) == (8, 6)
    assert result.values == {f"mIoU, layer {i}": result.layers[i].agreement.mean_iou for i in (0, 3)}
    written = json.loads((tmp_path / "new" / "results.json").read_text())
    assert written == json.loads(json.dumps(result.to_dict()))
    assert [row["layer"] for row in written["layers"]] == [0, 3]
    assert written["layers"][0]["protocol"]["size"] == 32
    assert [row["name"] for row in written["layers"][0]["classes"]] == list(result.best.classes)
    text = str(result)
    assert "mIoU" in text
    assert "commonest class" in text
    assert "protocol quick (changed epochs 2)" in text
    with Image.open(tmp_path / "new" / "masks.png") as sheet:
        assert sheet.width > 500
        assert {palette(4)[i] for i in result.best.examples[0].truth.unique().tolist() if i != 255} <= {
            colour for _, colour in sheet.getcolors(10**6)
        }
    page = (tmp_path / "new" / "report.html").read_text()
    assert page.count("<svg") == 2 * 3 + 1
    assert load_file(tmp_path / "new" / "head.safetensors")["1.weight"].shape == (4, 24, 1, 1)
    assert tiny(on_disk, layers=(0, -1)).run().layers == result.layers, "the same seed, the same numbers"


def test_the_command_on_shapes_and_on_every_block() -> None:
    result = tiny(layers=()).run()
    assert list(result.layers) == [0, 1, 2, 3]
    assert len(result.best.classes) == 11


def test_the_command_with_several_blocks_and_other_patches(on_disk: str) -> None:
    options: dict[str, Any] = {"limit": 4, "change": {"steps": 2}}
    result = tiny(on_disk, protocol="linear-last4", image_size=32, **options).run()
    head: Any = result.best.head
    assert head[-1].in_channels == 4 * 24
    with pytest.raises(InvalidArgumentError, match="concatenates 4 blocks"):
        tiny(on_disk, protocol="linear-last4", image_size=32, layers=(2,), **options).run()
    fourteen = {**TINY, "patch_size": 14, "img_size": 28}
    result = tiny(on_disk, protocol="linear-last", model_args=fourteen, limit=4, change={"size": 30, "steps": 1}).run()
    assert result.best.protocol.size == 42


def test_the_command_skips_what_it_cannot_read(on_disk: str, tmp_path: Path) -> None:
    shutil.copytree(on_disk.removeprefix("masks:"), tmp_path / "data")
    (tmp_path / "data" / "images" / "train" / "0.png").write_bytes(b"no picture")
    (tmp_path / "data" / "masks" / "val" / "1.png").unlink()
    spec = f"masks:{tmp_path / 'data'}"
    with pytest.raises(DataError, match=r"1\.png is missing"):
        tiny(spec).run()
    result = tiny(spec, on_error="skip", limit=None, out=tmp_path / "out").run()
    assert (result.best.train_images, result.best.test_images, len(result.best.skipped)) == (11, 5, 2)
    assert "skipped 2 that cannot be read" in str(result)
    assert "What could not be read" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers": (9,)}, InvalidArgumentError, "layers="),
        ({"limit": 0}, InvalidArgumentError, "limit=0"),
        ({"change": {"nothing": 1}}, InvalidArgumentError, "change has nothing"),
        ({"data": "voc"}, DataError, "voc:PATH"),
        ({"image_size": 30}, InvalidArgumentError, "multiple of the patch"),
    ],
)
def test_commands_that_cannot_be(on_disk: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tiny(**{"data": on_disk, **options}).run()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match="is a file; expected a folder"):
        tiny(out=tmp_path / "file").run()


@needs_chromium
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_in_a_browser(tmp_path: Path, width: int) -> None:
    found = segment(patch_colours, masks_of_colours("train", 9), masks_of_colours("test", 4), quick(), examples=3)
    facts = {"command": "wellposed evaluate segment", "seed": "0"}
    write_result(SegmentResult("colours", "0", "colours", {0: found}, 1, facts), tmp_path)
    check_in_a_browser((tmp_path / "report.html").read_text(), width, panels=3 * 3 + 1, folder=tmp_path)


@pytest.mark.gpu
def test_the_probe_on_a_gpu_is_the_same_every_time(on_disk: str) -> None:
    first, second = (tiny(on_disk, device="cuda", protocol="linear-last", image_size=32).run() for _ in range(2))
    assert first.layers == second.layers
    on_cpu = tiny(on_disk, protocol="linear-last", image_size=32).run()
    assert first.best.agreement.pixel_accuracy == pytest.approx(on_cpu.best.agreement.pixel_accuracy, abs=0.03)


def test_classes_have_colours_of_their_own() -> None:
    for count in (1, 2, 21, 171):
        assert len(set(palette(count))) == len(palette(count)) == count
    assert coloured(torch.tensor([[0, 1, 255]]), 2).tolist() == [[list(palette(2)[0]), list(palette(2)[1]), [255] * 3]]
