"""Runs of DINO that take about two seconds on one core."""

from pathlib import Path
from typing import Any

from wellposed.training import DinoConfig


def small_dino(out: Path, **settings: Any) -> DinoConfig:
    """A ViT of width 16 with two blocks on digits: 11 steps an epoch."""
    usual = {
        "data": "digits",
        "model": "vit_tiny_patch16_224",
        "model_args": {"depth": 2, "embed_dim": 16, "num_heads": 2},
        "batch_size": 128,
        "epochs": 2,
        "warmup_epochs": 1.0,
        "local_crops": 2,
        "out_dim": 48,
        "hidden_dim": 32,
        "bottleneck_dim": 16,
        "knn_images": 200,
        "device": "cpu",
        "log_every": 4,
    }
    return DinoConfig(**(usual | settings), out=out)


def small_dino_flags(out: Path, *more: str) -> list[str]:
    """The same as arguments of `wellposed`."""
    model = ["--model-args", "depth", "2", "embed_dim", "16", "num_heads", "2"]
    head = ["--out-dim", "48", "--hidden-dim", "32", "--bottleneck-dim", "16"]
    usual = ["--data", "digits", "--batch-size", "128", "--epochs", "2", "--warmup-epochs", "1", "--local-crops", "2"]
    rest = ["--knn-images", "200", "--device", "cpu", "--log-every", "4", "--out", str(out)]
    return ["pretrain", *usual, *model, *head, *rest, *more]
