"""What `wellposed train` refuses: in one line, with status 2, and without writing over anything."""

from pathlib import Path

import pytest

import wellposed as wp
from small_runs import small_config, small_flags
from wellposed.cli import main
from wellposed.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "vit_tinny_patch16_224"], "did you mean vit_tiny_patch16_224"),
        (["--data", "imagenet"], "data='imagenet'"),
        (["--data", "cifar10:/no/such/folder"], "there is no folder /no/such/folder"),
        (["--config", "/no/such/file.toml"], "neither a file nor one of the presets"),
        (["--patch-size", "3"], "divide into 1, 2, 4, 8"),
        (["--image-size", "30"], "the images of digits have a size of their own"),
        (["--model-args", "depht", "2"], "cannot be built with"),
        (["--batch-size", "5000"], "batch_size=5000"),
        (["--batch-size", "63", "--mixup", "1"], "batch_size=63"),
        (["--epochs", "0"], "epochs=0"),
        (["--lr", "nan"], "lr=nan"),
        (["--device", "warp"], "device='warp'"),
        (["--resume"], "no run in"),
        (["--lr", "inf"], "lr=inf"),
        (["--warmup-epochs", "inf"], "warmup_epochs=inf"),
        (["--betas", "1.5", "0.9"], "betas=(1.5, 0.9)"),
        (["--device", "meta"], "device='meta'"),
        (["--model", "vgg11", "--model-args"], "cannot be trained on images of shape (1, 8, 8)"),
        (["--model-args", "num_heads", "0"], "cannot be built with"),
        (["--model-args", "num_classes", "5"], "which the data decides"),
        (["--model-args", "patch_size", "4"], "which --patch-size decides"),
        (["--model", "resnet18", "--no-skips", "--model-args"], "ResNet"),
        (["--model", "resnet18", "--patch-size", "2", "--model-args"], "is no ViT"),
    ],
)
def test_bad_input_is_one_line_status_2_and_writes_nothing(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small_flags(tmp_path / "run", *flags)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("wellposed: ")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    wp.train(small_config(out), quiet=True)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(small_flags(out)) == 2
    assert f"--resume --out {out}" in capsys.readouterr().err
    assert main(small_flags(out, "--resume", "--lr", "0.5")) == 2
    assert "lr=0.5: the run in" in capsys.readouterr().err
    assert main(small_flags(out, "--resume", "--no-skips")) == 2
    assert "skips=False" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(out), "--epochs", "20"]) == 2  # the default, and not the run's
    assert "epochs=20" in capsys.readouterr().err
    assert main(["train", "--out", "x" * 300]) == 2
    assert "cannot be used" in capsys.readouterr().err
    stranger = tmp_path / "thesis"
    stranger.mkdir()
    (stranger / "thesis.tex").write_text("mine")
    assert main(small_flags(stranger)) == 2
    assert "not empty" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever config.json says, weights of a model with skips do not go on as one without."""
    out = tmp_path / "run"
    wp.train(small_config(out, epochs=1), quiet=True)
    config = out / "config.json"
    config.write_text(config.read_text().replace('"skips": true', '"skips": false'))
    assert main(["train", "--resume", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert "belongs to a run with skips=True, not False" in said
    config.write_text(config.read_text().replace('"skips": false', '"skips": true').replace('"depth": 2', '"depth": 3'))
    assert main(["train", "--resume", "--out", str(out)]) == 2
    assert "model_args=" in capsys.readouterr().err
    config.write_text(config.read_text().replace('"depth": 3', '"depth": 2').replace("adamw", "muon"))
    assert main(["train", "--resume", "--out", str(out)]) == 2
    assert "optimizer=adamw" in capsys.readouterr().err
    config.write_text("{}")
    assert main(["train", "--resume", "--out", str(out)]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err


def test_odd_arguments_are_refused_in_python_too(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"optimizer='sgd'.*adamw, soap, muon"):
        small_config(tmp_path, optimizer="sgd")
