"""The runs of a study side by side, in processes of their own, with one bar each."""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from wellposed.data import Dataset, DeviceLoader, ImageSet, open_data
from wellposed.diagnosis import probe
from wellposed.errors import DivergedError
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


def run_cells(config: StudyConfig) -> list[Outcome]:
    """Every run of the study, those that are done already as they are; a run that diverges is an outcome too."""
    cells = list(config.cells())
    console = Console(stderr=True, highlight=False)
    threads = max(1, (os.cpu_count() or 1) // config.jobs)
    with (
        ProcessPoolExecutor(config.jobs, get_context("spawn"), torch.set_num_threads, (threads,)) as pool,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        ) as progress,
    ):
        bars = {cell: progress.add_task(str(cell), total=1.0, numbers="waiting", start=False) for cell in cells}
        waiting = {pool.submit(run_cell, config.run(cell), cell): cell for cell in cells}
        try:
            outcomes = {}
            for future, outcome in _as_they_end(waiting, config, progress, bars):
                outcomes[waiting[future]] = outcome
                result = outcome.complaint or f"{100 * (outcome.accuracy or 0):.1f} %"
                progress.update(bars[outcome.cell], completed=1.0, numbers=result)
                if not console.is_terminal:
                    console.print(f"{outcome.cell}: {result} ({outcome.seconds:.0f} s)")
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [outcomes[cell] for cell in cells]


def run_cell(config: TrainConfig, cell: Cell) -> Outcome:
    """Train one cell, or go on with it, unless it is done."""
    if (config.folder / "result.json").exists():
        result = json.loads((config.folder / "result.json").read_text(encoding="utf-8"))
        return Outcome(cell, result["accuracy"], result["seconds"])
    probed = _Probe(config)
    if (config.folder / "config.json").exists():
        config = replace(config, resume=True)
    try:
        done = train_run(config, quiet=True, observe=probed)
    except DivergedError as error:
        return Outcome(cell, None, 0.0, str(error).partition(".")[0])
    return Outcome(cell, done.accuracy, done.seconds)


class _Probe:
    """Looks at every block with the first images of the test set."""

    def __init__(self, config: TrainConfig) -> None:
        sets = [open_data(config.data, split, config.image_size) for split in ("train", "test")]
        self.images, self.labels = probed_images(*sets)

    def __call__(self, model: nn.Module) -> dict[str, Any]:
        device = next(model.parameters()).device
        return {"blocks": [asdict(state) for state in probe(model, self.images.to(device), self.labels.to(device))]}


def probed_images(train: Dataset, test: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """The first images of the test set, normalized as in training, and their labels."""
    train, test = (data if isinstance(data, ImageSet) else _first_images(data) for data in (train, test))
    statistics = DeviceLoader(train, 1)
    loader = DeviceLoader(test, PROBED_IMAGES, shuffle=False, mean=statistics.mean, std=statistics.std)
    return next(iter(loader))


def _first_images(data: Dataset) -> ImageSet:
    images, labels = zip(*(data[index] for index in range(min(PROBED_IMAGES, len(data)))), strict=True)
    return ImageSet(data.name, data.classes, torch.stack(images), torch.tensor(labels))


def _as_they_end(
    waiting: dict["Future[Outcome]", Cell], config: StudyConfig, progress: Progress, bars: dict[Cell, Any]
) -> Iterator[tuple["Future[Outcome]", Outcome]]:
    """Each future with its outcome as soon as it is there; meanwhile the bars follow what the runs write."""
    left = set(waiting)
    while left:
        for future in [future for future in left if future.done()]:
            left.remove(future)
            yield future, future.result()
        for future in left:
            if future.running():
                progress.start_task(bars[waiting[future]])
                folder = config.run(waiting[future]).folder
                progress.update(bars[waiting[future]], **_progress_of(folder, config.epochs))
        time.sleep(0.2)


def _progress_of(out: Path, epochs: int) -> dict[str, Any]:
    try:
        events = read_journal(out, "train")
    except (OSError, ValueError):  # not there yet, or a line is being written
        return {"numbers": "starting"}
    if not events:
        return {"numbers": "starting"}
    return {"completed": events[-1]["epoch"] / epochs, "numbers": f"loss {events[-1]['loss']:.3f}"}
