"""A study: every kind of model trained under every optimizer and seed, and the page that compares them."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

from wellposed.data import Dataset, open_data
from wellposed.errors import InvalidArgumentError
from wellposed.families import blocks
from wellposed.reporting import page
from wellposed.runs import atomic_path, device_named, locked, write_json, writing_to
from wellposed.studies.ablations import Kind
from wellposed.studies.config import Cell, StudyConfig
from wellposed.studies.folders import REPORT, check_out, claim, facts_of
from wellposed.studies.pictures import save_accuracies, save_ranks, sections
from wellposed.studies.running import Outcome, run_cells
from wellposed.studies.words import lead
from wellposed.training.guards import is_repeatable
from wellposed.training.models import build_model, fitted_to_data

_EXTENT = {"seeds", "more_seeds", "kinds", "ranks", "optimizers"}


@dataclass(frozen=True)
class StudyResult:
    """The accuracies of a study and its page."""

    config: StudyConfig
    outcomes: tuple[Outcome, ...]
    report: Path
    facts: dict[str, str]

    def rows(self) -> list[tuple[str, ...]]:
        """A row per kind of model: its name and the accuracy under each optimizer."""
        optimizers = self.config.optimizers
        return [(kind.name, *(self._cell(kind.key, o) for o in optimizers)) for kind in self.config.compared]

    def accuracies(self, kind: str, optimizer: str) -> list[float]:
        """Of the runs that did not diverge, one per seed."""
        return [found.accuracy for found in self._found(kind, optimizer) if found.accuracy is not None]

    def _found(self, kind: str, optimizer: str) -> list[Outcome]:
        return [found for found in self.outcomes if (found.cell.kind, found.cell.optimizer) == (kind, optimizer)]

    def _cell(self, kind: str, optimizer: str) -> str:
        values = [100 * value for value in self.accuracies(kind, optimizer)]
        if not values:
            return "diverged"
        spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
        lost = len(self._found(kind, optimizer)) - len(values)
        return f"{mean(values):.1f}{spread}" + (f", {lost} diverged" if lost else "")


def study(config: StudyConfig) -> StudyResult:
    """Train every cell of `config`, or those that are missing, and write the page that compares them.

    Raises:
        RunError: the folder holds a study with other settings.
        InvalidArgumentError, DataError: something in `config` cannot be; nothing has been written then.
        KeyboardInterrupt: after each run has written a checkpoint; the same call goes on.
    """
    config.check()
    config = _tried_out(config)
    with writing_to(config.out):
        config.out.mkdir(parents=True, exist_ok=True)
    with locked(config.out):
        _claim(config)
        outcomes = tuple(run_cells(config))
        runs = [config.run(cell) for cell in config.cells()]
        result = StudyResult(config, outcomes, config.out / REPORT, facts_of(runs, _plain(config)))
        with writing_to(config.out):
            with atomic_path(result.report) as temporary:
                text = page(config.described.title, lead(result), sections(config, result), result.facts)
                temporary.write_text(text, encoding="utf-8")
            save_accuracies(config, config.out / "accuracy.png")
            save_ranks(config, result)
            write_json(config.out / "outcomes.json", [asdict(outcome) for outcome in outcomes])
    return result


def _tried_out(config: StudyConfig) -> StudyConfig:
    """`config` with the kinds its model can be; raises what a run would raise, before anything is written."""
    device_named("cpu" if config.device == "auto" else config.device)
    check_out(config.out)
    train, _ = (open_data(config.data, split, config.image_size) for split in ("train", "test"))
    if config.batch_size > len(train):
        raise InvalidArgumentError(
            f"batch_size={config.batch_size}: expected at most {len(train)}, the size of the set"
        )
    config = replace(config, kinds=_possible_kinds(config, _model(config, config.described.kinds[0], train)))
    for kind in config.compared:
        is_repeatable(_model(config, kind, train), torch.zeros(2, *train.image_shape))
    return config


def _model(config: StudyConfig, kind: Kind, data: Dataset) -> nn.Module:
    run = config.run(Cell(kind.key, config.optimizers[0], config.seed))
    with torch.random.fork_rng([]):
        return build_model(fitted_to_data(run, data), data)


def _possible_kinds(config: StudyConfig, model: nn.Module) -> tuple[str, ...]:
    """The kinds that were asked for, or all that differ where the blocks of `model` have the skips they have."""
    found = blocks(model)
    if config.described.needs_attention and any(block.family.attention is None for block in found):
        raise InvalidArgumentError(f"model={config.model}: the study looks at attention; expected a timm ViT")
    skips = {skip for block in found for skip in block.family.skips}
    possible = [kind.key for kind in config.compared if kind.needs <= skips]
    for kind in config.compared if config.kinds else ():
        if kind.key not in possible:
            raise InvalidArgumentError(
                f"kinds has {kind.key!r}: the blocks of {config.model} have one skip ({', '.join(skips)}); expected "
                f"some of {', '.join(kind.key for kind in config.described.kinds if kind.needs <= skips)}"
            )
    return tuple(possible)


def _claim(config: StudyConfig) -> None:
    """Make the folder this study's own, or see that it already is."""
    claim(config.out, _plain(config), asdict(StudyConfig()), _EXTENT)  # older ones know fewer settings


def _plain(config: StudyConfig) -> dict[str, Any]:
    """The settings that the numbers depend on, as JSON holds them."""
    free = {"out", "jobs", "device", *config.unused()}
    settings = {name: value for name, value in asdict(config).items() if name not in free}
    settings |= {"model_args": config.arguments(), "kinds": [kind.key for kind in config.compared]}
    return json.loads(json.dumps(settings))
