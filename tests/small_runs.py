"""Runs that take about a second on one core, and how to compare them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from wellposed.runs import read_journal
from wellposed.training import TrainConfig

TIMING = {"seconds", "images_per_second"}


def small_config(out: Path, **settings: Any) -> TrainConfig:
    """A ViT of width 16 with two blocks on digits: 22 steps an epoch."""
    model = {"depth": 2, "embed_dim": 16, "num_heads": 2}
    usual = {"data": "digits", "model_args": model, "batch_size": 64, "epochs": 2, "device": "cpu", "log_every": 5}
    return TrainConfig(**(usual | settings), out=out)


def small_flags(out: Path, *more: str) -> list[str]:
    """The same as arguments of `wellposed`."""
    model = ["--model-args", "depth", "2", "embed_dim", "16", "num_heads", "2"]
    usual = ["--data", "digits", "--batch-size", "64", "--epochs", "2", "--device", "cpu", "--log-every", "5"]
    return ["train", *usual, *model, "--out", str(out), *more]


def metrics(out: Path) -> list[dict[str, Any]]:
    """All events of a run without their timings."""
    return [{name: value for name, value in event.items() if name not in TIMING} for event in read_journal(out)]


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "wellposed.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """Weights and metrics are the same, bit for bit."""
    assert metrics(one) == metrics(other)
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
