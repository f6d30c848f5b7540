"""DINO: self-supervised pretraining of a ViT, with or without skips (arXiv 2104.14294, 2510.00345)."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from wellposed.data import Dataset, open_data
from wellposed.errors import DataError
from wellposed.recipes import load
from wellposed.training.dino_config import DinoConfig
from wellposed.training.dino_models import resolved
from wellposed.training.dino_task import Dino
from wellposed.training.guards import flushed_denormals
from wellposed.training.running import carry_out, described_model, described_place


@dataclass(frozen=True)
class PretrainResult:
    """How a run ended."""

    knn: float | None
    """k-NN accuracy of the teacher's features on the test set, 0 to 1, after the last epoch, where it was asked for."""
    seconds: float
    """Training and testing, without writing checkpoints, over all the times the run was taken up."""
    out: Path
    """Its folder; `wellposed.load(out)` gives the teacher's backbone, which takes images of any size."""
    model: nn.Module
    """That backbone, on the CPU."""


def pretrain(
    config: DinoConfig,
    *,
    quiet: bool = False,
    observe: Callable[[nn.Module], dict[str, Any]] | None = None,
    given: Collection[str] | None = None,
) -> PretrainResult:
    """Pretrain as `config` says, or go on with the run in `config.out` if it says `resume`.

    The folder of the run is as that of `train`: config.json, metrics.jsonl, tensorboard/, checkpoints/ and, at the end,
    the teacher's backbone and result.json. A checkpoint is that backbone too, with all the rest beside it. A run that
    was killed at any moment resumes to the same weights and metrics, bit for bit, on the same device.

    Args:
        config: what to train.
        quiet: show nothing while training.
        observe: called with the teacher's backbone before the first step and after every epoch; what it returns,
            JSON-able, goes into the metrics as an "observe" event.
        given: where it resumes, the fields of `config` that must be the run's, or override its own; if None, those that
            differ from their default.

    Raises:
        DivergedError: the loss is no longer finite, or the run has collapsed; the last good checkpoint stays.
        RunError: the folder holds another run, or none to resume, or cannot be written.
        InvalidArgumentError, DataError: something in `config` cannot be; nothing has been written then.
    """
    config.check()
    with flushed_denormals():
        if config.resume:
            config = config.resumed_from(DinoConfig.of_run(config.out), given)
            config.check()
        data = open_data(config.data, "train", config.image_size)
        test = _test_set(config) if config.knn_images else None
        config = resolved(config, data)
        _, loop, display = carry_out(
            *(config, data, lambda place: Dino(config, data, test, place)),
            lambda made, place: _summary(config, data, made, place),
            quiet=quiet,
            observe=observe,
        )
    knn = loop.results.get("knn")
    accuracy = "" if knn is None else f"k-NN {100 * knn:.2f} % "
    display.say(f"{accuracy}after {loop.seconds:.0f} s; the teacher's backbone is in {config.folder}")
    return PretrainResult(knn, loop.seconds, config.folder, load(config.folder))


def _test_set(config: DinoConfig) -> Dataset:
    try:
        return open_data(config.data, "test", config.image_size)
    except DataError as error:
        raise DataError(f"{error}. Without a test set, leave k-NN out with --knn-images 0") from error


def _summary(config: DinoConfig, data: Dataset, task: Dino, accelerator: Accelerator) -> str:
    views = f"{config.global_crops} x {config.global_size} px"
    views += f" + {config.local_crops} x {config.local_size} px" if config.local_crops else ""
    return (
        f"{described_model(config, task.model.backbone)}, patch {config.patch_size}; {data.name}, {len(data)} images "
        f"as {views}; {config.out_dim} outputs; {config.optimizer}, lr {config.lr:g} for 256 images; "
        f"{described_place(config, task, accelerator)}"
    )
