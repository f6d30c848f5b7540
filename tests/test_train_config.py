"""What a run is, from Python, files and presets."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from wellposed.cli import main
from wellposed.errors import InvalidArgumentError
from wellposed.training import TrainConfig
from wellposed.training.config import PRESETS

NAMES = sorted(path.stem for path in PRESETS.glob("*.toml"))


def test_files_say_what_python_says(tmp_path: Path) -> None:
    config = TrainConfig(data="digits", betas=(0.9, 0.95), model_args={"depth": 2, "qkv_bias": False}, out=Path("x"))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert TrainConfig.load(tmp_path / "config.json") == config
    (tmp_path / "run.json").write_text(json.dumps({"config": config.to_dict(), "commit": "abc"}))
    assert TrainConfig.load(tmp_path / "run.json") == config
    (tmp_path / "config.toml").write_text(
        'data = "digits"\nbetas = [0.9, 0.95]\nout = "x"\n[model_args]\ndepth = 2\nqkv_bias = false\n'
    )
    assert TrainConfig.load(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epohcs = 3", "unknown field 'epohcs'; did you mean 'epochs'"),
        ("qqqqqq = 3", "unknown field 'qqqqqq'; expected some of data, model"),
        ('epochs = "three"', "epochs='three': expected int"),
        ("epochs = 2.5", "epochs=2.5: expected int"),
        ("epochs = true", "epochs=True: expected int"),
        ('optimizer = "sgd"', "optimizer='sgd': expected one of adamw, soap, muon"),
        ("betas = [0.9]", "betas=[0.9]: expected tuple"),
        ("epochs =", "cannot be read"),
    ],
)
def test_mistakes_in_a_file_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        TrainConfig.load(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs=0: expected at least 1"),
        ({"lr": -1.0}, "lr=-1.0: expected a finite number, at least 0"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"mixup": 1.5}, "mixup=1.5"),
        ({"ema": float("nan")}, "ema=nan"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_numbers_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        TrainConfig(**settings).check()


def test_flags_override_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text('data = "digits"\nbatch_size = 9999\n')
    out = str(tmp_path / "run")
    assert main(["train", "--config", str(tmp_path / "mine.toml"), "--out", out]) == 2
    assert "batch_size=9999" in capsys.readouterr().err
    assert main(["train", f"--config={tmp_path / 'mine.toml'}", "--batch-size", "8888", "--out", out]) == 2
    assert "batch_size=8888" in capsys.readouterr().err
    assert main(["train", "--config", "nothing"]) == 2
    assert ", ".join(NAMES) in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_presets_state_command_accuracy_and_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (PRESETS / f"{name}.toml").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^# (command|accuracy|time) +(.+)$", text, re.MULTILINE))
    assert stated.keys() == {"command", "accuracy", "time"}
    assert re.search(r"\d+\.\d %", stated["accuracy"])
    assert re.search(r"\d+ (seconds|minutes|hours)", stated["time"])
    TrainConfig.load(name).check()
    flags = shlex.split(stated["command"])
    monkeypatch.chdir(tmp_path)
    assert main(flags[flags.index("train") :]) == 2
    assert "there is no folder PATH" in capsys.readouterr().err


def test_model_arguments_of_a_file_are_one_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text('data = "digits"\nepochs = 0\n[model_args]\ndepth = 2\nqkv_bias = false\n')
    assert (
        main(["train", "--config", str(tmp_path / "mine.toml"), "--model-args", "depth", "3", "act_layer", "relu"]) == 2
    )
    assert "epochs=0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--model-args", "depth"])
    assert "expected pairs" in capsys.readouterr().err


def test_there_are_presets() -> None:
    assert {"cifar10-vit-tiny", "imagenet-vit-base"} <= set(NAMES)


def test_what_a_resumed_run_may_change() -> None:
    stored = TrainConfig(data="digits", lr=0.01, out=Path("x"), workers=2)
    again = TrainConfig(out=Path("x"), resume=True, workers=7).resumed_from(stored)
    assert (again.lr, again.data, again.workers, again.resume) == (0.01, "digits", 7, True)
    with pytest.raises(InvalidArgumentError, match=r"lr=0\.02: the run in x was started with 0\.01"):
        TrainConfig(out=Path("x"), resume=True, lr=0.02).resumed_from(stored)
