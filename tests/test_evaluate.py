"""`wellposed evaluate`: the commands from the command line, and over the checkpoints of a run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wellposed as wp
from small_runs import small_config
from wellposed.cli import main
from wellposed.evaluation.classification.command import KnnConfig
from wellposed.evaluation.curves import Curve
from wellposed.evaluation.discovery.command import DiscoverConfig
from wellposed.evaluation.segmentation.command import SegmentConfig

TINY: dict[str, Any] = {"depth": 2, "embed_dim": 24, "num_heads": 3}
MODEL = "--model vit_tiny_patch16_224 --model-args depth 2 embed_dim 24 num_heads 3 img_size 32 patch_size 8"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    settings: dict[str, Any] = {"epochs": 4, "keep_every": 2, "optimizer": "soap", "model_args": TINY}
    return wp.train(small_config(folder, **settings), quiet=True).out


def test_the_command_line_knows_all_commands_without_torch() -> None:
    code = "import sys, wellposed.cli.evaluate; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("command", "said", "files"),
    [
        ("knn --data digits --k 1 5 --layers 0 1", "cosine k-NN", {"results.json", "layers.png"}),
        ("linear --data digits --l2 1e-3", "lbfgs", {"results.json"}),
        (
            "segment --data shapes --protocol quick --change epochs 1 --limit 6 --examples 2",
            "protocol quick (changed epochs 1)",
            {"results.json", "masks.png", "report.html", "head.safetensors"},
        ),
        ("discover --count 6 --show 2", "CorLoc", {"discover.json", "discover.png", "discover.html"}),
        ("pca --count 2 --layers 0 1", "2 images", {"pca.png", "pca.html"}),
    ],
    ids=["knn", "linear", "segment", "discover", "pca"],
)
def test_every_command(
    command: str, said: str, files: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *flags = command.split()
    assert main(["evaluate", name, *MODEL.split(), *flags, "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    assert said in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == files


def test_a_curve_over_the_checkpoints_of_a_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", "knn", "--checkpoints", str(run), "--data", "digits", "--device", "cpu"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    assert "epoch" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 2, 4]
    first, _, last = (line["values"]["top-1, block 1"] for line in lines)
    assert last > first
    alone = KnnConfig(model=str(run), data="digits", device="cpu").run()
    assert not isinstance(alone, Curve)
    assert alone.best.accuracy.top1 == pytest.approx(last)
    with Image.open(tmp_path / "curve.png") as picture:
        assert picture.size[0] > 300
    assert "Through training" in (tmp_path / "curve.html").read_text()


def test_what_is_known_is_not_computed_again(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = KnnConfig(checkpoints=run, data="digits", device="cpu", out=tmp_path)
    first = config.run()
    monkeypatch.setattr(KnnConfig, "evaluate", lambda *_: pytest.fail("it was known"))
    assert config.run() == first


def test_other_commands_over_checkpoints(run: Path) -> None:
    discovered = DiscoverConfig(checkpoints=run, data="shapes", count=4, image_size=32, device="cpu").run()
    segmented = SegmentConfig(
        checkpoints=run, data="shapes", protocol="quick", change={"epochs": 1}, limit=4, image_size=32, device="cpu"
    ).run()
    for curve, measure in ((discovered, "CorLoc, block 1"), (segmented, "mIoU")):
        assert isinstance(curve, Curve)
        assert curve.measures == [measure]
        assert [point.epoch for point in curve.points] == [0, 2, 4]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("knn --data digits", "model: expected a timm name"),
        ("knn --model vit_tiny_patch16_224", "data: expected the name of a set"),
        ("knn --model vit_tiny_patch16_224 --data digits --batch-size 0", "batch_size=0"),
        ("discover --checkpoints nowhere", "there is no such folder"),
        ("segment --model vit_tiny_patch16_224 --data voc", "voc:PATH"),
        ("linear --model nothing --data digits", "model='nothing'"),
        ("knn --checkpoints runs --checkpoint a.pt --data digits", "expected one of them"),
    ],
)
def test_bad_commands(command: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", *command.split(), "--device", "cpu"]) == 2
    assert told in capsys.readouterr().err


def pictures(root: Path) -> Path:
    """Two classes of pictures, one of them broken and one with 16 bits."""
    for split, count in (("train", 6), ("val", 4)):
        for label, colour in (("dark", 20), ("light", 220)):
            (root / split / label).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (20 + i, 24), (colour, colour, colour)).save(root / split / label / f"{i}.png")
    (root / "val" / "dark" / "1.png").write_bytes(b"no picture")
    Image.fromarray(np.full((24, 24), 20 * 257, dtype=np.uint16)).save(root / "val" / "dark" / "2.png")
    return root


def test_broken_pictures_end_it_or_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", "knn", *MODEL.split(), "--data", f"folder:{pictures(tmp_path / 'set')}", "--k", "3"]
    command += ["--device", "cpu", "--workers", "0", "--cache", str(tmp_path / "cache")]
    assert main(command) == 2
    assert "1.png cannot be read" in capsys.readouterr().err
    assert main([*command, "--on-error", "skip"]) == 0
    said = capsys.readouterr()
    assert "1 images cannot be read and are left out" in said.err
    assert "100.00" in said.out, "the 16-bit picture is as dark as it is"
    assert main(command) == 2, "features without the broken one are not taken for those of the whole set"


def test_a_curve_notices_another_set_of_the_same_name(tmp_path: Path, run: Path) -> None:
    spec = f"folder:{pictures(tmp_path / 'set')}"
    Image.new("RGB", (24, 24)).save(tmp_path / "set" / "val" / "dark" / "1.png")
    config = KnnConfig(checkpoints=run, data=spec, k=(3,), device="cpu", out=tmp_path / "out", workers=0)
    first = config.run()
    for i in range(4):
        Image.new("RGB", (24, 24), (220, 220, 220)).save(tmp_path / "set" / "val" / "dark" / f"{i}.png")
    assert config.run() != first
