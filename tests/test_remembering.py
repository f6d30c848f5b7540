"""Patch features that are kept on disk: what comes from there is what the model gave."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from wellposed.errors import InvalidArgumentError
from wellposed.evaluation.backbones import Backbone, open_backbone
from wellposed.evaluation.discovery.command import DiscoverConfig
from wellposed.evaluation.remembering import Remembering
from wellposed.evaluation.segmentation.command import SegmentConfig

SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 32, "patch_size": 8}
MODEL: dict[str, Any] = {"model": "vit_tiny_patch16_224", "model_args": SMALL, "device": "cpu"}


def opened(seed: int = 0) -> Backbone:
    return open_backbone("vit_tiny_patch16_224", model_args=SMALL, device="cpu", seed=seed)


def remembering(folder: Path, seed: int = 0) -> Remembering:
    return Remembering(**vars(opened(seed)), cache=folder)


def pictures(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_only_new_pictures_go_through_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = Backbone.features
    monkeypatch.setattr(
        Backbone, "features", lambda self, images, *how: seen.append(len(images)) or plain(self, images, *how)
    )
    images = pictures(5)
    remembering(tmp_path).features(images[:3], (0, -1), "keys")
    found = remembering(tmp_path).features(images, (0, -1), "keys")
    again = remembering(tmp_path).features(images.flip(0), (0, -1), "keys")
    assert seen == [3, 2]
    for one, other, expected in zip(found, again, plain(opened(), images, (0, -1), "keys"), strict=True):
        assert one.grid == expected.grid
        torch.testing.assert_close(one.patches_BND, expected.patches_BND, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one.summary_BD, expected.summary_BD, rtol=1e-5, atol=1e-5)
        assert torch.equal(one.patches_BND.flip(0), other.patches_BND)


@pytest.mark.parametrize("change", ["weights", "kind", "layers", "pixels"])
def test_what_differs_is_another_file(change: str, tmp_path: Path) -> None:
    images = pictures(1)
    remembering(tmp_path).features(images, (0,), "tokens")
    before = len(list(tmp_path.iterdir()))
    other = images + (1 if change == "pixels" else 0)
    layers = (1,) if change == "layers" else (0,)
    remembering(tmp_path, seed=int(change == "weights")).features(
        other.to(torch.uint8), layers, "keys" if change == "kind" else "tokens"
    )
    assert (before, len(list(tmp_path.iterdir()))) == (1, 2)


def test_a_damaged_file_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = pictures(1)
    expected = remembering(tmp_path).features(images)[0].patches_BND
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    assert torch.equal(remembering(tmp_path).features(images)[0].patches_BND, expected)
    assert "its features are computed again" in capsys.readouterr().err
    assert file.read_bytes() == whole


def test_wrong_images_are_refused_as_without(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="expected uint8"):
        remembering(tmp_path).features(pictures(1).float())


def test_commands_give_the_same_numbers_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Any] = [
        DiscoverConfig(**MODEL, count=6, cache=tmp_path / "kept"),
        SegmentConfig(**MODEL, data="shapes", protocol="quick", change={"epochs": 1}, limit=6, cache=tmp_path / "kept"),
    ]
    first = [config.run().values for config in configs]
    monkeypatch.setattr(Backbone, "features", lambda *given: pytest.fail("the model ran again"))
    assert [config.run().values for config in configs] == first


def test_random_crops_are_not_kept(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="dinov2-like never sees a picture the same way twice"):
        SegmentConfig(**MODEL, data="shapes", protocol="dinov2-like", cache=tmp_path).run()
