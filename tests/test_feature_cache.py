"""Features of whole sets, kept on disk or not, and the two commands that classify with them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import wellposed as wp
from small_runs import small_config
from wellposed.data import ImageSet, open_data
from wellposed.errors import DataError, InvalidArgumentError, RunError
from wellposed.evaluation import cache as cache_module
from wellposed.evaluation.backbones import Backbone, model_fingerprint, open_backbone
from wellposed.evaluation.cache import set_features
from wellposed.evaluation.classification.command import KnnConfig, LinearConfig
from wellposed.evaluation.extraction import extract
from wellposed.evaluation.features import layer_features
from wellposed.evaluation.labelled import read_features, write_features
from zoo import SMALL_VIT, vit

GREY_VIT = SMALL_VIT | {"in_chans": 1, "img_size": 8, "patch_size": 2}


@pytest.fixture
def backbone() -> Backbone:
    return open_backbone("vit_tiny_patch16_224", model_args=GREY_VIT, device="cpu")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The layers of each extraction that was made."""
    made: list[list[int]] = []

    def counted(backbone: Any, data: Any, layers: Any, **options: Any) -> Any:
        made.append(list(layers))
        return extract(backbone, data, layers, **options)

    monkeypatch.setattr(cache_module, "extract", counted)
    return made


def digits(split: str = "test") -> ImageSet:
    data = open_data("digits", split)
    assert isinstance(data, ImageSet)
    return data


def few(count: int = 20, **changes: Any) -> ImageSet:
    data = digits()
    return replace(data, **({"images": data.images[:count], "labels": data.labels[:count]} | changes))


# --- whole sets


@pytest.mark.parametrize("batch_size", [1, 7, 360, 1000])
def test_a_set_gives_the_features_of_its_images_in_order(backbone: Backbone, batch_size: int) -> None:
    data = few()
    found = extract(backbone, data, (0, -1), batch_size=batch_size)
    expected = backbone.features(data.images, (0, 1))
    assert list(found) == [0, 1]
    for ours, theirs in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(ours.features_ND, theirs.summary_BD, atol=1e-5, rtol=1e-4)
        assert torch.equal(ours.labels_N, data.labels)
    mean = extract(backbone, data, pool="mean", kind="keys")[1].features_ND
    keys = backbone.features(data.images, kind="keys")[0].patches_BND
    torch.testing.assert_close(mean, keys.mean(1), atol=1e-5, rtol=1e-4)


def test_images_of_another_size_are_resized() -> None:
    backbone = open_backbone("vit_tiny_patch16_224", model_args=SMALL_VIT, device="cpu")
    data = few()
    large = F.interpolate(data.images / 255, (32, 32), mode="bicubic", antialias=True).clamp(0, 1)
    expected = layer_features(backbone.model, large.expand(-1, 3, -1, -1) * 2 - 1)[0].summary_BD
    torch.testing.assert_close(extract(backbone, data)[1].features_ND, expected, atol=1e-5, rtol=1e-4)


def test_sets_that_cannot_be(backbone: Backbone) -> None:
    with pytest.raises(DataError, match="no image"):
        extract(backbone, few(0))
    with pytest.raises(DataError, match="the label 10: expected 0 to 9"):
        extract(backbone, few(labels=torch.full((20,), 10)))
    with pytest.raises(InvalidArgumentError, match="batch_size=0"):
        extract(backbone, few(), batch_size=0)
    with pytest.raises(InvalidArgumentError, match="layers="):
        extract(backbone, few(), (5,))
    backbone.model.get_submodule("blocks.1.mlp.fc2").bias.data.fill_(torch.nan)  # type: ignore[union-attr, operator]
    with pytest.raises(InvalidArgumentError, match="block 1 on digits: 20 of 20 samples hold NaN"):
        extract(backbone, few())


def picture_folder(path: Path) -> Path:
    """Two classes in files of mixed sizes and kinds."""
    for number, (split, kind, mode, size) in enumerate(
        (split, kind, mode, size)
        for split in ("train", "val")
        for kind in ("dark", "light")
        for mode, size in (("RGB", (40, 60)), ("L", (33, 33)), ("RGBA", (90, 32)))
    ):
        file = path / split / kind / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, {"dark": "black", "light": "white"}[kind]).save(file)
    return path


