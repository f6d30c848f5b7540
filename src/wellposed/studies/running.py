"""The runs of a study: each trains one model and looks at every block of it as it goes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from wellposed.data import open_data, sampled_images
from wellposed.diagnosis import probe
from wellposed.errors import DivergedError
from wellposed.studies.config import Cell, StudyConfig
from wellposed.studies.folders import read_result
from wellposed.studies.side_by_side import run_side_by_side
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
    runs = {cell: config.run(cell) for cell in config.cells()}
    found = run_side_by_side(runs, run_cell, _finished, jobs=config.jobs, preload=["wellposed.studies.running"])
    return list(found.values())


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
    result = read_result(config, "accuracy", "seconds")
    return None if result is None else Outcome(cell, result["accuracy"], result["seconds"])
