"""Fine-tuning a language model on disk: `wellposed finetune language`."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from wellposed.data.language import LanguageData, open_language
from wellposed.training.finetuning.completions import CompletionTask
from wellposed.training.finetuning.config import LanguageConfig
from wellposed.training.finetuning.labels import LabelTask
from wellposed.training.finetuning.language_task import LanguageTask
from wellposed.training.finetuning.methods import layer_numbers
from wellposed.training.guards import flushed_denormals
from wellposed.training.running import carry_out, described_place


@dataclass(frozen=True)
class LanguageResult:
    """How a run ended."""

    scores: dict[str, float]
    """On the test sets, after the last epoch; under SET/SCORE where there are several, with the means beside them."""
    seconds: float
    """Training and testing, over all the times the run was taken up."""
    out: Path
    """The folder of the run."""
    saved: Path
    """The folder in it with the adapter, or with the model."""
    model: Any
    tokenizer: Any


def finetune_language(
    config: LanguageConfig, *, quiet: bool = False, given: Collection[str] | None = None
) -> LanguageResult:
    """Fine-tune as `config` says, or go on with the run in `config.out` if it says `resume`.

    Files of completions make a causal language model, files of labelled texts a classifier. The folder of the run holds
    config.json, metrics.jsonl, tensorboard/, checkpoints/ and, at the end, adapter/ as PEFT saves it (model/ if all
    weights were trained), with a card, and result.json. A run that was killed resumes to the same weights; Ctrl-C
    finishes the step, writes a checkpoint and raises KeyboardInterrupt.

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
        config = config.resumed_from(LanguageConfig.of_run(config.out), given)
    config.check()
    config = config.resolved()
    data = open_language(config.data, config.test, config.limit, config.answers)
    kind: type[LanguageTask] = LabelTask if data.classes else CompletionTask
    with flushed_denormals():
        task, loop, display = carry_out(
            *(config, data, lambda place: kind(config, data, place)),
            lambda made, place: _summary(config, data, made, place),
            quiet=quiet,
            observe=None if config.method == "full" else layer_numbers,
        )
    out = config.folder
    saved = out / ("model" if config.method == "full" else "adapter")
    shown = ", ".join(f"{name} {value:.4f}" for name, value in loop.results.items()) or "nothing was tested"
    display.say(f"{shown}; after {loop.seconds:.0f} s, in {saved}")
    return LanguageResult(loop.results, loop.seconds, out, saved, task.model.eval(), task.tokenizer)


def _summary(config: LanguageConfig, data: LanguageData, task: LanguageTask, accelerator: Accelerator) -> str:
    trained, whole = (count / 1e6 for count in task.parameter_counts())
    size = "" if config.method == "full" else f" of rank {config.r}"
    told = task.encoder.told()
    cut = f"; of all sequences, to train on and to test, {told}" if told else ""
    sets = ", ".join(f"{name} ({len(records)})" for name, records in data.tests.items()) or "nothing"
    rows = f"{len(data)} examples in {len(task.loader)} batches of {config.batch_size} rows, {task.length} tokens each"
    return (
        f"{config.model}, {config.method}{size}: {trained:.3f} of {whole:.1f} M parameters are trained; "
        f"{data.name}, {rows} at most; tested on {sets}; lr {config.lr:g}; "
        f"{described_place(config, task, accelerator)}{cut}"
    )
