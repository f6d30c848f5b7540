import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from small_scenes import write_blender
from wellposed.errors import DataError, InvalidArgumentError, ModelFileError
from wellposed.fields.nerf import load_nerf
from wellposed.fields.nerf_config import NerfConfig
from wellposed.fields.nerf_fitting import NerfTask, fit_nerf, open_scene
from wellposed.fields.quality import psnr
from wellposed.fields.scenes import read_scene
from wellposed.runs import read_journal
from wellposed.training.accelerators import make_accelerator

SMALL = NerfConfig(
    **{"width": 32, "kind": "full", "steps": 200, "tests": 1, "lr": 4e-3, "device": "cpu", "frames": 3},
    **{"rays": 256, "samples": 4096, "pieces": 48, "cells": 16, "coarse": 12, "fine": 12},
)

ON_GPU = replace(SMALL, device="cuda", width=64, rays=2048, samples=2**15, steps=400, frames=0)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_blender(tmp_path_factory.mktemp("ball"))


def test_a_fitted_scene(scene: Path, tmp_path: Path) -> None:
    config = replace(SMALL, data=str(scene), out=tmp_path / "run")
    result = fit_nerf(config, quiet=True)
    white = float(torch.stack([psnr(torch.ones_like(image), image) for image in read_scene(scene).test.images]).mean())
    assert white < 16
    assert result.scores["psnr"] > 22
    assert result.scores["ssim"] > 0.75
    assert result.bytes == (tmp_path / "run" / "field.safetensors").stat().st_size
    with Image.open(tmp_path / "run" / "turntable.gif") as turntable:
        assert (turntable.n_frames, turntable.size) == (3, (16, 16))
    with Image.open(tmp_path / "run" / "views.png") as views:
        assert views.size == (2 * 16, 2 * 16)
    # The weights alone, from the file, give the same pictures.
    nerf, held_out = load_nerf(tmp_path / "run"), read_scene(scene).test
    pictures = [nerf.picture(pose) for pose in held_out.poses]
    again = torch.stack([psnr(*pair) for pair in zip(pictures, held_out.images, strict=True)]).mean()
    assert float(again) == pytest.approx(result.scores["psnr"], abs=0.2)


@pytest.mark.parametrize(("sampler", "kind"), [("hierarchical", "low-rank"), ("grid", "sine")])
def test_other_samplers_and_layers_learn_too(scene: Path, tmp_path: Path, sampler: str, kind: str) -> None:
    config = replace(SMALL, data=str(scene), out=tmp_path / "run", sampler=sampler, kind=kind, rank=4, frames=0)
    config = replace(config, steps=150, test_views=1, samples=8192 if sampler == "hierarchical" else 4096)
    result = fit_nerf(config, quiet=True)
    assert result.scores["psnr"] > 17.5
    assert result.parameters < result.full_parameters


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(SMALL, data=str(scene), steps=24, tests=2, frames=0, log_every=4)
    # Rays are left out, and the grid asked, from the second step on.
    monkeypatch.setattr("wellposed.fields.occupancy_grid._WARMUP", 0)
    monkeypatch.setattr("wellposed.fields.occupancy_grid.UPDATE_EVERY", 4)
    assert_goes_on_to_the_same_bits(config, tmp_path, monkeypatch, stopped=18)


def assert_goes_on_to_the_same_bits(
    config: NerfConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, stopped: int
) -> None:
    """A run that is stopped at step `stopped`, and goes on from its last checkpoint, ends as one that never was."""
    whole, broken = folder / "whole", folder / "broken"
    fit_nerf(replace(config, out=whole), quiet=True)
    loss = NerfTask.loss

    def stop(self: NerfTask, step: int) -> dict[str, torch.Tensor]:
        if step == stopped:
            raise KeyboardInterrupt
        return loss(self, step)

    monkeypatch.setattr(NerfTask, "loss", stop)
    with pytest.raises(KeyboardInterrupt):
        fit_nerf(replace(config, out=broken), quiet=True)
    monkeypatch.setattr(NerfTask, "loss", loss)
    fit_nerf(replace(config, out=broken, resume=True), quiet=True)
    first, second = (load_file(folder / "field.safetensors") for folder in (whole, broken))
    assert all(torch.equal(first[name], second[name]) for name in first)
    losses = [[event["loss"] for event in read_journal(folder, "train")] for folder in (whole, broken)]
    assert losses[0] == losses[1]


