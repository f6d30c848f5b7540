"""`wellposed fit occupancy`: a mesh as a network, and back."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import wellposed as wp
from test_fields import open_box
from wellposed.cli import main
from wellposed.fields.meshes import grid_axis, open_mesh
from wellposed.fields.occupancy import iou, logits, slabs
from wellposed.runs import Checkpoints, is_free

trimesh = pytest.importorskip("trimesh")


def small_config(mesh: Path, out: Path, **settings: Any) -> wp.fields.OccupancyConfig:
    usual = {"width": 64, "rank": 4, "steps": 200, "tests": 1, "device": "cpu", "lr": 5e-3, "batch_size": 1024}
    few = {"samples": 20000, "grid": 32, "mesh_grid": 32, "spread": 0.1}
    return wp.fields.OccupancyConfig(**({"data": str(mesh), "out": out} | usual | few | settings))


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wellposed.fields.shading.SIZE", 64)


@pytest.fixture
def ball(tmp_path: Path) -> Path:
    """Of radius 3 around (10, 0, -5)."""
    mesh = trimesh.creation.icosphere(subdivisions=3, radius=3.0).apply_translation([10.0, 0.0, -5.0])
    mesh.export(tmp_path / "ball.ply")
    return tmp_path / "ball.ply"


@pytest.mark.parametrize("kind", ["full", "sine"])
def test_a_ball_is_learned(kind: Any, ball: Path, tmp_path: Path) -> None:
    result = wp.fields.fit_occupancy(small_config(ball, tmp_path / "run", kind=kind), quiet=True)
    assert result.scores["iou"] > 0.9
    fitted = trimesh.load(tmp_path / "run" / "fitted.ply")
    assert fitted.is_watertight
    assert fitted.volume == pytest.approx(4 / 3 * math.pi * 27, rel=0.1)
    assert np.allclose(fitted.bounds, [[7, -3, -8], [13, 3, -2]], atol=0.5)  # in the coordinates of the file
    network, spec = wp.fields.load(tmp_path / "run")
    assert spec.facts["centre"] == pytest.approx([10.0, 0.0, -5.0])
    axis = grid_axis(32, torch.device("cpu"))
    inside = torch.cartesian_prod(axis, axis, axis).norm(dim=1) < 0.9
    found = torch.cat([logits(network, 32, rows) for rows in slabs(32, torch.device("cpu"))]) > 0
    assert float(iou(found.flatten(), inside)) == pytest.approx(result.scores["iou"], abs=0.02)
    truth, made = (np.asarray(Image.open(tmp_path / "run" / name), float) for name in ("truth.png", "fitted.png"))
    assert truth.shape == made.shape == (64, 128, 3)
    assert np.abs(truth - made).mean() < 0.1 * np.abs(truth - 255).mean()


def test_the_network_is_the_papers() -> None:
    spec = {"in_features": 3, "out_features": 1, "kind": "sine", "rank": 1}
    network = wp.fields.CoordinateNetwork(**spec)
    full = wp.fields.CoordinateNetwork(**(spec | {"kind": "full"}))
    counts = [sum(parameter.numel() for parameter in each.parameters()) for each in (network, full)]
    assert counts == [2817, 132865]  # 2.1 % (arXiv 2403.19243)
    z = torch.tensor([0.1])
    assert float(network.layers[1](z)) == pytest.approx(math.exp(-0.5))


def test_a_run_goes_on_to_the_same_bits(ball: Path, tmp_path: Path) -> None:
    config = small_config(ball, tmp_path / "run", steps=40, tests=2, grid=16, mesh_grid=16, width=16)
    wp.fields.fit_occupancy(config, quiet=True)
    whole = (tmp_path / "run" / "field.safetensors").read_bytes()
    newest = Checkpoints(tmp_path / "run" / "checkpoints").all()[0]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    wp.fields.fit_occupancy(wp.fields.OccupancyConfig(out=tmp_path / "run", resume=True), quiet=True)
    assert (tmp_path / "run" / "field.safetensors").read_bytes() == whole


def test_a_mesh_with_a_hole_is_refused_or_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    box = open_box(tmp_path / "box.ply")
    out = tmp_path / "run"
    assert main(["fit", "occupancy", str(box), "--out", str(out)]) == 2
    assert "not watertight: 4 of its edges" in capsys.readouterr().err
    assert not out.exists()
    assert main(["fit", "occupancy", str(box), "--ranks", "1", "--device", "cpu", "--out", str(out)]) == 2
    assert "not watertight: 4 of its edges" in capsys.readouterr().err
    assert is_free(out)  # for the same command with --repair
    few = ["--steps", "4", "--tests", "1", "--width", "16", "--samples", "500", "--grid", "8", "--batch-size", "64"]
    assert main(["fit", "occupancy", str(box), "--repair", "--device", "cpu", "--out", str(out), *few]) == 0
    assert "report:" in capsys.readouterr().out
    assert "data:image" in (out / "report.html").read_text()
    for bad in (tmp_path / "none.obj", tmp_path):
        assert main(["fit", "occupancy", str(bad), "--out", str(tmp_path / "other")]) == 2
        assert "no such file" in capsys.readouterr().err


@pytest.mark.gpu
def test_labels_on_a_gpu_are_those_on_the_cpu(ball: Path) -> None:
    shape = open_mesh(ball)
    points = 2 * torch.rand(100_000, 3) - 1
    there = shape.to(torch.device("cuda"))
    assert torch.equal(there.contains(points.cuda()).cpu(), shape.contains(points))
    assert torch.equal(there.fill(64, slice(0, 64)).cpu(), shape.fill(64, slice(0, 64)))
