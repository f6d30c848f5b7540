"""What every kind of run does around its steps: its folder, its lock, its device, its files at the end."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from accelerate import Accelerator
from torch import nn

from wellposed.errors import RunError
from wellposed.runs import is_free, locked, provenance, write_json, writing_to
from wellposed.training.accelerators import make_accelerator
from wellposed.training.display import Display
from wellposed.training.guards import repeatable
from wellposed.training.loop import Loop
from wellposed.training.run_config import RunConfig
from wellposed.training.settings import FREE, RUN_CONFIG, Settings
from wellposed.training.task import Task

_RESULT = "result.json"


class Runnable(Task, Protocol):
    """A task that can be run from beginning to end."""

    is_repeatable: bool
    bf16: bool

    def observed(self, look: Callable[[nn.Module], dict[str, Any]]) -> dict[str, Any]:
        """What `look` sees of the tested model, in eval mode."""
        ...


class NamedSet(Protocol):
    """What a run must know of the set that it trains on."""

    @property
    def name(self) -> str:
        """Of the set."""
        ...

    def __len__(self) -> int: ...


AnyTask = TypeVar("AnyTask", bound=Runnable)


def carry_out(
    config: Settings,
    data: NamedSet,
    make_task: Callable[[Accelerator], AnyTask],
    describe: Callable[[AnyTask, Accelerator], str],
    *,
    quiet: bool,
    observe: Callable[[nn.Module], dict[str, Any]] | None = None,
) -> tuple[AnyTask, Loop, Display]:
    """Run a task to its end in the folder of `config`, or go on with it, and write its tested weights and results.

    Args:
        config: with everything filled in, its folder too.
        data: the training set.
        make_task: called once all random numbers come from the run's seed.
        describe: a line about the task, to show before it begins.
        quiet: show nothing.
        observe: called with the tested model before the first step and after every epoch, for the metrics.
    """
    out = free_folder(config)
    accelerator = make_accelerator(config.device)
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with repeatable(accelerator.device, wanted=config.repeatable), torch.random.fork_rng(devices):
        torch.manual_seed(config.seed)
        task = make_task(accelerator)
        torch.manual_seed(config.seed + accelerator.process_index)
        display = Display(visible=accelerator.is_main_process and not quiet)
        display.say(describe(task, accelerator))
        if not task.is_repeatable:
            display.say(f"some kernels of {config.model} are not repeatable: resuming it will not give the same bits")
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
            if accelerator.is_main_process:
                with writing_to(out):
                    task.save_tested(out)
                    own = getattr(task, "facts", {})  # what a kind of task has to tell beside its scores
                    write_json(out / _RESULT, {**results, "seconds": loop.seconds, **own, **facts})
            accelerator.wait_for_everyone()
    return task, loop, display


def free_folder(config: Settings) -> Path:
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


def described_model(config: RunConfig, model: nn.Module) -> str:
    """The model of a run in a few words: its name, what was changed in it, and its size."""
    millions = sum(param.numel() for param in model.parameters()) / 1e6
    cut = "" if config.cut == "both" else f" around {'attention' if config.cut == 'attention' else 'the MLP'}"
    skips = "with skips" if config.skips else f"without skips{cut}"
    skips += "" if config.gray == "none" else f", {config.gray} graying of its {config.gray_at}"
    skips += "" if config.attention == "softmax" else f", {config.attention} attention"
    if config.low_rank is not None:
        skips += f", MLPs of rank {config.low_rank}{' under a sine' if config.low_rank_activation == 'sine' else ''}"
    return f"{config.model} {skips}, {config.init} init, {millions:.1f} M parameters"


def described_place(config: Settings, task: Runnable, accelerator: Accelerator) -> str:
    """Where a run takes place, in which precision, and where it is written."""
    devices = f"{accelerator.num_processes} x {accelerator.device.type}"
    return f"{devices}, {'bf16' if task.bf16 else 'fp32'}; {config.out}"


def _identity(config: Settings, data: NamedSet) -> dict[str, Any]:
    """What must be the same when a run goes on: all settings that its numbers depend on, and the size of the set."""
    settings = {name: value for name, value in config.to_dict().items() if name not in FREE}
    return {**settings, "data": data.name, "images": len(data)}
