"""The runs of a study side by side, in processes of their own, with one bar each."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from wellposed.data import open_data, sampled_images
from wellposed.data.processes import CONTEXT, end_with_parent, start_server
from wellposed.diagnosis import probe
from wellposed.errors import DivergedError, RunError, WellposedError
from wellposed.runs import read_journal
from wellposed.studies.config import Cell, StudyConfig
from wellposed.training import TrainConfig
from wellposed.training import train as train_run

PROBED_IMAGES = 16


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its accuracy, or why there is none."""

    cell: Cell
    accuracy: float | None
    seconds: float
    complaint: str = ""

    def __str__(self) -> str:
        return self.complaint or f"{100 * (self.accuracy or 0):.1f} %"


def run_cells(config: StudyConfig) -> list[Outcome]:
    """Every run of the study, those that are done already as they are; a run that diverges is an outcome too."""
    cells = list(config.cells())
    outcomes = {cell: done for cell in cells if (done := _finished(config.run(cell), cell))}
    console = Console(stderr=True, highlight=False)
    if outcomes:
        console.print(f"{len(outcomes)} of {len(cells)} runs are done already")
    with _bars(console) as progress:
        bars = {cell: progress.add_task(str(cell), total=1.0, numbers="", start=False) for cell in cells}
        for cell, outcome in outcomes.items():
            progress.update(bars[cell], completed=1.0, numbers=str(outcome))
        for cell, outcome in _run_side_by_side(config, [c for c in cells if c not in outcomes], progress, bars):
            outcomes[cell] = outcome
            progress.update(bars[cell], completed=1.0, numbers=str(outcome))
            if not console.is_terminal:
                console.print(f"{cell}: {outcome} ({outcome.seconds:.0f} s)")
    return [outcomes[cell] for cell in cells]


def _run_side_by_side(
    config: StudyConfig, waiting: list[Cell], progress: Progress, bars: dict[Cell, Any]
) -> Iterator[tuple[Cell, Outcome]]:
    """Each outcome as soon as it is there; on Ctrl-C or SIGTERM every run writes a checkpoint first."""
    running: dict[Cell, tuple[ForkServerProcess, Connection]] = {}
    with _sigterm_as_interrupt():
        try:
            while waiting or running:
                while waiting and len(running) < config.jobs:
                    cell = waiting.pop(0)
                    running[cell] = _start(config.run(cell), cell)
                    progress.start_task(bars[cell])
                for cell, (process, results) in list(running.items()):
                    if results.poll() or not process.is_alive():
                        outcome = _received(process, results, config.run(cell))
                        del running[cell]
                        yield cell, outcome
                    else:
                        progress.update(bars[cell], **_progress_of(config.run(cell).folder, config.epochs))
                time.sleep(0.1)
        except KeyboardInterrupt:
            progress.console.print("stopping: every run writes a checkpoint; the same command goes on with them")
            raise
        finally:
            for process, _ in running.values():
                process.terminate()  # which a run that trains takes as a wish to stop after its step
            for process, _ in running.values():
                process.join()


def _start(config: TrainConfig, cell: Cell) -> tuple[ForkServerProcess, Connection]:
    start_server("wellposed.studies.running")
    context = get_context(CONTEXT)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(config, cell, sender), daemon=False)
    process.start()
    sender.close()
    return process, receiver


def _received(process: ForkServerProcess, results: Connection, config: TrainConfig) -> Outcome:
    try:
        result = results.recv()
    except EOFError:
        process.join()
        raise RunError(
            f"the run in {config.folder} ended with status {process.exitcode} and no word (out of memory?); "
            "the same command goes on with it, fewer --jobs need less"
        ) from None
    process.join()
    if isinstance(result, WellposedError):
        raise result
    return result


def _work(config: TrainConfig, cell: Cell, results: Connection) -> None:
    """What a process does: one run. SIGINT stays blocked in it, the main process passes the wish to stop on."""
    end_with_parent()
    torch.set_num_threads(1)  # so that a run's numbers do not depend on how many there are beside it
    log = config.folder.parents[1] / "logs" / f"{cell}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as sys.stderr:
        try:
            results.send(run_cell(config, cell))
        except WellposedError as error:
            results.send(error)
        except KeyboardInterrupt:
            os._exit(130)


def run_cell(config: TrainConfig, cell: Cell) -> Outcome:
    """Train one cell, or go on with it."""
    sets = [open_data(config.data, split, config.image_size) for split in ("train", "test")]
    images, labels = sampled_images(sets[0], sets[1], PROBED_IMAGES)

    def look(model: nn.Module) -> dict[str, Any]:
        device = next(model.parameters()).device
        with _batch_statistics(model):
            return {"blocks": [asdict(state) for state in probe(model, images.to(device), labels.to(device))]}

    if (config.folder / "config.json").exists():
        config = replace(config, resume=True)
    try:
        done = train_run(config, quiet=True, observe=look)
    except DivergedError as error:
        return Outcome(cell, None, 0.0, str(error).partition(". ")[0])
    return Outcome(cell, done.accuracy, done.seconds)


@contextmanager
def _batch_statistics(model: nn.Module) -> Iterator[None]:
    """BatchNorm as training sees it, from the batch alone: before the first step its running averages mean nothing."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [(norm.training, norm.track_running_stats) for norm in norms]
    for norm in norms:
        norm.training, norm.track_running_stats = True, False
    try:
        yield
    finally:
        for norm, (training, tracks) in zip(norms, before, strict=True):
            norm.training, norm.track_running_stats = training, tracks


def _finished(config: TrainConfig, cell: Cell) -> Outcome | None:
    try:
        result = json.loads((config.folder / "result.json").read_text(encoding="utf-8"))
        return Outcome(cell, result["accuracy"], result["seconds"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{config.folder / 'result.json'} cannot be read ({error}); remove it to go on") from error


def _progress_of(out: Path, epochs: int) -> dict[str, Any]:
    try:
        events = read_journal(out, "train")
    except (OSError, ValueError):  # not there yet, or a line is being written
        events = []
    if not events:
        return {"numbers": "starting"}
    return {"completed": events[-1]["epoch"] / epochs, "numbers": f"loss {events[-1]['loss']:.3f}"}


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _bars(console: Console) -> Progress:
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}")]
    return Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
