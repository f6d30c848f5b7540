"""The script behind results/dino.md, from the photographs to the tables, on pictures small enough for a CPU."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from wellposed.errors import InvalidArgumentError

TINY = """
model = "vit_tiny_patch16_224"
model_args = { depth = 2, embed_dim = 16, num_heads = 2 }
image_size = 32
global_size = 32
local_size = 16
patch_size = 8
local_crops = 1
batch_size = 8
out_dim = 32
hidden_dim = 16
bottleneck_dim = 8
knn_images = 8
epochs = 3
"""


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[1] / "examples" / "dino.py"))


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """A bright square in the dark, the animal, on 36 pictures of two breeds."""
    folder = tmp_path / "pets"
    (folder / "images").mkdir(parents=True)
    (folder / "annotations" / "trimaps").mkdir(parents=True)
    lists: dict[str, list[str]] = {"trainval": [], "test": []}
    for number in range(36):
        name = f"{('beagle', 'pug')[number % 2]}_{number}"
        lists["trainval" if number < 24 else "test"].append(name)
        animal = torch.zeros(40, 40, dtype=torch.bool)
        animal[number % 24 : number % 24 + 16, 8:32] = True
        pixels = torch.where(animal[..., None], torch.tensor([200, 180, 40 + 5 * number]), torch.tensor([20, 30, 40]))
        Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / "images" / f"{name}.jpg")
        trimap = torch.where(animal, 1, 2).to(torch.uint8)
        Image.fromarray(trimap.numpy()).save(folder / "annotations" / "trimaps" / f"{name}.png")
    for split, names in lists.items():
        (folder / "annotations" / f"{split}.txt").write_text("".join(f"{name} 1 1 1\n" for name in names))
    return folder


def test_from_photographs_to_tables(script: dict[str, Any], pets: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    evidence = script["Evidence"](
        **{"data": f"pet:{pets}", "dense": (f"pet:{pets}",), "config": str(tmp_path / "tiny.toml"), "dense_size": 32},
        **{"models": ("skip-soap", "skipless-soap"), "points": 3, "device": "cpu", "out": tmp_path / "out"},
    )
    text = script["main"](evidence).read_text()
    files = [tmp_path / "out" / f"{name}.json" for name in evidence.models]
    known = {file.stem: json.loads(file.read_text()) for file in files}
    measures = ["k-NN top-1", "mIoU on pet", "CorLoc on pet"]
    assert {model: list(asked) for model, asked in known.items()} == {
        name: ["run", *measures] for name in ("skip-soap", "skipless-soap")
    }
    for what in measures:
        first, last = ([f"{100 * list(known[name][what].values())[i]:.1f}" for name in known] for i in (0, 1))
        table = text.partition(f"## {what}, %")[2]
        assert f"| block | skip-soap | skipless-soap |\n| --- | --- | --- |\n| 0 | {' | '.join(first)} |" in table
        assert f"| 1 | {' | '.join(last)} |" in table
        assert ("| the whole picture | " in table.partition("##")[0]) == (what == "CorLoc on pet")
    assert "examples/dino.py" in text
    for file in ("knn-curve/curve.png", "discover-curve/curve.html", "pca-soap/pca.png"):
        assert (tmp_path / "out" / file).stat().st_size > 1000
    points = (tmp_path / "out" / "skip-soap" / "knn-curve" / "curve.jsonl").read_text().splitlines()
    assert len(points) == 4  # before the first step, and after each epoch
    before = [file.stat().st_mtime_ns for file in files]
    script["main"](evidence)
    assert [file.stat().st_mtime_ns for file in files] == before  # nothing is done twice


def test_a_run_that_collapses_is_reported(
    script: dict[str, Any], pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wellposed.training import dino_watch

    monkeypatch.setattr(dino_watch, "FEWEST_STEPS", (2, 4))
    monkeypatch.setattr(dino_watch, "LEAST_INFORMATION", 100.0)  # nothing is enough
    monkeypatch.setattr(dino_watch, "GROWTH", 1e6)
    (tmp_path / "tiny.toml").write_text(TINY + "momentum = 0.0\nlog_every = 1\n")
    evidence = script["Evidence"](
        **{"data": f"pet:{pets}", "dense": (f"pet:{pets}",), "config": str(tmp_path / "tiny.toml"), "epochs": 6},
        **{"models": ("skip-adamw",), "device": "cpu", "out": tmp_path / "out"},
    )
    assert "| skip-adamw |  | stopped after step" in script["main"](evidence).read_text()


def test_models_it_does_not_know(script: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"models=\('skip',\): expected some of skip-adamw"):
        script["Evidence"](data="shapes", models=("skip",))
