"""Weights under the names of DINO's authors, there and back."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn

import wellposed as wp
from small_dino import small_dino
from wellposed.diagnosis.sources import open_model
from wellposed.errors import InvalidArgumentError, ModelFileError, RecipeMismatchError
from wellposed.recipes.dino_names import from_dino, read_dino
from wellposed.training import load_dino, open_networks, save_dino
from wellposed.training.dino_checkpoints import to_dino
from wellposed.training.dino_network import Head, Network

SMALL = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 12, "num_heads": 2}


def vit(**more: Any) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **{"num_classes": 0, "dynamic_img_size": True} | SMALL | more)


@pytest.fixture
def networks() -> tuple[Network, Network]:
    student, teacher = (Network(vit(), Head(12, 10, 8, 20)) for _ in range(2))
    student.expect(8, 8)
    return student, teacher


def test_names_are_those_of_the_authors(networks: tuple[Network, Network]) -> None:
    """Written down from the published checkpoints of ViT-S/16: a wrapped student, a bare teacher, timm's blocks."""
    made = to_dino(*networks)
    assert made.keys() == {"student", "teacher"}
    block = ["norm1.weight", "norm1.bias", "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias"]
    block += ["norm2.weight", "norm2.bias", "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias"]
    backbone = ["cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"]
    backbone += [f"blocks.{i}.{name}" for i in range(2) for name in block] + ["norm.weight", "norm.bias"]
    head = [f"mlp.{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")]
    head += ["last_layer.weight_g", "last_layer.weight_v"]
    names = {f"backbone.{name}" for name in backbone} | {f"head.{name}" for name in head}
    assert made["teacher"].keys() == names
    assert made["student"].keys() == {f"module.{name}" for name in names}
    assert made["teacher"]["head.last_layer.weight_g"].shape == (20, 1)
    assert made["teacher"]["head.last_layer.weight_v"].shape == (20, 8)


def test_there_and_back(networks: tuple[Network, Network], tmp_path: Path) -> None:
    path = save_dino(tmp_path / "checkpoint.pth", *networks)
    images = torch.randn(2, 3, 3, 16, 16)
    for who, network in zip(("student", "teacher"), networks, strict=True):
        backbone, head = read_dino(path, who)  # type: ignore[arg-type]
        again = Network(vit(), Head(12, 10, 8, 20))
        again.backbone.load_state_dict(backbone)
        again.head.load_state_dict(head)
        assert torch.equal(again.eval()(images)[0], network.eval()(images)[0])
        plain = load_dino(vit(num_classes=5), path, who)  # type: ignore[arg-type]
        with torch.no_grad():
            torch.testing.assert_close(plain.forward_features(images[0])[:, 0], network(images)[1][0])


def test_a_head_whose_lengths_were_learned_computes_with_them() -> None:
    head = Head(12, 10, 8, 20)
    lengths = torch.rand(20, 1) + 0.5
    x = torch.randn(3, 12)
    before = head(x)
    head.load_state_dict(head.state_dict() | {"last_layer.weight_g": lengths})
    torch.testing.assert_close(head(x), before * lengths[:, 0])


def test_a_published_backbone_alone(tmp_path: Path) -> None:
    torch.save(vit().state_dict(), tmp_path / "backbone.pth")
    backbone, head = read_dino(tmp_path / "backbone.pth")
    assert head == {}
    assert backbone.keys() == vit().state_dict().keys()
    load_dino(vit(), tmp_path / "backbone.pth")


def test_a_whole_checkpoint_as_their_training_writes_it(networks: tuple[Network, Network], tmp_path: Path) -> None:
    """With the arguments of the run and, in the optimizer's state, learning rates that are numbers of numpy's."""
    more = {"args": Namespace(arch="vit_small", lr=5e-4), "epoch": 3, "optimizer": {"lr": np.float64(0.25)}}
    torch.save(to_dino(*networks) | more, tmp_path / "checkpoint.pth")
    backbone, head = read_dino(tmp_path / "checkpoint.pth")
    expected = networks[1].backbone.state_dict()
    assert backbone.keys() == expected.keys()
    assert head.keys() == networks[1].head.state_dict().keys()
    opened = open_model("vit_tiny_patch16_224", tmp_path / "checkpoint.pth", SMALL)  # as evaluate and diagnose do
    assert all(torch.equal(tensor, expected[name]) for name, tensor in opened.state_dict().items())


