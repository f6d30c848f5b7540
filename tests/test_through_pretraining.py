"""Every checkpoint of a training, evaluated: what is found, what is not done twice, what is drawn."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import wellposed as wp
from browser import check_in_a_browser, needs_chromium
from small_runs import small_config
from wellposed.errors import InvalidArgumentError, ModelFileError, RunError
from wellposed.evaluation.backbones import Backbone
from wellposed.evaluation.curves import Curve, Point, draw_curves
from wellposed.evaluation.through import find_checkpoints, through_checkpoints
from wellposed.runs import provenance
from wellposed.training import train
from zoo import SMALL_VIT

MODEL = "vit_tiny_patch16_224"


def vit(scale: float) -> torch.nn.Module:
    """A small ViT that can be told from others by the sum of its head's bias."""
    torch.manual_seed(0)
    model = timm.create_model(MODEL, **SMALL_VIT)
    torch.nn.init.constant_(model.head.bias, scale)
    return model


class Counted:
    """An evaluation that remembers what it was asked."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.calls, self.interrupt_at = 0, interrupt_at

    def __call__(self, backbone: Backbone) -> dict[str, float]:
        self.calls += 1
        assert not backbone.model.training
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt
        bias = backbone.model.head.bias
        return {"bias": bias.mean().item(), "twice": 2 * bias.mean().item()}


def folders(path: Path, steps: tuple[int, ...] = (100, 20, 3)) -> Path:
    for step in steps:
        wp.save(vit(step), path / f"epoch-7-step-{step}")
    (path / "logs").mkdir()
    return path


def files(path: Path, steps: tuple[int, ...] = (100, 20, 3)) -> Path:
    path.mkdir()
    for step in steps:
        save_file(vit(step).state_dict(), path / f"vit-{step:05d}.safetensors")
    return path


def evaluated(path: Path, evaluate: Callable[[Backbone], dict[str, float]], **settings: object) -> Curve:
    return through_checkpoints(path, evaluate, device="cpu", **settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    train(small_config(out, epochs=3), quiet=True)
    return out


def test_a_run(run: Path) -> None:
    curve = evaluated(run, Counted())
    assert [point.step for point in curve.points] == [44, 66]  # a run goes on with its last two
    assert [point.epoch for point in curve.points] == [2, 3]
    trained = wp.load(run).head.bias.mean().item()
    assert curve.points[-1].values["bias"] == pytest.approx(trained)
    assert curve.points[0].values["bias"] != pytest.approx(trained)
    assert str(curve).splitlines()[0].split() == ["epoch", "bias", "twice"]


def test_what_a_run_keeps_comes_first(run: Path, tmp_path: Path) -> None:
    for step in (0, 22, 44, 66):
        wp.save(vit(step), tmp_path / "kept" / f"step-{step:08d}")
    (tmp_path / "checkpoints").symlink_to(run / "checkpoints")
    (tmp_path / "metrics.jsonl").symlink_to(run / "metrics.jsonl")
    curve = evaluated(tmp_path, Counted())
    assert [(point.epoch, point.values["bias"]) for point in curve.points] == [(0, 0), (1, 22), (2, 44), (3, 66)]


def test_folders_in_the_order_of_their_steps(tmp_path: Path) -> None:
    curve = evaluated(folders(tmp_path), Counted())
    assert [(point.step, point.values["bias"], point.epoch) for point in curve.points] == [
        (3, 3, None),
        (20, 20, None),
        (100, 100, None),
    ]
    assert curve.unit == "step"
    assert len({point.fingerprint for point in curve.points}) == 3
    assert json.loads(json.dumps(curve.to_dict()))["points"][1]["values"] == {"bias": 20, "twice": 40}


def test_files_of_weights(tmp_path: Path) -> None:
    path = files(tmp_path / "weights")
    curve = evaluated(path, Counted(), model=MODEL, model_args=SMALL_VIT)
    assert [point.values["bias"] for point in curve.points] == [3, 20, 100]
    with pytest.raises(InvalidArgumentError, match="holds weights only: say which timm model"):
        evaluated(path, Counted())


def test_nothing_is_done_twice(tmp_path: Path) -> None:
    path, out = folders(tmp_path / "all"), tmp_path / "out"
    first = Counted(interrupt_at=3)
    with pytest.raises(KeyboardInterrupt):
        evaluated(path, first, out=out)
    assert len((out / "curve.jsonl").read_text().splitlines()) == 2  # what was done is kept
    second = Counted()
    curve = evaluated(path, second, out=out)
    assert second.calls == 1
    wp.save(vit(500), path / "step-500")
    wp.save(vit(20), path / "step-600")  # the same weights again
    third = Counted()
    longer = evaluated(path, third, out=out)
    assert third.calls == 1
    assert longer.points[:3] == curve.points
    assert [point.values["bias"] for point in longer.points] == [3, 20, 100, 500, 20]
    assert evaluated(path, third, out=out) == longer
    assert third.calls == 1
    assert len((out / "curve.jsonl").read_text().splitlines()) == 5


def test_other_settings_or_weights_are_evaluated(tmp_path: Path) -> None:
    path, out = folders(tmp_path / "all", (1, 2)), tmp_path / "out"
    count = Counted()
    for settings in ({"k": 5}, {"k": 20}, {"k": 5}):
        evaluated(path, count, out=out, settings=settings)
    assert count.calls == 4
    evaluated(path, count, out=out, settings={"k": 5}, image_size=64)
    assert count.calls == 6
    wp.save(wp.cut_skips(vit(2)), path / "epoch-7-step-2")
    evaluated(path, count, out=out, settings={"k": 5})
    assert count.calls == 7


def test_damaged_checkpoints(tmp_path: Path) -> None:
    path = folders(tmp_path)
    broken = path / "epoch-7-step-20" / "wellposed.safetensors"
    broken.write_bytes(broken.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="epoch-7-step-20"):
        evaluated(path, Counted())
    curve = evaluated(path, Counted(), on_error="skip")
    assert [point.step for point in curve.points] == [3, 100]
    assert len(curve.skipped) == 1
    assert "epoch-7-step-20" in str(curve)
    for step in (3, 100):
        (path / f"epoch-7-step-{step}" / "wellposed.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelFileError, match="none of the checkpoints"):
        evaluated(path, Counted(), on_error="skip")


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="there is no such folder"):
        find_checkpoints(tmp_path / "nothing")
    with pytest.raises(ModelFileError, match="holds none: expected a run"):
        find_checkpoints(tmp_path)
    path = folders(tmp_path / "all", (1, 2))
    with pytest.raises(InvalidArgumentError, match="expected numbers by their names"):
        evaluated(path, lambda backbone: {"accuracy": "high"})
    with pytest.raises(InvalidArgumentError, match="expected what JSON can hold"):
        evaluated(path, Counted(), settings={"k": torch.ones(1)})
    with pytest.raises(InvalidArgumentError, match="on_error='ignore'"):
        evaluated(path, Counted(), on_error="ignore")
    wp.save(vit(0), path / "again-2")
    with pytest.raises(ModelFileError, match="several for step 2: again-2, epoch-7-step-2"):
        find_checkpoints(path)
    (path / "again-2").rename(path / "best")
    with pytest.raises(ModelFileError, match="best: its name has no number"):
        find_checkpoints(path)


def test_a_record_that_is_not_one(tmp_path: Path) -> None:
    path, out = folders(tmp_path / "all", (1,)), tmp_path / "out"
    evaluated(path, Counted(), out=out)
    with (out / "curve.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(RunError, match="mend it, remove it or choose another --out"):
        evaluated(path, Counted(), out=out)


def made(scale: float, epochs: bool = True) -> Curve:
    points = [
        Point(
            10 * i,
            i if epochs else None,
            f"step-{i}",
            str(i),
            {"CorLoc": scale * i / 10, "k-NN top-1": 1 - scale / (i + 1)},
        )
        for i in range(8)
    ]
    return Curve(tuple(points))


@needs_chromium
@pytest.mark.parametrize("width", [390, 1200])
def test_the_picture_and_the_page(tmp_path: Path, width: int) -> None:
    curves = {"with skips": made(0.6), "skipless": replace(made(0.9), skipped=("step-9 is <damaged>",))}
    png, html = draw_curves(curves, tmp_path / "out", provenance(torch.device("cpu"), seed=0))
    with Image.open(png) as picture:
        assert picture.width > picture.height
        colours = {colour for _, colour in picture.convert("RGB").getcolors(2**20) or []}
    assert {(0x44, 0x77, 0xAA), (0xEE, 0x66, 0x77)} <= colours  # a line for each training
    text = html.read_text()
    assert "step-9 is &lt;damaged&gt;" in text
    check_in_a_browser(text, width, 2, tmp_path)


def test_curves_without_epochs_are_drawn_over_steps(tmp_path: Path) -> None:
    curves = {"one": made(0.6), "other": made(0.9, epochs=False)}
    _, html = draw_curves(curves, tmp_path, {})
    assert "over the steps of the training" in html.read_text()
    with pytest.raises(InvalidArgumentError, match="nothing to draw"):
        draw_curves({"one": Curve(())}, tmp_path, {})
