"""`wellposed bench dino` on the CPU, small: both ways do the same job, and the table says so."""

import pytest
import torch

from wellposed.bench.dino import DinoBench
from wellposed.bench.plain_dino import Views, plain_batches, plain_dino_step
from wellposed.cli import main
from wellposed.data import make_shapes
from wellposed.training import DinoConfig
from wellposed.training.dino_models import backbone_arguments, resolved

SMALL = ["bench", "dino", "--model", "vit_tiny_patch16_224", "--image-size", "32", "--local-size", "16"]
SMALL += ["--local-crops", "2", "--batch-size", "4", "--out-dim", "64", "--steps", "1", "--windows", "1"]
SMALL += ["--device", "cpu", "--no-compile"]


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--workers", "0"]) == 0
    printed = capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == [
        "plain torch + torchvision",
        "its step alone",
        "wellposed pretrain",
        "wellposed pretrain, no skips",
        "our views alone",
    ]
    assert all(float(row[1].replace(",", "")) > 0 for row in rows)
    assert float(rows[0][2]) == 1.0
    assert main([*SMALL, "--windows", "0"]) == 2
    assert "windows=0" in capsys.readouterr().err


def test_ours_trains_its_last_layer_as_the_peer_does() -> None:
    data = make_shapes(16, 16)
    config = DinoBench(model="vit_tiny_patch16_224", image_size=16, local_size=8, batch_size=4)._config(data)
    assert config.freeze_last_epochs == 0


def test_the_peer_learns_too() -> None:
    torch.manual_seed(0)
    data = make_shapes(16, 16)
    small = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    config = DinoConfig(out_dim=16, hidden_dim=16, bottleneck_dim=8, batch_size=8, local_crops=2, model_args=small)
    config = resolved(config, data)
    views = Views(data.images, 16, config)
    batches = list(plain_batches(views, 8, 0, torch.device("cpu")))
    assert [tuple(view.shape) for view in batches[0]] == [(8, 3, 16, 16)] * 2 + [(8, 3, 6, 6)] * 2
    assert all(-3 < view.mean() < 3 for view in batches[0])
    step = plain_dino_step(config, backbone_arguments(config, data), torch.device("cpu"), compiled=False)
    losses = [float(step(batches[0])) for _ in range(60)]
    assert 0 < losses[0] < 10
    assert losses[-1] < losses[40] - 0.05  # it rises first, until the centre has found its place