def test_timm_reads_what_a_run_leaves(tmp_path: Path) -> None:
    run = wp.pretrain(small_dino(tmp_path / "run", epochs=1, knn_images=0), quiet=True)
    small = {"img_size": 8, "patch_size": 2, "depth": 2, "embed_dim": 16, "num_heads": 2, "in_chans": 1}
    file = str(run.out / "wellposed.safetensors")
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, checkpoint_path=file, **small).eval()
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(model(images), run.model(images))


def test_a_run_as_a_checkpoint_of_the_authors(tmp_path: Path) -> None:
    run = wp.pretrain(small_dino(tmp_path / "run", skips=False, epochs=1), quiet=True)
    student, teacher = open_networks(run.out)
    images = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(teacher.eval().features(images), run.model(images))
    assert not torch.allclose(student.eval().features(images), run.model(images))
    assert {entry["change"] for entry in wp.recipe(student.backbone)} == {"cut_skips"}
    backbone, head = from_dino(to_dino(student, teacher), "student")
    assert all(torch.equal(backbone[name], tensor) for name, tensor in student.backbone.state_dict().items())
    assert all(torch.equal(head[name], tensor) for name, tensor in student.head.state_dict().items())


def test_such_a_checkpoint_carries_its_recipe(tmp_path: Path) -> None:
    """The names are those of a ViT with skips and softmax: its weights must not become another model's unseen."""
    changes: dict[str, Any] = {"skips": False, "attention": "degree-3", "attention_scale": "learned"}
    run = wp.pretrain(small_dino(tmp_path / "run", **changes, epochs=1, knn_images=0), quiet=True)
    path = save_dino(tmp_path / "checkpoint.pth", *open_networks(run.out))
    small = {"img_size": 8, "patch_size": 2, "depth": 2, "embed_dim": 16, "num_heads": 2, "in_chans": 1}
    with pytest.raises(RecipeMismatchError, match="cut_skips"):
        load_dino(vit(**small), path)
    opened = open_model("vit_tiny_patch16_224", path, small)
    assert wp.recipe(opened) == wp.recipe(run.model)
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(opened.eval()(images), run.model(images))
    again = wp.use_attention(wp.cut_skips(vit(**small)), wp.Polynomial(3, learnable=True))
    torch.testing.assert_close(load_dino(again, path).eval()(images), run.model(images))
    torch.save(vit().state_dict(), tmp_path / "theirs.pth")
    with pytest.raises(RecipeMismatchError, match="weights: no change"):
        load_dino(wp.cut_skips(vit()), tmp_path / "theirs.pth")


def test_what_is_no_checkpoint(networks: tuple[Network, Network], tmp_path: Path) -> None:
    path = save_dino(tmp_path / "checkpoint.pth", *networks)
    with pytest.raises(ModelFileError, match=r"not a VisionTransformer like this one.*blocks\.2"):
        load_dino(vit(depth=3), path)
    with pytest.raises(ModelFileError, match="pos_embed"):
        load_dino(vit(img_size=20), path)
    with pytest.raises(InvalidArgumentError, match="who='both'"):
        read_dino(path, "both")  # type: ignore[arg-type]
    with pytest.raises(ModelFileError, match="the checkpoint holds epoch: expected"):
        from_dino({"epoch": 3})
    torch.save({"teacher": {"a": torch.ones(1)}, "args": pytest.raises}, tmp_path / "code.pth")
    with pytest.raises(ModelFileError, match=r"cannot be read as weights alone.*from_dino"):
        read_dino(tmp_path / "code.pth")
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(ModelFileError, match=r"text\.pth cannot be read"):
        read_dino(tmp_path / "text.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ModelFileError, match="holds a list"):
        read_dino(tmp_path / "list.pth")
