"""The pictures of the study, from what its runs wrote and the models they left."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wellposed.data import open_data, sampled_images
from wellposed.recipes import load
from wellposed.reporting import Curves, Line, Section, curves_figure, heat_panel, line_panel, markdown_table
from wellposed.runs import atomic_path, read_journal
from wellposed.studies.ablations import Kind
from wellposed.studies.attention import attention_on_images, softmax_bound, weights_and_attention
from wellposed.studies.config import Cell, StudyConfig
from wellposed.studies.graying import graying_of_input
from wellposed.studies.low_rank import COLUMNS, rank_curves, rank_rows, ranks_section, trained_models
from wellposed.studies.running import PROBED_IMAGES
from wellposed.studies.words import TITLES, lead

if TYPE_CHECKING:
    from wellposed.studies.comparison import StudyResult

MEASURES = (
    ("token_condition", "condition number of the tokens", True),
    ("token_cosine", "mean cosine between tokens", False),
    ("attention_diagonal", "attention of a token to itself", False),
    ("image_difference", "difference between images", True),
    ("gradient_norm", "norm of the gradient", True),
)
"""What the runs record of every block: the name, what it is, and whether it spans orders of magnitude."""
SMALLEST = 1e-16
"""Drawn for 0, and for what rounding puts below it, on a logarithmic scale."""


def sections(config: StudyConfig, result: "StudyResult") -> list[Section]:
    """What the page shows, in the order in which it explains itself."""
    shown = [_table(config, result), _curves(config), _at_initialization(config), *_over_training(config)]
    if not _has_attention(config):
        return shown
    train, test = (open_data(config.data, split, config.image_size) for split in ("train", "test"))
    images, _ = sampled_images(train, test, PROBED_IMAGES)
    if "norms" in config.described.shows:
        shown.insert(2, _norms(config, softmax_bound(config, train, images)))
    finished = {outcome.cell for outcome in result.outcomes if outcome.accuracy is not None}
    if "matrices" in config.described.shows:
        shown.append(weights_and_attention(config, train, images))
    if "graying" in config.described.shows and (plain := Cell("plain", config.optimizers[-1], config.seed)) in finished:
        shown.insert(2, graying_of_input(load(config.run(plain).folder), images))
    if "ranks" in config.described.shows and (models := trained_models(config, result)):
        shown.insert(1, ranks_section(models))
    if "attention" in config.described.shows:
        shown.append(attention_on_images(config, finished, test, images))
    return shown


def _table(config: StudyConfig, result: "StudyResult") -> Section:
    rows = []
    for kind, (name, *accuracies) in zip(config.compared, result.rows(), strict=True):
        rates = [f"{config.learning_rate(Cell(kind.key, optimizer, 0)):g}" for optimizer in config.optimizers]
        rows.append((name, *(cell for pair in zip(accuracies, rates, strict=True) for cell in pair)))
    first = (
        f" Every picture below shows the runs with seed {config.seed}." if config.seeds > 1 or config.more_seeds else ""
    )
    paper = f" {config.described.paper}" if config.described.paper else ""
    return Section(
        "Test accuracy, in percent",
        f"After epoch {config.epochs}, with the learning rate of each cell beside it.{first}{paper}",
        columns=("", *(heading for optimizer in config.optimizers for heading in (TITLES[optimizer], "at rate"))),
        rows=rows,
    )


def save_ranks(config: StudyConfig, result: "StudyResult") -> None:
    """parameters.png and table.md, where a study is about ranks."""
    models = trained_models(config, result) if "ranks" in config.described.shows else []
    if models:
        curves_figure(rank_curves(models), across=2, path=config.out / "parameters.png")
        with atomic_path(config.out / "table.md") as file:
            table = markdown_table(COLUMNS, rank_rows(models), result.facts)
            file.write_text(f"{lead(result)}\n\n{table}", encoding="utf-8")


def save_accuracies(config: StudyConfig, path: Path) -> None:
    """The result in one picture: test accuracy over the epochs, a panel per optimizer."""
    panels = [
        Curves(TITLES[optimizer], _lines(config, optimizer, "test", "accuracy"), "epoch", "test accuracy")
        for optimizer in config.optimizers
    ]
    curves_figure(panels, across=len(panels), share_y=True, path=path)


def _curves(config: StudyConfig) -> Section:
    panels = [
        line_panel(f"{TITLES[o]}: {title}", _lines(config, o, event, name), x="epoch", y=title)
        for event, name, title in (("train", "loss", "training loss"), ("test", "accuracy", "test accuracy"))
        for o in config.optimizers
    ]
    return Section(
        "Learning",
        "The loss on the training set, and the share of test images that are told right after each epoch.",
        panels,
        across=2,
    )


def _norms(config: StudyConfig, bound: float) -> Section:
    """How large attention is over training, beside the losses."""
    panels = []
    for optimizer in config.optimizers:
        losses = _lines(config, optimizer, "train", "loss")
        panels.append(line_panel(f"{TITLES[optimizer]}: training loss", losses, x="epoch", y="training loss"))
        seen = _of_each_kind(config, optimizer, "observe")
        for block, which in ((0, "first block"), (-1, "last block")):
            norms = [[max(e["blocks"][block]["attention_norm"], SMALLEST) for e in events] for _, events in seen]
            lines = [
                _line(kind, [e["epoch"] for e in events], own) for (kind, events), own in zip(seen, norms, strict=True)
            ]
            lines.append(Line("sqrt(N)", [0, config.epochs], [bound, bound], "#888888", ":"))
            title = f"{TITLES[optimizer]}: norm of attention, {which}"
            panels.append(line_panel(title, lines, x="epoch", y="Frobenius norm", log=True))
    return Section(
        "The norm of attention over training",
        "The paper's explanation of softmax is that it keeps the Frobenius norm of attention small, at most the square "
        f"root of the number N of tokens, here {bound:.1f}; 1 / sqrt(N) is to bring powers to the same order. The mean "
        "over heads and test images, in the first and the last block, beside the loss; it begins before training.",
        panels,
        across=3,
    )


def _at_initialization(config: StudyConfig) -> Section:
    seen = _of_each_kind(config, config.optimizers[0], "observe")
    recorded = [(kind, events[0]["blocks"]) for kind, events in seen]
    attentive = _has_attention(config)
    aside = "Attention that looks at the token itself more than uniform attention does slows this down."
    if not attentive:
        aside = "A block is here what its skip goes around: a ConvMixer's mixing of tokens."
    panels = []
    for name, title, log in MEASURES:
        if name == "attention_diagonal" and not attentive:
            continue
        least = SMALLEST if log else -math.inf
        lines = [
            _line(kind, range(1, len(states) + 1), [max(state[name], least) for state in states])
            for kind, states in recorded
        ]
        panels.append(line_panel(f"{title}, at the start", lines, x="block", y=title, log=log))
    return Section(
        "Every block before the first step",
        "A block turns the tokens of an image, a matrix with a row per token, into others. Where the cosine between "
        "tokens is 1 they have all become the same, and their matrix is singular: its condition number is as large "
        f"as rounding lets it be. {aside} The gradient is that of the loss with respect to the weights of a block.",
        panels,
        across=2,
    )


def _over_training(config: StudyConfig) -> list[Section]:
    maps, curves = [], []
    for optimizer in config.optimizers:
        seen = _of_each_kind(config, optimizer, "observe")
        for kind, events in seen:
            table = [[math.log10(state["token_condition"]) for state in event["blocks"]] for event in events]
            transposed = [list(column) for column in zip(*table, strict=True)]
            title = f"{TITLES[optimizer]}, {kind.name}"
            maps.append(
                heat_panel(title, transposed, x="epoch", y="block", low=1, high=7, label="log10 condition", first_row=1)
            )
        for name, block, title in (
            ("gradient_norm", 0, "gradient of the first block"),
            ("image_difference", -1, "difference between images, last block"),
        ):
            lines = [
                _line(kind, [e["epoch"] for e in events], [max(e["blocks"][block][name], SMALLEST) for e in events])
                for kind, events in seen
            ]
            curves.append(line_panel(f"{TITLES[optimizer]}: {title}", lines, x="epoch", y=title, log=True))
    return [
        Section(
            "What becomes of the signal",
            "Over training: how large a gradient reaches the first block, and how far the last block's output, the "
            "mean over tokens, differs from image to image (1 minus the cosine; 0 is no difference, and nothing left "
            "to classify by). A network whose curves fall towards 0 has stopped to learn.",
            curves,
            across=2,
        ),
        Section(
            "The condition number of the tokens over training",
            "One row per block, the first on top; time goes to the right, beginning before the first step. Dark is "
            "well conditioned; the brightest blocks give tokens that are nearly all the same. A network can learn "
            "with such blocks, as long as images still differ.",
            maps,
            across=3 if len(config.compared) % 2 else 2,
        ),
    ]


def _lines(config: StudyConfig, optimizer: Literal["adamw", "soap"], event: str, name: str) -> list[Line]:
    """How a number went with each kind of model."""
    seen = _of_each_kind(config, optimizer, event)
    return [_line(kind, [e["epoch"] for e in events], [e[name] for e in events]) for kind, events in seen]


def _line(kind: Kind, x: Sequence[float], y: Sequence[float]) -> Line:
    return Line(kind.name, x, y, kind.colour, kind.style)


def _of_each_kind(
    config: StudyConfig, optimizer: Literal["adamw", "soap"], event: str
) -> list[tuple[Kind, list[dict[str, Any]]]]:
    """What the runs with the first seed wrote."""
    runs = [(kind, config.run(Cell(kind.key, optimizer, config.seed))) for kind in config.compared]
    return [(kind, read_journal(run.folder, event)) for kind, run in runs]


def _has_attention(config: StudyConfig) -> bool:
    """Whether there is attention in the blocks of the model."""
    _, events = _of_each_kind(config, config.optimizers[0], "observe")[0]
    return all(state["attention_diagonal"] is not None for state in events[0]["blocks"])
