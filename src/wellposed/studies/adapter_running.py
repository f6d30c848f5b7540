"""The runs of a study of adapters, and what is kept of each."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from wellposed.data import open_data
from wellposed.data.language import open_language
from wellposed.errors import DataError, DivergedError, InvalidArgumentError
from wellposed.runs import read_journal
from wellposed.studies.adapter_config import AdapterCell, AdapterStudy
from wellposed.studies.folders import read_result
from wellposed.studies.side_by_side import run_side_by_side
from wellposed.training.finetuning.config import FinetuneConfig, LanguageConfig
from wellposed.training.finetuning.models import unpack
from wellposed.training.finetuning.vision_config import VisionConfig
from wellposed.training.settings import RUN_CONFIG

_METRICS = {"cola": "matthews", "mrpc": "f1"}
"""The score that GLUE has for a set; accuracy for all others."""
_NO_SCORES = {"event", "step", "epoch", "seconds", "time"}


@dataclass(frozen=True)
class AdapterOutcome:
    """How a run ended: its scores on every test set, or why there are none."""

    cell: AdapterCell
    seconds: float
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of each test set, under the names that finetune gives them."""
    parameters: int = 0
    """That were trained."""
    stable_rank: float | None = None
    """Of the update, the mean over layers; None where all weights were trained."""
    argument_std: float | None = None
    """std(omega B A) of a sine adapter, the mean over layers."""
    complaint: str = ""

    @property
    def points(self) -> dict[str, float]:
        """The score of each test set that counts, times 100."""
        return {name: 100 * found[metric_of(name, found)] for name, found in self.scores.items()}

    @property
    def loss(self) -> float:
        """The mean over test sets."""
        return mean(found["loss"] for found in self.scores.values())

    def __str__(self) -> str:
        return self.complaint or ", ".join(f"{name} {value:.1f}" for name, value in self.points.items())


def metric_of(name: str, scores: dict[str, float]) -> str:
    """Which of the scores of a test set counts."""
    wanted = (_METRICS.get(name.lower(), "accuracy"), "accuracy", "written_accuracy")
    return next(metric for metric in wanted if metric in scores)


def tried_out(config: AdapterStudy) -> AdapterStudy:
    """`config` with what follows from its data, which are read for that and must have something to test on."""
    if config.modality == "vision":
        for each in config.data:
            open_data(each, "test")
        return replace(config, together=False)
    together = config.together
    if together is None:
        together = len(config.data) == 1 or not open_language(config.data, config.test, config.limit).classes
    config = replace(config, together=together)
    config.check()
    run = config.run(next(config.cells()))
    assert isinstance(run, LanguageConfig)
    for group in [config.data] if together else [(each,) for each in config.data]:
        data = open_language(group, config.test, config.limit, run.answers)
        if not data.tests:
            raise DataError(f"{data.name} has nothing to test on: expected folders with a test or dev file, or --test")
        for name, records in data.tests.items():
            if not (run.generate or data.classes or all(getattr(record, "choices", ()) for record in records)):
                raise InvalidArgumentError(
                    f"{name} has no choices to tell apart: expected --settings generate 100, to have answers written"
                )
    return config


def run_adapters(config: AdapterStudy) -> list[AdapterOutcome]:
    """Every run of the study, those that are done already as they are; a run that diverges is an outcome too."""
    runs = {cell: config.run(cell) for cell in config.cells()}
    if config.unpacked is not None and not config.unpacked.exists():
        unpack(LanguageConfig(model=config.model, data=config.data), config.unpacked)
    preload = ["wellposed.studies.adapter_running", "wellposed.adapters"]
    return list(run_side_by_side(runs, run_adapter, _finished, jobs=config.jobs, preload=preload).values())


def run_adapter(config: FinetuneConfig, cell: AdapterCell) -> AdapterOutcome:
    """Fine-tune one cell, or go on with it."""
    if (config.folder / RUN_CONFIG).exists():
        config = replace(config, resume=True)
    try:
        _finetune(config)(config, quiet=True)
    except DivergedError as error:
        return AdapterOutcome(cell, 0.0, complaint=str(error).partition(". ")[0])
    outcome = _finished(config, cell)
    assert outcome is not None
    return outcome


def _finetune(config: FinetuneConfig) -> Callable[..., Any]:
    if isinstance(config, VisionConfig):
        from wellposed.training.finetuning.vision import finetune_vision

        return finetune_vision
    from wellposed.training.finetuning.language import finetune_language

    return finetune_language


def _finished(config: FinetuneConfig, cell: AdapterCell) -> AdapterOutcome | None:
    ended = read_result(config, "seconds", "trained_parameters", "loss")
    if ended is None:
        return None
    tested = {name: value for name, value in read_journal(config.folder, "test")[-1].items() if name not in _NO_SCORES}
    scores = by_set(tested, cell.task or config.sets)
    return AdapterOutcome(
        *(cell, ended["seconds"], scores, ended["trained_parameters"]),
        stable_rank=ended.get("mean_stable_rank"),
        argument_std=ended.get("mean_argument_std"),
    )


def by_set(tested: dict[str, float], alone: str) -> dict[str, dict[str, float]]:
    """The scores of each test set, from what finetune calls SET/SCORE, or SCORE where there is one set, `alone`."""
    scores: dict[str, dict[str, float]] = {}
    for name, value in tested.items():
        test, _, metric = name.rpartition("/")
        scores.setdefault(test, {})[metric] = value
    means = scores.pop("", {})  # of one set, or the means of those that have names
    return scores or {alone: means}
