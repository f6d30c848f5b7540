"""What low rank costs and what a sine gives back: parameters, accuracy and the stable rank of the MLPs' matrices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wellposed.recipes import load
from wellposed.reporting import Curves, Line, Section
from wellposed.spectrum import stable_rank
from wellposed.studies.ablations import BLUE, GREEN, RED
from wellposed.studies.config import StudyConfig
from wellposed.studies.folders import read_result
from wellposed.studies.words import TITLES
from wellposed.training.models import mlp_layers

if TYPE_CHECKING:
    from wellposed.studies.comparison import StudyResult

COLUMNS = ("MLPs", "parameters", "of full", "test accuracy, %", "test loss", "stable rank of the MLPs", "seconds")
_LINES = {"full": ("full rank", GREEN, "-"), "plain": ("low rank", BLUE, "--"), "sine": ("sine of low rank", RED, "-")}


@dataclass(frozen=True)
class Trained:
    """A kind of model under one optimizer, a number per seed in each list; runs that diverged are not in them."""

    kind: str
    name: str
    optimizer: str
    parameters: int
    accuracies: Sequence[float]
    losses: Sequence[float]
    seconds: Sequence[float]
    stable_ranks: Sequence[float]
    """Mean over the matrices of the MLPs."""


def mean_stable_rank(model: nn.Module) -> float:
    """Of the matrices of its MLPs as they act, each formed for the moment."""
    layers: list[Any] = [model.get_submodule(name) for name in mlp_layers(model)]
    with torch.no_grad():
        return mean(float(stable_rank(layer.weight)) for layer in layers)


def trained_models(config: StudyConfig, result: "StudyResult") -> list[Trained]:
    """Every kind of model that at least one run has trained to its end, in the order of the table."""
    found = []
    for optimizer in config.optimizers:
        for kind in config.compared:
            cells = [
                outcome.cell
                for outcome in result.outcomes
                if (outcome.cell.kind, outcome.cell.optimizer) == (kind.key, optimizer) and outcome.accuracy is not None
            ]
            ended = [read for cell in cells if (read := read_result(config.run(cell), "loss", "seconds"))]
            models = [load(config.run(cell).folder) for cell in cells]
            if models:
                found.append(
                    Trained(
                        *(kind.key, kind.name, optimizer, sum(each.numel() for each in models[0].parameters())),
                        accuracies=result.accuracies(kind.key, optimizer),
                        losses=[each["loss"] for each in ended],
                        seconds=[each["seconds"] for each in ended],
                        stable_ranks=[mean_stable_rank(model) for model in models],
                    )
                )
    return found


def rank_rows(models: Sequence[Trained]) -> list[tuple[str, ...]]:
    """The rows under COLUMNS; the optimizer is named where there are several."""
    whole = next((each.parameters for each in models if each.kind == "full"), None)
    several = len({each.optimizer for each in models}) > 1
    return [
        (
            each.name + (f", {TITLES[each.optimizer]}" if several else ""),
            f"{each.parameters:,}",
            "" if whole is None else f"{each.parameters / whole:.1%}",
            spread([100 * value for value in each.accuracies], ".1f"),
            spread(each.losses, ".3f"),
            spread(each.stable_ranks, ".1f"),
            f"{mean(each.seconds):.0f}",
        )
        for each in models
    ]


def spread(values: Sequence[float], form: str) -> str:
    """The mean and, of several, the least and the largest.

    Example:
        >>> spread([1.0, 2.0], ".1f"), spread([3.0], ".1f")
        ('1.5 (1.0 to 2.0)', '3.0')
    """
    ends = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{mean(values):{form}}{ends}"


def rank_curves(models: Sequence[Trained]) -> list[Curves]:
    """Accuracy, and stable rank, against the number of parameters: two panels per optimizer."""
    panels = []
    for optimizer in dict.fromkeys(each.optimizer for each in models):
        own = sorted((each for each in models if each.optimizer == optimizer), key=lambda each: each.parameters)
        for title, values in (("test accuracy, %", _percent), ("stable rank of the MLPs", _ranks)):
            heading = f"{TITLES[optimizer]}: {title}"
            panels.append(
                Curves(heading, _lines(own, values), "parameters", title, log=values is _ranks, log_x=True, whole=False)
            )
    return panels


def _lines(models: Sequence[Trained], values: Callable[[Trained], list[float]]) -> list[Line]:
    lines = []
    for group, (name, colour, style) in _LINES.items():
        own = [each for each in models if each.kind.partition("-")[0] == group]
        if own:
            ends = [[pick(values(each)) for each in own] for pick in (mean, min, max)]
            lines.append(Line(name, [each.parameters for each in own], ends[0], colour, style, ends[1], ends[2]))
    return lines


def _percent(model: Trained) -> list[float]:
    return [100 * value for value in model.accuracies]


def _ranks(model: Trained) -> list[float]:
    return list(model.stable_ranks)


def ranks_section(models: Sequence[Trained]) -> Section:
    """The table and the pictures of the page."""
    return Section(
        "What rank costs, and what the sine gives back",
        "The stable rank ||W||_F^2 / ||W||_2^2 is that of W as it acts, U V^T or sin(omega U V^T) / g, the mean over "
        "the matrices of all MLPs after training. Attention, norms and embeddings are the same in all. Bars go from "
        "the least to the largest of the seeds. The seconds are those of training and testing, with other runs beside.",
        [curves.svg() for curves in rank_curves(models)],
        columns=COLUMNS,
        rows=rank_rows(models),
        across=2,
    )
