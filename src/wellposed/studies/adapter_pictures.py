"""The pictures of a study of adapters."""

from collections.abc import Callable, Sequence
from statistics import mean
from typing import TYPE_CHECKING

from wellposed.reporting import Curves, Line, Section, line_panel
from wellposed.runs import read_journal
from wellposed.studies.adapter_result import NAMES, Trained

if TYPE_CHECKING:
    from wellposed.studies.adapter_result import AdapterResult

LOOKS = {
    "full": ("#888888", "-"),
    "lora": ("#4477aa", "-"),
    "rslora": ("#66ccee", "-"),
    "dora": ("#228833", "-"),
    "sine": ("#ee6677", "-"),
    "sine-dora": ("#aa3377", "-"),
    "lora-control": ("#ccbb44", "--"),
}
"""Colour and style of each method's lines."""


def against_parameters(models: Sequence[Trained]) -> list[Curves]:
    """The mean score, and the stable rank of the updates, against the number of trained parameters."""
    score = Curves("score", _lines(models, lambda each: each.means), "trained parameters", "", log_x=True)
    rank = _lines(models, lambda each: each.stable_ranks)
    shown = Curves("stable rank of the updates", rank, "trained parameters", "", log=True, log_x=True)
    return [score, shown] if rank else [score]


def sections(result: "AdapterResult") -> list[Section]:
    """What the page shows."""
    models, tests = result.trained(), list(result.tests)
    panels = against_parameters(models)
    for name in tests if len(tests) > 1 else ():
        lines = _lines(models, lambda each: each.points.get(name, []))  # noqa: B023  called at once
        panels.append(Curves(name, lines, "trained parameters", "", log_x=True))
    return [
        Section(
            "Scores",
            "After the last epoch; the mean over seeds and, in brackets, from the least to the largest. GLUE's own "
            "score where it has one, times 100, else the accuracy in percent. The stable rank ||D||_F^2 / ||D||_2^2 of "
            "the learned updates D, before DoRA's norms, and std(omega B A) are means over layers: below 1, a sine "
            "adapter is all but LoRA with its alpha times omega / g. The seconds are those of training and testing, "
            "with other runs beside.",
            columns=result.columns(),
            rows=result.rows(),
        ),
        Section(
            "Against the parameters that are trained",
            "Each point is a rank; bars go from the least to the largest of the seeds.",
            [curves.svg() for curves in panels],
            across=2,
        ),
        _learning(result),
    ]


def _learning(result: "AdapterResult") -> Section:
    """The training loss of the runs with the first seed, a panel per rank and set."""
    config, panels = result.config, []
    cells = [cell for cell in config.cells() if cell.seed == config.seed]
    for task in dict.fromkeys(cell.task for cell in cells):
        for rank in config.ranks:
            own = [cell for cell in cells if cell.task == task and cell.rank in {0, rank}]
            lines = []
            for cell in own:
                events = read_journal(config.run(cell).folder, "train")
                x, y = ([event[name] for event in events] for name in ("epoch", "loss"))
                lines.append(Line(NAMES[cell.method], x, y, *LOOKS[cell.method]))
            title = f"{task + ', ' if task else ''}rank {rank}: training loss"
            panels.append(line_panel(title, lines, x="epoch", y="training loss"))
    return Section("Learning", f"The loss on the training set, with seed {config.seed}.", panels, across=2)


def _lines(models: Sequence[Trained], values: Callable[[Trained], Sequence[float]]) -> list[Line]:
    lines = []
    for method, name in NAMES.items():
        own = sorted(
            (each for each in models if each.method == method and values(each)), key=lambda each: each.parameters
        )
        if own:
            ends = [[pick(values(each)) for each in own] for pick in (mean, min, max)]
            x = [each.parameters for each in own]
            lines.append(Line(name, x, ends[0], *LOOKS[method], low=ends[1], high=ends[2]))
    return lines
