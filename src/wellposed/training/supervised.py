"""Supervised training: a model, with or without skips, learns to classify images."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import nn

from wellposed.data import Dataset, open_data
from wellposed.errors import RunError
from wellposed.optim import BETAS, LEARNING_RATES
from wellposed.recipes import write
from wellposed.runs import is_free, locked, provenance, write_json, writing_to
from wellposed.training.accelerators import make_accelerator
from wellposed.training.classification import Classification
from wellposed.training.config import FREE, RUN_CONFIG, TrainConfig
from wellposed.training.display import Display
from wellposed.training.guards import flushed_denormals, repeatable
from wellposed.training.loop import Loop
from wellposed.training.models import fitted_to_data

_RESULT = "result.json"
# What suits a set where the configuration does not say: the crop, and whether mirrored images are of the same class.
_USUAL_AUGMENTATION: dict[str, tuple[Literal["none", "pad", "resize"], bool]] = {
    "digits": ("none", False),
    "folder": ("resize", True),
}


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
        out = _free_folder(config)
        accelerator = make_accelerator(config.device)
        devices = [accelerator.device] if accelerator.device.type == "cuda" else []
        with repeatable(accelerator.device, wanted=config.repeatable), torch.random.fork_rng(devices):
            torch.manual_seed(config.seed)
            task = Classification(config, data, test, accelerator)
            torch.manual_seed(config.seed + accelerator.process_index)
            display = Display(visible=accelerator.is_main_process and not quiet)
            display.say(_summary(config, data, task, accelerator))
            if not task.is_repeatable:
                display.say(
                    f"some kernels of {config.model} are not repeatable: resuming it will not give the same bits"
                )
            loop = Loop(
                *(task, out, accelerator, display),
                epochs=config.epochs,
                log_every=config.log_every,
                checkpoint_minutes=config.checkpoint_minutes,
                keep_every=config.keep_every,
                identity=_identity(config, data),
                observe=None if observe is None else lambda: task.observed(observe),
            )
            facts = {"config": config.to_dict(), **provenance(accelerator.device, seed=config.seed)}
            with writing_to(out):
                out.mkdir(parents=True, exist_ok=True)
            with locked(out) if accelerator.is_main_process else nullcontext():
                if config.resume:
                    loop.resume()
                elif accelerator.is_main_process:
                    with writing_to(out):
                        write_json(out / RUN_CONFIG, facts)
                results = loop.run()
                model = task.tested_model().eval()
                if accelerator.is_main_process:
                    with writing_to(out):
                        write(model, out, task.header)
                        write_json(out / _RESULT, {**results, "seconds": loop.seconds, **facts})
                accelerator.wait_for_everyone()
    display.say(f"accuracy {100 * results['accuracy']:.2f} % after {loop.seconds:.0f} s; the model is in {out}")
    return TrainResult(results["accuracy"], results["loss"], loop.seconds, out, model)


def _resolved(config: TrainConfig, data: Dataset) -> TrainConfig:
    """`config` with everything filled in that it leaves to the data, the model and the optimizer."""
    config = fitted_to_data(config, data)
    crop, flip = _USUAL_AUGMENTATION.get(data.name, ("pad", True))
    return replace(
        config,
        out=config.folder,
        lr=LEARNING_RATES[config.optimizer] if config.lr is None else config.lr,
        betas=BETAS[config.optimizer] if config.betas is None else config.betas,
        crop=crop if config.crop is None else config.crop,
        flip=flip if config.flip is None else config.flip,
    )


def _free_folder(config: TrainConfig) -> Path:
    """The folder of the run, which must not hold another one."""
    out = config.folder
    try:
        if out.exists() and not out.is_dir():
            raise RunError(f"out={out} is a file; expected a folder, or a name that is free")
        if not config.resume and out.is_dir() and not is_free(out):
            advice = f"go on with it by --resume --out {out}" if (out / RUN_CONFIG).exists() else "it is not empty"
            raise RunError(f"out={out} holds something already: {advice}, or choose another --out")
    except OSError as error:
        raise RunError(f"out={out} cannot be used ({error}); choose another --out") from error
    return out


def _identity(config: TrainConfig, data: Dataset) -> dict[str, Any]:
    """What must be the same when a run goes on: all settings that its numbers depend on, and the size of the set."""
    settings = {name: value for name, value in config.to_dict().items() if name not in FREE}
    return {**settings, "data": data.name, "images": len(data)}


def _summary(config: TrainConfig, data: Dataset, task: Classification, accelerator: Accelerator) -> str:
    size = data.image_shape[-1]
    patch = config.patch_size
    tokens = f", patch {patch}: {(size // patch) ** 2} tokens" if patch else ""
    millions = sum(param.numel() for param in task.model.parameters()) / 1e6
    cut = "" if config.cut == "both" else f" around {'attention' if config.cut == 'attention' else 'the MLP'}"
    skips = "with skips" if config.skips else f"without skips{cut}"
    skips += "" if config.gray == "none" else f", {config.gray} graying of its {config.gray_at}"
    return (
        f"{config.model} {skips}, {config.init} init, {millions:.1f} M parameters; {data.name}, {len(data)} images of "
        f"{size} px{tokens}; {config.optimizer}, lr {config.lr:g}; {accelerator.num_processes} x "
        f"{accelerator.device.type}, {'bf16' if task.bf16 else 'fp32'}; {config.out}"
    )
