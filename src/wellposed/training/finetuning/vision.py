"""Fine-tuning a vision model on disk: `wellposed finetune vision`."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from wellposed.data import Dataset, ImageSet, open_data
from wellposed.training.finetuning.images import ImageTask, with_channels
from wellposed.training.finetuning.methods import layer_numbers
from wellposed.training.finetuning.vision_config import VisionConfig
from wellposed.training.finetuning.vision_models import OpenedVision, open_vision_model
from wellposed.training.guards import flushed_denormals
from wellposed.training.running import carry_out, described_place

_SIZED = {"digits", "cifar10", "cifar100"}
"""Sets whose images have a size of their own."""


@dataclass(frozen=True)
class VisionResult:
    """How a run ended."""

    scores: dict[str, float]
    """On the test set, after the last epoch."""
    seconds: float
    """Training and testing, over all the times the run was taken up."""
    out: Path
    """The folder of the run."""
    saved: Path
    """The folder in it with the adapter, or with the model."""
    model: Any


def finetune_vision(config: VisionConfig, *, quiet: bool = False, given: Collection[str] | None = None) -> VisionResult:
    """Fine-tune as `config` says, or go on with the run in `config.out` if it says `resume`.

    The model gets a new head for the classes of the set, which is trained as a whole; by an adapter nothing else is
    but the adapter. The folder of the run holds config.json, metrics.jsonl, tensorboard/, checkpoints/ and, at the end,
    adapter/ as PEFT saves it, or model/ if all weights were trained, as transformers or `wellposed.save` does, with a
    card, and result.json. A run that was killed resumes to the same weights; Ctrl-C finishes the step, writes a
    checkpoint and raises KeyboardInterrupt.

    Args:
        config: what to train.
        quiet: show nothing while training.
        given: where it resumes, the fields of `config` that must be the run's, or override its own; if None, those that
            differ from their default.

    Raises:
        DivergedError: the loss is no longer finite; the last good checkpoint stays.
        RunError: the folder holds another run, or none to resume, or cannot be written.
        InvalidArgumentError, DataError, ModelFileError, UnsuitableModelError: something in `config`, the data or the
            model cannot be; nothing has been written then.
    """
    if config.resume:
        config = config.resumed_from(VisionConfig.of_run(config.out), given)
    config.check()
    opened = open_vision_model(config)
    train, test = suited_sets(config, opened)
    config = config.resolved().suited_to(train.name)
    with flushed_denormals():
        task, loop, display = carry_out(
            *(config, train, lambda place: ImageTask(config, opened, train, test, place)),
            lambda made, place: _summary(config, opened, made, place, train),
            quiet=quiet,
            observe=None if config.method == "full" else layer_numbers,
        )
    saved = config.folder / ("model" if config.method == "full" else "adapter")
    right, of_classes = (100 * loop.results[name] for name in ("accuracy", "class_accuracy"))
    told = f"accuracy {right:.2f} %, {of_classes:.2f} % as the mean of the classes"
    display.say(f"{told}; after {loop.seconds:.0f} s, in {saved}")
    return VisionResult(loop.results, loop.seconds, config.folder, saved, task.model.eval())


def suited_sets(config: VisionConfig, opened: OpenedVision) -> tuple[Dataset, Dataset]:
    """What `config` trains and tests on, as the model takes it."""
    size = None if config.sets in _SIZED else opened.image_size
    train, test = (
        with_channels(some_of(open_data(config.data, split, size), config.limit), opened.channels)
        for split in ("train", "test")
    )
    return train, test


@dataclass(frozen=True)
class _Some:
    """Some images of a set that is read image by image."""

    whole: Dataset
    chosen: list[int]

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def classes(self) -> tuple[str, ...]:
        return self.whole.classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.whole.image_shape

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.whole[self.chosen[index]]


def some_of(data: Dataset, limit: int | None) -> Dataset:
    """At most `limit` images from all over `data`; all if None."""
    if limit is None or limit >= len(data):
        return data
    chosen = torch.linspace(0, len(data) - 1, limit).long()
    if isinstance(data, ImageSet):
        return replace(data, images=data.images[chosen], labels=data.labels[chosen], masks=None, boxes=None)
    return _Some(data, chosen.tolist())


def _summary(
    config: VisionConfig, opened: OpenedVision, task: ImageTask, accelerator: Accelerator, data: Dataset
) -> str:
    trained, whole = (count / 1e6 for count in task.parameter_counts())
    rank = "" if config.method == "full" else f" of rank {config.r}"
    new = " (at its initialization: no --checkpoint was given)" if opened.is_new else ""
    pixels = data.image_shape[-1]
    enlarged = "" if pixels == opened.image_size else f" that it sees at {opened.image_size}"
    return (
        f"{config.model}{new}, {config.method}{rank}: {trained:.3f} of {whole:.1f} M parameters are trained; "
        f"{data.name}, {len(data)} images of {pixels} px{enlarged}, {len(data.classes)} classes; lr {config.lr:g}; "
        f"{described_place(config, task, accelerator)}"
    )