def test_rays_that_do_not_fit_are_rendered_all_the_same(scene: Path, tmp_path: Path) -> None:
    fit_nerf(replace(SMALL, data=str(scene), out=tmp_path, steps=2, frames=0, test_views=1), quiet=True)
    nerf, pose = load_nerf(tmp_path, cells=8), read_scene(scene).test.poses[0]
    nerf.grid.occupied.fill_(True)
    roomy = nerf.picture(pose)
    nerf.grid.samples = 3 * SMALL.pieces
    torch.testing.assert_close(nerf.picture(pose), roomy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 17, "kind": "sine"}, "expected at most 16"),
        ({"samples": 16}, "48 to 2"),
        ({"sampler": "hierarchical", "samples": 16}, "36 to 2"),
        ({"data": ""}, "wellposed fit nerf PATH"),
        ({"pieces": 1}, "2 to 4096"),
        ({"cells": 0}, "4 to 512"),
        ({"box": 0.0}, "above 0"),
        ({"downscale": 3}, "divisor"),
    ],
)
def test_settings_that_cannot_be_are_refused(scene: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        fit_nerf(replace(SMALL, **{"data": str(scene)} | changes), quiet=True)


def test_views_that_are_too_small_are_refused(scene: Path) -> None:
    with pytest.raises(DataError, match="8 x 8 pixels; expected at least 11 x 11"):
        open_scene(replace(SMALL, data=str(scene), downscale=2))


def test_a_file_that_is_no_scene_is_refused(scene: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="there is no such file"):
        load_nerf(tmp_path)
    fit_nerf(replace(SMALL, data=str(scene), out=tmp_path / "run", steps=1, frames=0, test_views=1), quiet=True)
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "run" / "field.safetensors").read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="cannot be read as a field"):
        load_nerf(tmp_path / "cut.safetensors")


def test_missing_frames_are_named_before_anything_is_written(scene: Path, tmp_path: Path) -> None:
    broken = write_blender(tmp_path / "scene")
    (broken / "test" / "r_1.png").unlink()
    with pytest.raises(DataError, match=r"1 of 2 frames have no picture: .*r_1\.png"):
        fit_nerf(replace(SMALL, data=str(broken), out=tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_forward_facing_scene_is_learned_in_normalized_device_coordinates(tmp_path: Path) -> None:
    from test_nerf_scenes import write_llff

    config = replace(SMALL, data=str(write_llff(tmp_path / "scene")), out=tmp_path / "run", steps=60, test_views=1)
    fit_nerf(config, quiet=True)
    facts = load_nerf(tmp_path / "run").sampling
    assert (facts.ndc, facts.background, facts.near, facts.far) == (True, None, 0.0, 1.0)
    assert facts.box[0][2] == pytest.approx(-1, abs=1e-5)
    assert facts.box[1][2] == pytest.approx(1, abs=1e-5)
    # Pictures of one colour each, red and dark: what is learned has no green.
    assert load_nerf(tmp_path / "run").picture(read_scene(tmp_path / "scene").test.poses[0])[..., 1].mean() < 0.1
    assert json.loads((tmp_path / "run" / "result.json").read_text())["psnr"] > 10


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["full", "sine"])
def test_on_a_gpu_compiled_in_bfloat16_it_goes_on_to_the_same_bits(
    kind: Any, scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(ON_GPU, data=str(scene), kind=kind, rank=10, tests=2)
    assert_goes_on_to_the_same_bits(config, tmp_path, monkeypatch, stopped=350)
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["psnr"] > 22


@pytest.mark.gpu
def test_what_a_gpu_replays_is_what_it_would_compute(scene: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("wellposed.fields.occupancy_grid._WARMUP", 0)
    config = replace(ON_GPU, data=str(scene), kind="full", out=tmp_path)
    task = NerfTask(config, open_scene(config), make_accelerator("cuda"))
    rays = task._rays.at(torch.randint(len(task._colours), (config.rays,), device=task.device))

    def colour_and_gradient(render: Any) -> tuple[torch.Tensor, torch.Tensor]:
        task.model.zero_grad()
        with task.autocast():
            seen = render(rays, jitter=False)
        (seen.colour * seen.complete[:, None]).square().sum().backward()
        return seen.colour.detach().clone(), torch.cat([p.grad.flatten() for p in task.model.parameters()])

    for step in range(100):  # weights and grid change between and after the calls that become graphs
        task.train_step(None, None, step)
        if step in {20, 40, 60, 80}:
            colour_and_gradient(task.render)
    colour, gradient = colour_and_gradient(task.render)
    expected_colour, expected_gradient = colour_and_gradient(task.nerf.render)
    torch.testing.assert_close(colour, expected_colour, rtol=0, atol=0.02)
    assert float((gradient - expected_gradient).norm()) < 0.05 * float(expected_gradient.norm())