def test_folders_are_read_at_the_models_size_and_cached_by_their_files(tmp_path: Path, runs: list[list[int]]) -> None:
    backbone = open_backbone("vit_tiny_patch16_224", model_args=SMALL_VIT, device="cpu")
    folder = picture_folder(tmp_path / "pictures")
    options: dict[str, Any] = {"cache": tmp_path / "cache", "workers": 0}
    found = set_features(backbone, f"folder:{folder}", "train", **options)[1]
    assert found.features_ND.shape == (6, 32)
    assert found.labels_N.tolist() == [0, 0, 0, 1, 1, 1]
    torch.testing.assert_close(found.features_ND[0], found.features_ND[1], msg="all black, whatever their size")
    set_features(backbone, f"folder:{folder}", "train", **options)
    assert len(runs) == 1
    Image.new("RGB", (40, 60), "grey").save(folder / "train" / "dark" / "0.png")
    set_features(backbone, f"folder:{folder}", "train", **options)
    assert len(runs) == 2
    (folder / "train" / "dark" / "0.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"0\.png cannot be read"):
        set_features(backbone, f"folder:{folder}", "train", **options)


# --- the cache


def test_features_are_computed_once_for_each_layer(backbone: Backbone, tmp_path: Path, runs: list[list[int]]) -> None:
    first = set_features(backbone, "digits", "test", cache=tmp_path)
    again = set_features(backbone, "digits", "test", (1, 0), cache=tmp_path, batch_size=7)
    assert runs == [[1], [0]]
    assert torch.equal(first[1].features_ND, again[1].features_ND)
    assert list(again) == [1, 0]
    plain = set_features(backbone, "digits", "test", None)
    for layer in (0, 1):
        torch.testing.assert_close(again[layer].features_ND, plain[layer].features_ND, atol=1e-5, rtol=1e-4)
        assert torch.equal(again[layer].labels_N, digits().labels)


def test_everything_the_features_depend_on_is_in_the_key(
    backbone: Backbone, tmp_path: Path, runs: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(backbone: Backbone = backbone, split: str = "test", **options: Any) -> None:
        set_features(backbone, "digits", split, cache=tmp_path, **options)

    def other(model: nn.Module, **changes: Any) -> Backbone:
        return replace(backbone, model=model.eval(), fingerprint=model_fingerprint(model), **changes)

    asked()
    heads = vit(**GREY_VIT | {"num_heads": 2})
    heads.load_state_dict(backbone.model.state_dict())
    cut = vit(**GREY_VIT)
    cut.load_state_dict(backbone.model.state_dict())
    variants: list[dict[str, Any]] = [
        {"split": "train"},
        {"kind": "keys"},
        {"pool": "mean"},
        {"layers": (0,)},
        {"backbone": replace(backbone, mean=backbone.mean + 0.1)},
        {"backbone": replace(backbone, image_size=16)},
        {"backbone": other(heads)},
        {"backbone": other(wp.cut_skips(cut))},
        {"backbone": other(vit(**GREY_VIT))},
    ]
    for number, variant in enumerate(variants, start=2):
        asked(**variant)
        assert len(runs) == number, variant
    changed = digits()
    changed.images[3, 0, 2, 2] += 1
    monkeypatch.setattr(cache_module, "open_for", lambda *_: changed)
    asked()
    assert len(runs) == len(variants) + 2, "one pixel"
    asked()
    assert len(runs) == len(variants) + 2


@pytest.mark.parametrize("damage", ["truncated", "foreign", "garbage", "swapped", "labels"])
def test_a_broken_file_is_made_again_and_said(
    damage: str, backbone: Backbone, tmp_path: Path, runs: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    good = set_features(backbone, "digits", "test", (0, 1), cache=tmp_path)
    files = sorted(tmp_path.glob("features-*.safetensors"))
    assert len(files) == 2
    path = files[0]
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "foreign":
        save_file({"features": torch.ones(3, 4), "labels": torch.zeros(3, dtype=torch.long)}, path)
    elif damage == "garbage":
        path.write_bytes(b"\xff" * 100)
    elif damage == "swapped":
        path.write_bytes(files[1].read_bytes())
    else:
        path.write_bytes(content.replace(b'"labels"', b'"lapels"'))
    found = set_features(backbone, "digits", "test", (0, 1), cache=tmp_path)
    assert "cannot be used" in capsys.readouterr().err
    assert len(runs) == 2
    for layer in (0, 1):
        torch.testing.assert_close(found[layer].features_ND, good[layer].features_ND)
    assert path.read_bytes() == content
    set_features(backbone, "digits", "test", (0, 1), cache=tmp_path)
    assert len(runs) == 2
    assert not capsys.readouterr().err


def test_a_cache_that_cannot_be_written(backbone: Backbone, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="choose another folder"):
        set_features(backbone, "digits", "test", cache=tmp_path / "file")


_ASK = """
import sys, torch
from pathlib import Path
from wellposed.evaluation.backbones import open_backbone
from wellposed.evaluation.cache import set_features

torch.set_num_threads(1)
backbone = open_backbone(sys.argv[1], device="cpu")
for _ in range(2):
    for path in Path(sys.argv[2]).glob("features-*"):
        path.unlink(missing_ok=True)
    found = set_features(backbone, "digits", "test", (0, 1), cache=Path(sys.argv[2]))
print(sum(float(one.features_ND.double().sum()) for one in found.values()))
"""


def test_two_processes_at_once_do_no_harm(tmp_path: Path) -> None:
    wp.save(vit(**GREY_VIT), tmp_path / "model")
    command = [sys.executable, "-c", _ASK, str(tmp_path / "model"), str(tmp_path / "cache")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0] == said[1]
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".safetensors"] * 2


# --- the commands


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    model = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    return wp.train(small_config(folder, epochs=8, optimizer="soap", model_args=model), quiet=True).out


def test_knn_and_linear_on_a_run(run: Path, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"model": str(run), "data": "digits", "layers": (), "device": "cpu", "cache": tmp_path}
    neighbours = KnnConfig(**shared, k=(1, 20), out=tmp_path / "knn").run()
    linear = LinearConfig(**shared, out=tmp_path / "linear").run()
    for result in (neighbours, linear):
        assert result.best.accuracy.top1 > 0.7
        assert result.protocol in str(result)
        assert {score.layer for score in result.scores} == {"0", "1"}
    assert len(neighbours.scores) == 4
    assert "temperature 0.07" in neighbours.protocol
    assert "lbfgs" in linear.protocol
    for name, result in (("knn", neighbours), ("linear", linear)):
        written = json.loads((tmp_path / name / "results.json").read_text())
        assert written == json.loads(json.dumps(result.to_dict()))
        assert written["scores"][0]["accuracy"]["top1"] == result.scores[0].accuracy.top1
        with Image.open(tmp_path / name / "layers.png") as picture:
            assert picture.size[0] > 300


def test_the_commands_are_known_without_torch() -> None:
    code = "import sys, wellposed.evaluation.classification.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_layers_side_by_side(run: Path) -> None:
    shared: dict[str, Any] = {"model": str(run), "data": "digits", "layers": (0, -1), "device": "cpu"}
    result = LinearConfig(**shared, together=True, l2=(1e-3,)).run()
    assert [score.layer for score in result.scores] == ["0+1"]
    alone = LinearConfig(**shared, l2=(1e-3,)).run()
    assert result.best.accuracy != alone.best.accuracy
    assert LinearConfig(**shared, protocol="dino", lr=0.1, epochs=20).run().best.accuracy.top1 > 0.6


def test_features_on_disk_give_the_same_numbers(run: Path, tmp_path: Path) -> None:
    backbone = open_backbone(str(run), device="cpu")
    train, test = (set_features(backbone, "digits", split, (0, 1)) for split in ("train", "test"))
    write_features(tmp_path, {f"block {layer}": (train[layer], test[layer]) for layer in (0, 1)})
    assert list(read_features(tmp_path)) == ["block 0", "block 1"]
    ours = KnnConfig(model=f"features:{tmp_path}", device="cpu", out=tmp_path / "out").run()
    theirs = KnnConfig(model=str(run), data="digits", layers=(0, 1), device="cpu").run()
    assert [score.accuracy for score in ours.scores] == [score.accuracy for score in theirs.scores]
    assert (tmp_path / "out" / "layers.png").is_file()
    assert LinearConfig(model=f"features:{tmp_path}", device="cpu", l2=(1e-3,)).run().best.accuracy.top1 > 0.8


@pytest.mark.gpu
def test_the_commands_on_a_gpu(run: Path) -> None:
    for config in (KnnConfig, LinearConfig):
        exact, found = (config(model=str(run), data="digits", device=device).run() for device in ("cpu", "cuda"))
        assert found.best.accuracy.top1 == pytest.approx(exact.best.accuracy.top1, abs=0.01)


def written(folder: Path, **changes: Any) -> Path:
    features, labels = torch.randn(30, 4), torch.arange(30) % 3
    for split in ("train", "test"):
        save_file({"features": features, "labels": labels} | changes.get(split, {}), folder / f"{split}.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"test": {"other": torch.zeros(30, 4)}}, "different layers.*other"),
        ({"test": {"features": torch.full((30, 4), torch.nan)}}, "features of test: 30 of 30 samples hold NaN"),
        ({"train": {"labels": torch.zeros(29, dtype=torch.long)}}, "expected integers"),
        ({"test": {"labels": torch.full((30,), 7)}}, "such as 7"),
        ({"test": {"features": torch.zeros(30, 5)}}, "4 wide, those of test 5"),
        ({"train": {"features": torch.zeros(10, 4), "labels": torch.arange(10) % 3}}, "k=.*20.*expected 1 to 10"),
    ],
    ids=str,
)
def test_broken_features_on_disk(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises((DataError, InvalidArgumentError), match=match):
        KnnConfig(model=f"features:{written(tmp_path, **changes)}", device="cpu").run()


def test_bad_settings(tmp_path: Path) -> None:
    folder = f"features:{written(tmp_path)}"
    for settings, match in (
        ({"model": folder, "data": "digits"}, "data: not with features"),
        ({"model": folder, "layers": (0,)}, "layers: not with features"),
        ({"model": "vit_tiny_patch16_224"}, "expected the name of a set"),
        ({"model": "features:/nowhere"}, "no such folder"),
        ({"model": "vit_tiny_patch16_224", "data": "digit", "device": "cpu"}, "data='digit'"),
        ({"model": folder, "out": tmp_path / "train.safetensors"}, "is a file"),
    ):
        with pytest.raises((InvalidArgumentError, DataError, RunError), match=match):
            KnnConfig(**settings).run()
    with pytest.raises(InvalidArgumentError, match="l2="):
        LinearConfig(model=folder, l2=(-1.0,)).run()
    (tmp_path / "test.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match=r"test\.safetensors cannot be read"):
        KnnConfig(model=folder).run()
