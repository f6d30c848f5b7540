"""Patch features on disk in place of a model: `discover`, `segment` and `pca` on features:FOLDER."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from wellposed.cli import main
from wellposed.errors import DataError, InvalidArgumentError
from wellposed.evaluation.discovery.command import DiscoverConfig
from wellposed.evaluation.pictures.command import PcaConfig
from wellposed.evaluation.segmentation.command import SegmentConfig

COUNT, GRID, PATCH = 6, (5, 6), 4


def made(seed: int) -> dict[str, Tensor]:
    """Images with an object of 2 x 3 patches each, whose features point another way than the background's."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(COUNT, *GRID, 1)
    features += 0.05 * torch.randn(features.shape, generator=generator)
    masks = torch.zeros(COUNT, GRID[0] * PATCH, GRID[1] * PATCH, dtype=torch.uint8)
    boxes = torch.zeros(COUNT, 2, 4)
    for i in range(COUNT):
        top, left = 1 + i % 2, 1 + i % 3
        features[i, top : top + 2, left : left + 3] += torch.tensor([-1.0, 1.0, 0.0, 0.0])
        masks[i, PATCH * top : PATCH * (top + 2), PATCH * left : PATCH * (left + 3)] = 1
        boxes[i, 0] = PATCH * torch.tensor([left, top, left + 3, top + 2])
    noise = torch.randn(COUNT, 3, 3, 7, generator=generator)
    size = torch.tensor(masks.shape[1:])
    images = (255 * masks[:, None].float()).expand(-1, 3, -1, -1).to(torch.uint8).contiguous()
    return {"layer 2": features, "layer 10": noise, "masks": masks, "boxes": boxes, "size": size, "images": images}


def stored(folder: Path, change: Callable[[dict[str, Tensor]], Any] = lambda tensors: None) -> str:
    folder.mkdir(exist_ok=True)
    for seed, split in enumerate(("train", "test")):
        tensors = made(seed)
        change(tensors)
        save_file(tensors, folder / f"{split}.safetensors")
    return f"features:{folder}"


def test_objects_are_found_by_stored_features(tmp_path: Path) -> None:
    found = DiscoverConfig(model=stored(tmp_path), device="cpu", batch_size=4, out=tmp_path / "out").run()
    assert list(found.corloc) == ["layer 2", "layer 10"]
    assert found.corloc["layer 2"] == 1
    assert found.whole_picture == 0
    assert [one.boxes[0].tolist() for one in found.found] == made(1)["boxes"][:, 0].tolist()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"discover.json", "discover.png", "discover.html"}


def test_without_images_there_is_nothing_to_show_and_the_numbers_are_there(tmp_path: Path) -> None:
    folder = stored(tmp_path, lambda tensors: tensors.pop("images"))
    DiscoverConfig(model=folder, device="cpu", out=tmp_path / "discover").run()
    assert [path.name for path in (tmp_path / "discover").iterdir()] == ["discover.json"]
    SegmentConfig(model=folder, protocol="quick", device="cpu", out=tmp_path / "segment").run()
    assert not (tmp_path / "segment" / "masks.png").exists()


def test_images_without_an_object_are_not_counted(tmp_path: Path) -> None:
    def empty(tensors: dict[str, Tensor]) -> None:
        tensors["boxes"][0] = 0

    assert DiscoverConfig(model=stored(tmp_path, empty), device="cpu").run().without_objects == 1
    with pytest.raises(DataError, match=r"no picture of its images .* has an object"):
        DiscoverConfig(model=stored(tmp_path, lambda tensors: tensors["boxes"].zero_()), device="cpu").run()


@pytest.mark.parametrize("protocol", ["quick", "patch-grid", "linear-last"])
def test_pixels_are_told_by_stored_features(protocol: Any, tmp_path: Path) -> None:
    change: dict[str, Any] = {"epochs": 100, "lr": 0.1}
    config = SegmentConfig(model=stored(tmp_path), protocol=protocol, change=change, device="cpu", out=tmp_path / "out")
    found = config.run()
    assert found.layers["layer 2"].agreement.mean_iou > (0.95 if protocol == "patch-grid" else 0.75)
    assert found.layers["layer 10"].agreement.mean_iou < 0.75
    assert found.best is found.layers["layer 2"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"results.json", "masks.png", "report.html", "head.safetensors"}


