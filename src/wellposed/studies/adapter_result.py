"""What a study of adapters found: each method at each rank over the seeds, and the table of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from wellposed.studies.adapter_config import AdapterStudy
from wellposed.studies.adapter_running import AdapterOutcome, metric_of
from wellposed.studies.low_rank import spread

NAMES = {
    "full": "all weights",
    "lora": "LoRA",
    "rslora": "rsLoRA",
    "dora": "DoRA",
    "sine": "SineLoRA",
    "sine-dora": "SineDoRA",
    "lora-control": "LoRA, alpha x omega/g",
}


@dataclass(frozen=True)
class Trained:
    """One method at one rank: what its runs that did not diverge came to, a number per seed in each list."""

    method: str
    rank: int
    points: dict[str, list[float]]
    """The score of each test set that counts, times 100."""
    losses: list[float]
    """On the test sets, the mean over them."""
    seconds: list[float]
    """Of training and testing, over all sets."""
    parameters: int
    stable_ranks: list[float]
    argument_stds: list[float]
    lost: int
    """Seeds of which a run diverged."""

    @property
    def name(self) -> str:
        """As in tables and legends."""
        return NAMES[self.method]

    @property
    def means(self) -> list[float]:
        """Over the test sets, one per seed."""
        return [mean(values) for values in zip(*self.points.values(), strict=True)]


@dataclass(frozen=True)
class AdapterResult:
    """What a study of adapters found, and its page."""

    config: AdapterStudy
    outcomes: tuple[AdapterOutcome, ...]
    report: Path
    facts: dict[str, str]

    @property
    def tests(self) -> dict[str, str]:
        """The test sets, and the score of each that counts."""
        return {name: metric_of(name, found) for each in self.outcomes for name, found in each.scores.items()}

    def trained(self) -> list[Trained]:
        """Every method at every rank, rank by rank."""
        keys = dict.fromkeys((each.cell.rank, each.cell.method) for each in self.outcomes)
        return [self._trained(rank, method) for rank, method in keys]

    def _trained(self, rank: int, method: str) -> Trained:
        own = [each for each in self.outcomes if (each.cell.rank, each.cell.method) == (rank, method)]
        lost = {each.cell.seed for each in own if each.complaint}
        seeds = [seed for seed in dict.fromkeys(each.cell.seed for each in own) if seed not in lost]
        of_seed = [[each for each in own if each.cell.seed == seed] for seed in seeds]

        def of_each(number: Callable[[AdapterOutcome], float | None]) -> list[float]:
            read = [[found for each in runs if (found := number(each)) is not None] for runs in of_seed]
            return [mean(values) for values in read if values]

        points = [{name: value for each in runs for name, value in each.points.items()} for runs in of_seed]
        return Trained(
            *(method, rank, {name: [found[name] for found in points] for name in (points[0] if points else ())}),
            losses=of_each(lambda each: each.loss),
            seconds=[sum(each.seconds for each in runs) for runs in of_seed],
            parameters=max((each.parameters for each in own), default=0),
            stable_ranks=of_each(lambda each: each.stable_rank),
            argument_stds=of_each(lambda each: each.argument_std),
            lost=len(lost),
        )

    def columns(self) -> tuple[str, ...]:
        """The headings of the table."""
        shown = {"accuracy": "", "written_accuracy": " (written)", "matthews": " (Matthews)", "f1": " (F1)"}
        scores = [f"{name}{shown.get(metric, f' ({metric})')}" for name, metric in self.tests.items()]
        means = ("mean",) if len(scores) > 1 else ()
        return ("method", "r", "trained", *scores, *means, "test loss", "stable rank", "std(omega B A)", "seconds")

    def rows(self, *, brief: bool = False) -> list[tuple[str, ...]]:
        """A row per method and rank: means over seeds and, unless `brief`, from the least to the largest."""
        return [self._row(each, _mean if brief else spread) for each in self.trained()]

    def _row(self, each: Trained, shown: Callable[[Sequence[float], str], str]) -> tuple[str, ...]:
        if not each.points:
            cells = (each.name, _rank(each), "", *["diverged"] * len(self.tests))
            return cells + ("",) * (len(self.columns()) - len(cells))
        scores = [*(each.points[name] for name in self.tests), *([each.means] if len(self.tests) > 1 else [])]
        return (
            each.name + (f" ({each.lost} diverged)" if each.lost else ""),
            _rank(each),
            f"{each.parameters:,}",
            *(shown(values, ".1f") for values in scores),
            shown(each.losses, ".3f"),
            _mean(each.stable_ranks, ".1f"),
            _mean(each.argument_stds, ".2f"),
            f"{mean(each.seconds):.0f}",
        )


def _rank(each: Trained) -> str:
    return str(each.rank) if each.rank else ""


def _mean(values: Sequence[float], form: str) -> str:
    return f"{mean(values):{form}}" if values else ""
