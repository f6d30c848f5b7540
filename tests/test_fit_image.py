"""`wellposed fit image`: what is learned, written, resumed, refused and compared."""

import json
import signal
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import wellposed as wp
from test_reporting import Links
from wellposed.cli import main
from wellposed.errors import DataError, DivergedError, InvalidArgumentError, RunError
from wellposed.fields.image import encoded, open_image, pixel_places
from wellposed.fields.training import FieldTask
from wellposed.runs import Checkpoints, read_journal, step_of
from wellposed.studies.field_ranks import compare_ranks


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """32 x 24 pixels with smooth colours and a disc."""
    y, x = np.mgrid[0:24, 0:32] / 32
    disc = (x - 0.5) ** 2 + (y - 0.4) ** 2 < 0.04
    values = np.stack([x, y, 0.5 + 0.4 * np.sin(9 * x)], axis=-1)
    values[disc] = (0.9, 0.2, 0.1)
    Image.fromarray((255 * values).astype(np.uint8)).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def small_config(picture: Path, out: Path, **settings: Any) -> wp.fields.ImageConfig:
    usual = {"width": 32, "rank": 4, "steps": 60, "tests": 3, "device": "cpu", "fraction": 0.5, "lr": 1e-2}
    return wp.fields.ImageConfig(**({"data": str(picture), "out": out} | usual | settings))


def test_places_of_pixels() -> None:
    places = pixel_places(2, 4)
    assert places.tolist()[:4] == [[-0.25, -0.75], [-0.25, -0.25], [-0.25, 0.25], [-0.25, 0.75]]


@pytest.mark.parametrize(
    ("activation", "kind", "expected"),
    [("gauss", "sine", 20), ("gauss", "low-rank", 20), ("siren", "full", 24), ("siren", "sine", 20)],
)
def test_a_picture_is_learned(activation: Any, kind: Any, expected: float, picture: Path, tmp_path: Path) -> None:
    lr = 1e-3 if activation == "siren" else 1e-2
    config = small_config(picture, tmp_path / "run", activation=activation, kind=kind, lr=lr, steps=300, tests=1)
    result = wp.fields.fit_image(config, quiet=True)
    assert result.scores["psnr"] > expected
    truth = open_image(picture) / 255
    one_colour = (truth - truth.mean((0, 1))).square().mean()
    assert float(-10 * one_colour.log10()) < 13
    events = read_journal(tmp_path / "run", "test")
    assert result.scores == {name: events[-1][name] for name in ("psnr", "ssim")}
    network, spec = wp.fields.load(tmp_path / "run")
    again = wp.fields.render_image(network, spec.facts["height"], spec.facts["width"])
    assert encoded(again, "PNG") == (tmp_path / "run" / "fitted.png").read_bytes()
    error = (again.double() - open_image(picture).double()).square().mean() / 255**2
    assert float(-10 * error.log10()) == pytest.approx(result.scores["psnr"], abs=0.05)
    assert result.bytes == (tmp_path / "run" / "field.safetensors").stat().st_size
    assert result.full_parameters == 3 * 32 + 2 * 33 * 32 + 33 * 3


def test_pixels_that_are_not_trained_on_are_guessed_from_fourier_features(picture: Path, tmp_path: Path) -> None:
    config = small_config(picture, tmp_path / "run", activation="relu-fourier", scale=0.5, kind="full", steps=300)
    assert wp.fields.fit_image(config, quiet=True).scores["psnr"] > 20


def test_batches_bfloat16_and_float16(picture: Path, tmp_path: Path) -> None:
    whole = wp.fields.fit_image(small_config(picture, tmp_path / "whole"), quiet=True)
    config = small_config(picture, tmp_path / "half", half=True, bf16=True, batch_size=100)
    half = wp.fields.fit_image(config, quiet=True)
    header = whole.bytes - 4 * whole.parameters
    assert half.bytes == pytest.approx(2 * half.parameters + header, abs=40)
    assert half.scores["psnr"] > 15
    assert load_file(tmp_path / "half" / "field.safetensors")["layers.0.weight"].dtype == torch.float16


