"""Supervised training: a model, with or without skips, learns to classify images."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from wellposed.data import Dataset, open_data
from wellposed.optim import BETAS, LEARNING_RATES
from wellposed.training.classification import Classification
from wellposed.training.config import TrainConfig
from wellposed.training.guards import flushed_denormals
from wellposed.training.models import fitted_to_data
from wellposed.training.running import carry_out, described_model, described_place


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    accuracy: float
    """Of the test set, 0 to 1, after the last epoch."""
    loss: float
    """Mean cross-entropy of the test set."""
    seconds: float
    """Training and testing, without writing checkpoints, over all the times the run was taken up."""
    out: Path
    """Its folder; `wellposed.load(out)` gives the model."""
    model: nn.Module


def train(
    config: TrainConfig,
    *,
    quiet: bool = False,
    observe: Callable[[nn.Module], dict[str, Any]] | None = None,
    given: Collection[str] | None = None,
) -> TrainResult:
    """Train as `config` says, or go on with the run in `config.out` if it says `resume`.

    The folder of the run holds config.json, metrics.jsonl, tensorboard/, checkpoints/ and, at the end, the model and
    result.json. A run that was killed at any moment resumes to the same weights and metrics, bit for bit, on the same
    device. Ctrl-C finishes the step, writes a checkpoint and raises KeyboardInterrupt.

    Args:
        config: what to train.
        quiet: show nothing while training.
        observe: called with the model before the first step and after every epoch; what it returns, JSON-able, goes
            into the metrics as an "observe" event.
        given: where it resumes, the fields of `config` that must be the run's, or override its own; if None, those that
            differ from their default.

    Raises:
        DivergedError: the loss is no longer finite; the last good checkpoint stays.
        RunError: the folder holds another run, or none to resume, or cannot be written.
        InvalidArgumentError, DataError: something in `config` cannot be; nothing has been written then.
    """
    config.check()
    with flushed_denormals():
        if config.resume:
            config = config.resumed_from(TrainConfig.of_run(config.out), given)
            config.check()
        data, test = (open_data(config.data, split, config.image_size) for split in ("train", "test"))
        config = _resolved(config, data)
        task, loop, display = carry_out(
            *(config, data, lambda place: Classification(config, data, test, place)),
            lambda made, place: _summary(config, data, made, place),
            quiet=quiet,
            observe=observe,
        )
    results, out = loop.results, config.folder
    display.say(f"accuracy {100 * results['accuracy']:.2f} % after {loop.seconds:.0f} s; the model is in {out}")
    return TrainResult(results["accuracy"], results["loss"], loop.seconds, out, task.tested_model().eval())


def _resolved(config: TrainConfig, data: Dataset) -> TrainConfig:
    """`config` with everything filled in that it leaves to the data, the model and the optimizer."""
    config = fitted_to_data(config, data).suited_to(data.name)
    return replace(
        config,
        out=config.folder,
        lr=LEARNING_RATES[config.optimizer] if config.lr is None else config.lr,
        betas=BETAS[config.optimizer] if config.betas is None else config.betas,
    )


def _summary(config: TrainConfig, data: Dataset, task: Classification, accelerator: Accelerator) -> str:
    size = data.image_shape[-1]
    patch = config.patch_size
    tokens = f", patch {patch}: {(size // patch) ** 2} tokens" if patch else ""
    return (
        f"{described_model(config, task.model)}; {data.name}, {len(data)} images of {size} px{tokens}; "
        f"{config.optimizer}, lr {config.lr:g}; {described_place(config, task, accelerator)}"
    )
