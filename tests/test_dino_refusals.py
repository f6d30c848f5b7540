"""What `wellposed pretrain` refuses: in one line, with status 2, before training starts."""

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

import wellposed as wp
from small_dino import small_dino, small_dino_flags
from wellposed.cli import main
from wellposed.errors import InvalidArgumentError
from wellposed.training import DinoConfig

NAMES = sorted(path.stem for path in DinoConfig.presets.glob("*.toml"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--global-size", "16"], "global_size=16: a crop cannot be larger than the images, which have 8 pixels"),
        (["--local-size", "10"], "local_size=10: a crop cannot be larger than the images"),
        (["--global-size", "4", "--local-size", "8", "--patch-size", "1"], "at most the size of a global crop, 4"),
        (["--local-size", "3"], "local_size=3: it does not divide into patches of 2 pixels; expected a multiple"),
        (["--global-crops", "1"], "global_crops=1: the student learns what the teacher says about another"),
        (["--batch-size", "1"], "batch_size=1: the outputs of a batch are centered"),
        (["--batch-size", "5000"], "batch_size=5000"),
        (["--local-crops", "-1"], "local_crops=-1"),
        (["--model", "resnet18", "--model-args"], "crops of two sizes; expected a ViT"),
        (["--model", "vit_tinny_patch16_224"], "did you mean vit_tiny_patch16_224"),
        (["--drop-path", "0.1", "--no-skips"], "drop_path=0.1 without skips"),
        (["--student-temp", "0"], "student_temp=0.0"),
        (["--teacher-temp", "nan"], "teacher_temp=nan"),
        (["--local-scale", "0.4", "0.1"], "local_scale=(0.4, 0.1)"),
        (["--momentum", "1.5"], "momentum=1.5"),
        (["--config", "/no/such/file.toml"], f"one of the presets {', '.join(NAMES)}"),
        (["--resume"], "no run in"),
    ],
)
def test_bad_input_is_one_line_status_2_and_writes_nothing(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small_dino_flags(tmp_path / "run", *flags)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("wellposed: ")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    flags = ["pretrain", "--data", f"folder:{photos}", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main(flags) == 2
    assert "has no folder train" in capsys.readouterr().err
    (photos / "train").mkdir()
    assert main(flags) == 2
    assert "is not a folder of images by class" in capsys.readouterr().err
    (photos / "train" / "cat").mkdir()
    assert main(flags) == 2
    assert "is not a folder of images by class" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_of_photographs_needs_no_test_set_without_neighbours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And its images may be larger than the crops."""

    (tmp_path / "photos" / "train" / "all").mkdir(parents=True)
    for number in range(6):
        Image.new("RGB", (30, 40), (40 * number, 90, 10)).save(tmp_path / "photos" / "train" / "all" / f"{number}.png")
    assert main(["pretrain", "--data", f"folder:{tmp_path / 'photos'}", "--out", str(tmp_path / "run")]) == 2
    assert "has no folder val" in (said := capsys.readouterr().err)
    assert "leave k-NN out with --knn-images 0" in said
    settings = {"data": f"folder:{tmp_path / 'photos'}", "image_size": 24, "global_size": 16, "patch_size": 4}
    result = wp.pretrain(
        small_dino(tmp_path / "run", **settings, batch_size=3, knn_images=0, epochs=1, workers=0), quiet=True
    )
    assert result.knn is None
    config = DinoConfig.of_run(tmp_path / "run")
    assert (config.global_size, config.local_size) == (16, 8)


@pytest.mark.parametrize("name", NAMES)
def test_presets_state_command_expectation_and_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (DinoConfig.presets / f"{name}.toml").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^# (command|expected|time) +(.+)$", text, re.MULTILINE))
    assert stated.keys() == {"command", "expected", "time"}
    DinoConfig.load(name).check()
    flags = shlex.split(stated["command"])
    monkeypatch.chdir(tmp_path)
    assert main(flags[flags.index("pretrain") :]) == 2
    assert "there is no folder PATH" in capsys.readouterr().err


def test_there_are_presets() -> None:
    assert {"imagenet-vit-small", "cifar10-vit-tiny", "pets-vit-tiny"} <= set(NAMES)


def test_odd_arguments_are_refused_in_python_too(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"collapse='ignore'.*stop, warn"):
        small_dino(tmp_path, collapse="ignore")