def metrics(out: Path) -> list[dict[str, Any]]:
    timing = {"seconds", "pixels_per_second"}
    return [{name: value for name, value in event.items() if name not in timing} for event in read_journal(out)]


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wp.fields.fit_image(small_config(picture, tmp_path / "whole", batch_size=100), quiet=True)
    step = FieldTask.train_step

    def interrupted(task: FieldTask, images: Any, targets: Any, number: int) -> Any:
        if number == 32:
            signal.raise_signal(signal.SIGINT)
        return step(task, images, targets, number)

    stopped = tmp_path / "stopped"
    flags = ["--width", "32", "--rank", "4", "--steps", "60", "--tests", "3", "--fraction", "0.5", "--lr", "0.01"]
    with monkeypatch.context() as patch:
        patch.setattr(FieldTask, "train_step", interrupted)
        device = ["--batch-size", "100", "--device", "cpu", "--out", str(stopped)]
        assert main(["fit", "image", str(picture), *flags, *device]) == 130
    assert step_of(Checkpoints(stopped / "checkpoints").all()[0]) == 33
    assert main(["fit", "image", "--resume", "--out", str(stopped)]) == 0
    assert "as PNG it has" in capsys.readouterr().err
    assert metrics(stopped) == metrics(tmp_path / "whole")
    for name in ("field.safetensors", "fitted.png"):
        assert (stopped / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with pytest.raises(InvalidArgumentError, match="was started with 32"):
        wp.fields.fit_image(wp.fields.ImageConfig(out=stopped, resume=True, width=64))
    with pytest.raises(RunError, match="holds something already"):
        wp.fields.fit_image(small_config(picture, stopped))


def test_a_loss_that_is_not_finite_ends_the_run(picture: Path, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"not finite at step.*with a lower --lr$"):
        wp.fields.fit_image(small_config(picture, tmp_path / "run", kind="full", lr=1e30), quiet=True)


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        open_image(path)
    return str(caught.value)


def test_pictures_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grey = np.arange(400, dtype=np.uint16).reshape(20, 20) * 100
    Image.fromarray(grey).save(tmp_path / "deep.png")
    assert "more than 8 bits" in refused(tmp_path / "deep.png")
    clear = np.full((20, 20, 4), 255, np.uint8)
    Image.fromarray(clear).save(tmp_path / "opaque.png")
    assert open_image(tmp_path / "opaque.png").shape == (20, 20, 3)
    clear[3, 3, 3] = 128
    Image.fromarray(clear).save(tmp_path / "clear.png")
    assert "transparent" in refused(tmp_path / "clear.png")
    Image.new("RGB", (10, 40)).save(tmp_path / "tiny.png")
    assert "10 x 40" in refused(tmp_path / "tiny.png")
    (tmp_path / "text.png").write_text("no picture")
    assert "cannot be read" in refused(tmp_path / "text.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 30, 3), np.uint8)).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:900])
    assert "cannot be read" in refused(tmp_path / "cut.png")
    assert "no such file" in refused(tmp_path / "none.png")
    assert main(["fit", "image", str(tmp_path / "deep.png"), "--out", str(tmp_path / "run")]) == 2
    assert "save it as an 8-bit PNG" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_16_bits_of_colour_are_refused(tmp_path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(6 * 20) for _ in range(20))  # PIL reads such a file as 8 bits without a word
    parts = (b"IHDR", struct.pack(">IIBBBBB", 20, 20, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    (tmp_path / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts))
    with Image.open(tmp_path / "deep.png") as file:
        assert file.mode == "RGB"
    assert "more than 8 bits" in refused(tmp_path / "deep.png")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"rank": 33}, "rank=33: expected 1 to 32"),
        ({"fraction": 0.0}, "fraction=0.0"),
        ({"omega": -1.0}, "omega=-1.0"),
        ({"activation": "relu-fourier", "width": 33}, "an even number"),
        ({"data": ""}, "as in wellposed fit image"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], complaint: str, picture: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=complaint):
        wp.fields.fit_image(small_config(picture, tmp_path / "run", **settings), quiet=True)


def test_ranks_are_compared_on_one_page(picture: Path, tmp_path: Path) -> None:
    config = small_config(picture, tmp_path / "all", steps=30, tests=1)
    fit = wp.fields.fit_image
    found = compare_ranks(config, fit, kinds=["full", "low-rank", "sine"], ranks=[2], jobs=2)
    assert [result.name for result in found.results] == ["full rank", "low-rank, k = 2", "sine, k = 2"]
    full, low, sine = found.results
    assert low.parameters == sine.parameters < full.parameters == sine.full_parameters
    links = Links()
    links.feed(found.report.read_text())
    assert len([link for link in links.loaded if link.startswith("data:image/png")]) == 2 + 2 * 3
    assert all(link.startswith(("#", "data:")) for link in links.loaded)
    gain = sine.scores["psnr"] - low.scores["psnr"]
    assert f"{gain:+.2f} dB at k = 2" in links.text
    table = (tmp_path / "all" / "table.md").read_text().splitlines()
    row = next(line for line in table if line.startswith("| sine, k = 2 |"))
    assert f"| {sine.parameters:,} |" in row
    assert f"| {sine.bytes:,} | {sine.scores['psnr']:.2f} | {sine.scores['ssim']:.4f} |" in row
    alone = wp.fields.fit_image(small_config(picture, tmp_path / "one", steps=30, tests=1, rank=2), quiet=True)
    assert alone.scores == sine.scores

    written = {name: (tmp_path / "all/runs" / name / "result.json").stat().st_mtime_ns for name in ("full", "sine-2")}
    again = compare_ranks(config, fit, kinds=["full", "sine"], ranks=[2])
    assert again.results == (full, sine)
    for name, time in written.items():
        assert (tmp_path / "all/runs" / name / "result.json").stat().st_mtime_ns == time
    assert len(json.loads((tmp_path / "all" / "results.json").read_text())) == 2
    with pytest.raises(RunError, match="made with steps=30, now it is 31"):
        compare_ranks(small_config(picture, tmp_path / "all", steps=31, tests=1), fit, ranks=[2])


def test_where_one_run_diverges_the_page_has_the_others(picture: Path, tmp_path: Path) -> None:
    config = small_config(picture, tmp_path / "all", steps=30, tests=1, omega=1e300)  # too much for a sine in float32
    with pytest.raises(DivergedError, match=r"not finite at step 1 .* to its end is in .*report\.html"):
        compare_ranks(config, wp.fields.fit_image, kinds=["full", "sine"], ranks=[2])
    results = json.loads((tmp_path / "all" / "results.json").read_text())
    assert [each["kind"] for each in results] == ["full"]
    links = Links()
    links.feed((tmp_path / "all" / "report.html").read_text())
    assert f"Best: full rank, {results[0]['scores']['psnr']:.2f} dB" in links.text
    assert "lost: sine-2" in (tmp_path / "all" / "table.md").read_text()


def _lost(config: Any, *, quiet: bool = False) -> Any:
    raise MemoryError("no memory")


def test_where_no_run_begins_the_folder_stays_free(picture: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="full ended with MemoryError"):
        compare_ranks(small_config(picture, tmp_path / "all"), _lost, kinds=["full"])
    assert {file.name for file in (tmp_path / "all").iterdir()} == {".lock", "logs"}
