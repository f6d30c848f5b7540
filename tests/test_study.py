"""The study, small, as a newcomer runs it; and its page in a browser."""

import html
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from browser import check_in_a_browser, needs_chromium
from small_runs import small_config
from wellposed.cli import main
from wellposed.data import DeviceLoader, make_shapes, open_data, sampled_images
from wellposed.runs import Checkpoints, read_journal, step_of
from wellposed.studies import StudyConfig
from wellposed.studies.ablations import CONDITIONING
from wellposed.studies.attention import _first_product, attention_on_images
from wellposed.studies.comparison import StudyResult
from wellposed.studies.config import OPTIMIZERS, Cell
from wellposed.studies.pictures import _lines
from wellposed.studies.running import PROBED_IMAGES, Outcome, run_cell
from wellposed.studies.words import lead
from zoo import vit

KINDS = [kind.key for kind in CONDITIONING.kinds]
FLAGS = ["--model-args", "embed_dim", "16", "depth", "2", "num_heads", "2", "--epochs", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def small_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study") / "small"
    assert main(["study", *FLAGS, "--out", str(out)]) == 0
    return out


def test_every_cell_is_trained_as_it_says(small_study: Path) -> None:
    runs = {path.name: json.loads((path / "result.json").read_text()) for path in (small_study / "runs").iterdir()}
    assert len(runs) == 6
    for name, result in runs.items():
        kind, optimizer, _ = name.split("-")
        config = result["config"]
        assert config["skips"] == (kind == "skip")
        assert config["init"] == ("conditioned" if kind == "conditioned" else "default")
        assert config["optimizer"] == optimizer
        assert config["lr"] == {"adamw": 1e-3, "soap": 3e-3}[optimizer]
    outcomes = json.loads((small_study / "outcomes.json").read_text())
    assert {outcome["accuracy"] for outcome in outcomes} == {result["accuracy"] for result in runs.values()}


def test_the_page_holds_the_numbers(small_study: Path) -> None:
    text = html.unescape((small_study / "report.html").read_text(encoding="utf-8"))
    for path in (small_study / "runs").iterdir():
        assert f"<td>{100 * json.loads((path / 'result.json').read_text())['accuracy']:.1f}</td>" in text
    assert text.count("<svg") == 4 + 5 + 4 + 6 + 6 + 3 * 7
    assert "wellposed" in text[text.index("How to get these numbers again") :]
    assert (small_study / "accuracy.png").stat().st_size > 10_000


def test_the_same_command_goes_on_and_another_is_refused(
    small_study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(small_study, out)
    config = StudyConfig(model_args={"embed_dim": 16, "depth": 2, "num_heads": 2}, epochs=1, device="cpu", out=out)
    kept = {cell: config.run(cell).folder / "result.json" for cell in config.cells()}
    before = {cell: path.stat().st_mtime_ns for cell, path in kept.items()}
    again = Cell("conditioned", "adamw", 0)
    was = json.loads(kept[again].read_text())["accuracy"]
    kept[again].unlink()
    (out / "report.html").unlink()
    assert main(["study", *FLAGS, "--out", str(out)]) == 0
    assert "skipless, conditioned" in capsys.readouterr().out
    assert json.loads(kept[again].read_text())["accuracy"] == was
    changed = {cell for cell, path in kept.items() if path.stat().st_mtime_ns != before[cell]}
    assert changed == {again}
    assert (out / "report.html").exists()
    assert main(["study", *FLAGS, "--weight-decay", "0.1", "--out", str(out)]) == 2
    assert "weight_decay=0.3, now it is 0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "cifar10:/nowhere"], "there is no folder /nowhere"),
        (["--model", "vit_nothing"], "timm has no model"),
        (["--model", "resnet18", "--model-args"], "ResNet"),
        (["--patch-size", "3"], "divide into"),
        (["--seeds", "0"], "seeds=0"),
        (["--epochs", "0"], "epochs=0"),
        (["--device", "warp"], "device='warp'"),
        (["--alpha", "nan"], "alpha=nan"),
        (["--batch-size", "5000"], "batch_size=5000"),
        (["--lr-skip-adamw", "inf"], "lr=inf"),
    ],
)
def test_bad_input_writes_nothing(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", *FLAGS, *flags, "--out", str(tmp_path / "study")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def result_with(accuracies: dict[tuple[str, str], list[float | None]]) -> StudyResult:
    outcomes = [
        Outcome(Cell(kind, optimizer, seed), value, 1.0)  # type: ignore[arg-type]
        for (kind, optimizer), values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    seeds = max(len(values) for values in accuracies.values())
    return StudyResult(StudyConfig(seeds=seeds), tuple(outcomes), Path("report.html"), {})


def test_the_words_follow_the_numbers() -> None:
    good = {("skip", "adamw"): [0.5, 0.7], ("skip", "soap"): [0.9, 0.8], ("skipless", "adamw"): [0.1, 0.1]}
    good |= {("skipless", "soap"): [None, 0.2], ("conditioned", "adamw"): [0.6, 0.6]}
    good |= {("conditioned", "soap"): [0.75, 0.85]}
    result = result_with(good)
    assert "connections it reaches 85.0 %" in lead(result)
    assert "initialization gets to 20.0 %" in lead(result)
    assert "reaches 80.0 %." in lead(result)
    assert result.rows()[0] == ("with skips", "60.0 (50.0 to 70.0)", "85.0 (80.0 to 90.0)")
    assert result.rows()[1][2] == "20.0, 1 diverged"
    assert "as far as by default" in lead(result_with(good | {("skipless", "adamw"): [0.8, 0.8]}))
    assert "less far than by default" in lead(result_with(good | {("skipless", "adamw"): [0.9, 0.9]}))
    lost = result_with({key: [None] for key in good})
    assert lost.rows()[2][1:] == ("diverged", "diverged")
    assert "it diverges" in lead(lost)


def test_each_curve_is_that_of_its_own_run(small_study: Path) -> None:
    config = StudyConfig(model_args={"embed_dim": 16, "depth": 2, "num_heads": 2}, epochs=1, out=small_study)
    for optimizer in OPTIMIZERS:
        for kind, line in zip(KINDS, _lines(config, optimizer, "train", "loss"), strict=True):
            events = read_journal(small_study / "runs" / f"{kind}-{optimizer}-0", "train")
            assert list(line.y) == [event["loss"] for event in events]
            assert line.name == CONDITIONING.kind(kind).name


def test_maps_are_of_the_runs_that_finished(small_study: Path) -> None:
    config = StudyConfig(model_args={"embed_dim": 16, "depth": 2, "num_heads": 2}, epochs=1, out=small_study)
    train, test = (open_data("digits", split) for split in ("train", "test"))
    finished = {Cell("skip", "soap", 0), Cell("skipless", "soap", 1), Cell("conditioned", "soap", 0)}
    section = attention_on_images(config, finished, test, sampled_images(train, test, PROBED_IMAGES)[0])
    titles = [found for panel in section.panels for found in re.findall(r'aria-label="([^"]+)"', panel)]
    assert titles[:5] == ["image 1", "skip, first", "skip, last", "conditioned, first", "conditioned, last"]
    assert section.across == 5
    assert len(titles) == 15


def test_the_product_that_is_drawn() -> None:
    model = vit()
    weight = model.blocks[0].attn.qkv.weight.detach()
    torch.testing.assert_close(_first_product(model), weight[:8].T @ weight[32:40])


def test_images_are_probed_as_they_are_trained_on() -> None:
    train, test = make_shapes(40, 16, seed=0), make_shapes(50, 16, seed=1)
    images, labels = sampled_images(train, test, PROBED_IMAGES)
    loader = DeviceLoader(test, 50, shuffle=False, mean=DeviceLoader(train, 1).mean, std=DeviceLoader(train, 1).std)
    everything, all_labels = next(iter(loader))
    assert torch.equal(images[0], everything[0])
    torch.testing.assert_close(images[-1], everything[-1])
    assert labels[-1] == all_labels[-1]


def test_a_run_that_diverges_is_an_outcome(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", lr=1e20, clip=0.0, warmup_epochs=0.0, weight_decay=0.0, optimizer="muon")
    outcome = run_cell(config, Cell("skip", "adamw", 0))
    assert outcome.accuracy is None
    assert re.search(r"not finite at step \d+ \(epoch \d\.\d\d\): it begins with", str(outcome))


def test_ctrl_c_stops_every_run_gently_and_starts_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, flags = tmp_path / "study", [*FLAGS, "--epochs", "12"]
    command = [sys.executable, "-m", "wellposed", "study", *flags, "--out", str(out)]
    # Where the tests run in the background of a shell, what they start would be deaf to Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    first, second = (Checkpoints(out / "runs" / f"{kind}-adamw-0" / "checkpoints") for kind in KINDS[:2])
    deadline = time.monotonic() + 120
    while not (first.all() and second.all() and step_of(first.all()[0]) >= 22):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    assert main(["study", *flags, "--out", str(out)]) == 2
    assert "another process is at work" in capsys.readouterr().err
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=240)[1]
    assert process.returncode == 130
    assert "the same command goes on" in said
    assert "Traceback" not in said
    assert sorted(path.name for path in (out / "runs").iterdir()) == ["skip-adamw-0", "skipless-adamw-0"]
    stopped = step_of(first.all()[0])
    assert main(["study", *flags, "--out", str(out)]) == 0
    steps = [event["step"] for event in read_journal(out / "runs" / "skip-adamw-0", "train")]
    assert steps == sorted(set(steps))
    assert stopped <= steps[-1] == 12 * 22


@needs_chromium
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_in_a_browser(width: int, small_study: Path, tmp_path: Path) -> None:
    page = (small_study / "report.html").read_text(encoding="utf-8")
    check_in_a_browser(page, width, page.count("<svg"), tmp_path)
