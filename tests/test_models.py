"""The names that `import wellposed.models` gives timm."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import wellposed as wp
import wellposed.models
from wellposed.errors import InvalidArgumentError
from zoo import SMALL_VIT


@pytest.mark.parametrize(("size", "width"), [("tiny", 192), ("small", 384), ("base", 768)])
def test_names_are_registered_at_their_size(size: str, width: int) -> None:
    name = f"skipless_vit_{size}_patch16_224"
    assert name in timm.list_models("skipless_*")
    model: Any = timm.create_model(name, depth=1)
    assert model.embed_dim == width
    assert wp.recipe(model) == [
        {"change": "cut_skips", "attention": True, "mlp": True},
        {"change": "condition_", "alpha": 2.0, "beta": 0.6, "c": 3.0, "scale_mlp": True},
    ]
    torch.testing.assert_close(torch.linalg.svdvals(model.blocks[0].mlp.fc1.weight), torch.full((width,), 2.0))


def test_timm_features_work() -> None:
    model: Any = timm.create_model("skipless_vit_tiny_patch16_224", **SMALL_VIT, drop_path_rate=0.5)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(x), model(x)), "drop-path is off in training mode too"
    _, features = model.forward_intermediates(x, indices=2)
    assert [feature.shape for feature in features] == [(1, 32, 4, 4)] * 2
    model.set_input_size(img_size=64)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)
    pyramid = timm.create_model("skipless_vit_tiny_patch16_224", features_only=True, out_indices=[1], **SMALL_VIT)
    assert pyramid(x)[0].shape == (1, 32, 4, 4)
    assert not any(skip.attention or skip.mlp for skip in wp.skips(pyramid))


def test_constants_can_be_given() -> None:
    model = timm.create_model("skipless_vit_tiny_patch16_224", **SMALL_VIT, alpha=1.8, beta=1.0, scale_mlp=False)
    assert wp.recipe(model)[1] == {"change": "condition_", "alpha": 1.8, "beta": 1.0, "c": 3.0, "scale_mlp": False}
    with pytest.raises(InvalidArgumentError, match="alpha=-1"):
        timm.create_model("skipless_vit_tiny_patch16_224", **SMALL_VIT, alpha=-1)


def test_there_are_no_pretrained_weights() -> None:
    with pytest.raises(InvalidArgumentError, match="no pretrained weights"):
        timm.create_model("skipless_vit_tiny_patch16_224", pretrained=True)


def test_saved_models_load_without_the_registration(tmp_path: Path) -> None:
    model: nn.Module = timm.create_model("skipless_vit_tiny_patch16_224", **SMALL_VIT).eval()
    wp.save(model, tmp_path)
    assert '"vit_tiny_patch16_224"' in (tmp_path / "wellposed.json").read_text()
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(wp.load(tmp_path)(x), model(x))


def test_convmixer_tiny(tmp_path: Path) -> None:
    """timm's class at a size timm has no name for; a saved one loads without the registration."""
    assert timm.is_model("convmixer_tiny")
    model: Any = timm.create_model("convmixer_tiny", num_classes=10).eval()
    assert (model.num_features, len(model.blocks), model.stem[0].stride) == (256, 8, (2, 2))
    assert model.blocks[0][0].fn[0].kernel_size == (5, 5)
    small = timm.create_model("convmixer_tiny", dim=16, depth=2, patch_size=4, num_classes=5).eval()
    wp.save(wp.cut_skips(small), tmp_path)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(wp.load(tmp_path)(x), small(x))
    assert "convmixer_tiny" not in (tmp_path / "wellposed.json").read_text()
    with pytest.raises(InvalidArgumentError, match="no argument 'embed_dim'; it has dim, depth"):
        timm.create_model("convmixer_tiny", embed_dim=16)
    with pytest.raises(InvalidArgumentError, match="no pretrained weights"):
        timm.create_model("convmixer_tiny", pretrained=True)