def test_stored_features_as_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = stored(tmp_path / "one"), stored(tmp_path / "other")
    flags = ["--device", "cpu", "--count", "3", "--out", str(tmp_path / "out")]
    assert main(["evaluate", "pca", "--model", one, "--other", other, *flags]) == 0
    said = capsys.readouterr().out
    assert "3 images" in said
    assert "layer 10" in said
    assert (tmp_path / "out" / "pca.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda tensors: tensors.pop("boxes"),
            r"holds layer 10, layer 2, masks, size, images; .* and boxes \(N, K, 4\)",
        ),
        (
            lambda tensors: tensors.update(boxes=tensors["boxes"][:, 0].clone()),
            r"boxes is torch.float32 \(6, 4\), expected \(N",
        ),
        (lambda tensors: tensors.update(size=torch.tensor([1.0, 2.0])), "size is torch.float32 .* integers"),
        (lambda tensors: tensors.update(size=torch.tensor([9, 9])), r"images are \(20, 24\) and size is \(9, 9\)"),
        (lambda tensors: tensors.update(x=torch.zeros(COUNT, 30, 4)), r"x is torch.float32 \(6, 30, 4\), expected"),
        (lambda tensors: tensors.update(x=torch.full((COUNT, 2, 2, 2), torch.nan)), "x holds NaN or Inf"),
        (lambda tensors: [tensors.pop("layer 2"), tensors.pop("layer 10")], "expected features"),
    ],
)
def test_files_that_cannot_be_used_are_told(change: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told):
        DiscoverConfig(model=stored(tmp_path, change), device="cpu").run()


def test_masks_and_layers_of_both_files_must_go_together(tmp_path: Path) -> None:
    folder = stored(tmp_path)
    test = made(1)
    for change, told in (
        ({"masks": test["masks"] + 5}, "labels hold 5: expected 0 to 1"),
        ({"layer 2": test["layer 10"].clone()}, "layer 2 is 4 wide in train and 7 in test"),
        ({"more": test["layer 10"].clone()}, "only one of them has more"),
    ):
        save_file({**test, **change}, tmp_path / "test.safetensors")
        with pytest.raises((DataError, InvalidArgumentError), match=told):
            SegmentConfig(model=folder, protocol="quick", device="cpu").run()
    (tmp_path / "train.safetensors").unlink()
    with pytest.raises(DataError, match=r"train.safetensors cannot be read"):
        SegmentConfig(model=folder, protocol="quick", device="cpu").run()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (DiscoverConfig(model="features:x", layers=(3,)), "layers: not with features:x, which has its own"),
        (DiscoverConfig(model="features:x", data="pet:y"), "data: not with features:x"),
        (DiscoverConfig(model="features:/nowhere"), "there is no such folder"),
        (SegmentConfig(model="features:.", protocol="linear-last4"), "protocol linear-last4 sees pictures anew"),
        (PcaConfig(model="features:x", layers=(3,)), "layers: features on disk are shown as they are"),
        (PcaConfig(model="features:x", other="vit_tiny_patch16_224"), "model and other: features on disk"),
    ],
)
def test_settings_that_stored_features_have_settled(config: Any, told: str, tmp_path: Path) -> None:
    if config.model == "features:.":
        config = SegmentConfig(model=stored(tmp_path), protocol=config.protocol, device="cpu")
    with pytest.raises(InvalidArgumentError, match=told):
        config.run()


def test_other_images_are_not_compared(tmp_path: Path) -> None:
    one = stored(tmp_path / "one")
    other = stored(tmp_path / "other", lambda tensors: tensors["images"].fill_(7))
    with pytest.raises(DataError, match="hold different images"):
        PcaConfig(model=one, other=other, device="cpu", out=tmp_path / "out").run()
