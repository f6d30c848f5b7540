"""The pictures of the study, from what its runs wrote and the models they left."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from wellposed.data import Dataset, open_data, sampled_images
from wellposed.diagnosis import attention_seen
from wellposed.families import blocks
from wellposed.recipes import load
from wellposed.reporting import Curves, Line, Section, curves_figure, heat_panel, image_panel, line_panel
from wellposed.runs import read_journal
from wellposed.studies.config import KINDS, NAMES, OPTIMIZERS, Cell, StudyConfig
from wellposed.studies.running import PROBED_IMAGES
from wellposed.training.models import build_model, fitted_to_data

if TYPE_CHECKING:
    from wellposed.studies.skips import StudyResult

STYLES = {"skip": "-", "skipless": "--", "conditioned": "-"}
COLOURS = {"skip": "#4477aa", "skipless": "#ee6677", "conditioned": "#228833"}
TITLES = {"adamw": "AdamW", "soap": "SOAP"}
SAMPLES = 3

MEASURES = (
    ("token_condition", "condition number of the tokens", True),
    ("token_cosine", "mean cosine between tokens", False),
    ("attention_diagonal", "attention of a token to itself", False),
    ("image_difference", "difference between images", True),
    ("gradient_norm", "norm of the gradient", True),
)
"""What the runs record of every block: the name, what it is, and whether it spans orders of magnitude."""


def sections(config: StudyConfig, result: "StudyResult") -> list[Section]:
    """What the page shows, in the order in which it explains itself."""
    run = config.run(Cell("skip", "soap", config.seed))
    train, test = (open_data(run.data, split, run.image_size) for split in ("train", "test"))
    images, _ = sampled_images(train, test, PROBED_IMAGES)
    finished = {outcome.cell for outcome in result.outcomes if outcome.accuracy is not None}
    return [
        _table(config, result),
        _curves(config),
        _at_initialization(config),
        *_over_training(config),
        _weights_and_attention(config, train, images),
        _attention_on_images(config, finished, test, images),
    ]


def _table(config: StudyConfig, result: "StudyResult") -> Section:
    rows = []
    for kind, (name, *accuracies) in zip(KINDS, result.rows(), strict=True):
        rates = [f"{config.learning_rate(Cell(kind, optimizer, 0)):g}" for optimizer in OPTIMIZERS]
        rows.append((name, *(cell for pair in zip(accuracies, rates, strict=True) for cell in pair)))
    first = f" Every picture below shows the runs with seed {config.seed}." if config.seeds > 1 else ""
    return Section(
        "Test accuracy, in percent",
        f"After epoch {config.epochs}, with the learning rate of each cell beside it.{first}",
        columns=("", *(heading for optimizer in OPTIMIZERS for heading in (TITLES[optimizer], "at rate"))),
        rows=rows,
    )


def save_accuracies(config: StudyConfig, path: Path) -> None:
    """The result in one picture: test accuracy over the epochs, a panel per optimizer."""
    panels = [
        Curves(TITLES[optimizer], _lines(config, optimizer, "test", "accuracy"), "epoch", "test accuracy")
        for optimizer in OPTIMIZERS
    ]
    curves_figure(panels, across=len(panels), share_y=True, path=path)


def _curves(config: StudyConfig) -> Section:
    panels = [
        line_panel(f"{TITLES[o]}: {title}", _lines(config, o, event, name), x="epoch", y=title)
        for event, name, title in (("train", "loss", "training loss"), ("test", "accuracy", "test accuracy"))
        for o in OPTIMIZERS
    ]
    return Section(
        "Learning",
        "The loss on the training set, and the share of test images that are told right after each epoch.",
        panels,
        across=2,
    )


def _at_initialization(config: StudyConfig) -> Section:
    recorded = {kind: _events(config, kind, "adamw", "observe")[0]["blocks"] for kind in KINDS}
    panels = []
    for name, title, log in MEASURES:
        lines = [
            _line(kind, range(1, len(states) + 1), [state[name] for state in states])
            for kind, states in recorded.items()
        ]
        panels.append(line_panel(f"{title}, at the start", lines, x="block", y=title, log=log))
    return Section(
        "Every block before the first step",
        "A block turns the tokens of an image, a matrix with a row per token, into others. Where the cosine between "
        "tokens is 1 they have all become the same, and their matrix is singular: its condition number is as large "
        "as rounding lets it be. Attention that looks at the token itself more than uniform attention does slows "
        "this down. The gradient is that of the loss with respect to the weights of a block.",
        panels,
        across=2,
    )


def _over_training(config: StudyConfig) -> list[Section]:
    maps, curves = [], []
    for optimizer in OPTIMIZERS:
        events = {kind: _events(config, kind, optimizer, "observe") for kind in KINDS}
        for kind in KINDS:
            table = [[math.log10(state["token_condition"]) for state in event["blocks"]] for event in events[kind]]
            transposed = [list(column) for column in zip(*table, strict=True)]
            title = f"{TITLES[optimizer]}, {NAMES[kind]}"
            maps.append(
                heat_panel(title, transposed, x="epoch", y="block", low=1, high=7, label="log10 condition", first_row=1)
            )
        for name, block, title in (
            ("gradient_norm", 0, "gradient of the first block"),
            ("image_difference", -1, "difference between images, last block"),
        ):
            lines = [
                _line(kind, [e["epoch"] for e in seen], [max(e["blocks"][block][name], 1e-16) for e in seen])
                for kind, seen in events.items()
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
        ),
    ]


def _weights_and_attention(config: StudyConfig, train: Dataset, images: Tensor) -> Section:
    """Figure 5 of the paper: W_Q W_K^T of one head, and the attention it gives on an image."""
    products, maps, told = [], [], []
    shown = (
        ("default", config, "skipless"),
        (f"alpha {config.alpha:g}, beta {config.beta:g}", config, "conditioned"),
        ("alpha 0.1, beta 5", replace(config, alpha=0.1, beta=5.0), "conditioned"),
    )
    for name, settings, kind in shown:
        model = _initial_model(settings, kind, train)
        product = _first_product(model)
        limit = float(product.abs().max())
        attention = _attention(model, images[:1])[0][0, 0]
        most = float(attention.max())
        told.append(f"{name}: {float(attention.diagonal().mean()):.2f}")
        products.append(heat_panel(f"{name}: W_Q W_K^T", product.numpy(), low=-limit, high=limit, x="width", y="width"))
        maps.append(heat_panel(f"{name}: attention", attention.numpy(), low=0, high=most, x="key", y="query"))
    return Section(
        "The matrices behind it",
        "The first head of the first block at initialization, and its attention on one test image. The default W_Q "
        "W_K^T is noise; the conditioned one is the best approximation of the head's rank to alpha Z + beta I, with Z "
        "Gaussian. The second is the one trained here, the third that of Figure 5 in the paper (Cutting the Skip, "
        "arXiv 2510.00345), where the diagonal is plain to see. The mean attention of a token to itself: "
        f"{'; '.join(told)}. Uniform attention would give {1 / len(attention):.2f}.",
        [*products, *maps],
    )


def _attention_on_images(config: StudyConfig, finished: set[Cell], test: Dataset, images: Tensor) -> Section:
    cells = {kind: Cell(kind, "soap", config.seed) for kind in KINDS}
    models = {kind: load(config.run(cell).folder) for kind, cell in cells.items() if cell in finished}
    panels = []
    chosen = torch.linspace(0, len(test) - 1, len(images)).long().tolist()
    for index in range(min(SAMPLES, len(images))):
        picture = test[chosen[index]][0]
        panels.append(image_panel(f"image {index + 1}", picture.permute(1, 2, 0).squeeze(-1).numpy()))
        for kind, model in models.items():
            maps = _attention(model, images[index : index + 1])
            for which, attention in (("first", maps[0]), ("last", maps[-1])):
                received = _as_grid(attention[0].mean(0).mean(0) * attention.shape[-1], model)
                panels.append(image_panel(f"{kind}, {which}", received.numpy(), low=0.0, high=3.0))
    return Section(
        "Where the trained models look",
        "Test images, and how much attention each of their patches receives from all tokens, in the first and the "
        "last block of the models trained with SOAP, the mean over heads. The colours go from 0 to 3 times what each "
        "would get if all got the same; one plain colour is uniform attention.",
        panels,
        across=1 + 2 * len(models),
        strip=True,
    )


def _lines(config: StudyConfig, optimizer: Literal["adamw", "soap"], event: str, name: str) -> list[Line]:
    """How a number went with each kind of model, in the runs with the first seed."""
    seen = {kind: _events(config, kind, optimizer, event) for kind in KINDS}
    return [_line(kind, [e["epoch"] for e in events], [e[name] for e in events]) for kind, events in seen.items()]


def _line(kind: str, x: Sequence[float], y: Sequence[float]) -> Line:
    return Line(NAMES[kind], x, y, COLOURS[kind], STYLES[kind])


def _events(config: StudyConfig, kind: str, optimizer: Literal["adamw", "soap"], event: str) -> list[dict[str, Any]]:
    """What the run with the first seed wrote."""
    return read_journal(config.run(Cell(kind, optimizer, config.seed)).folder, event)


def _initial_model(config: StudyConfig, kind: str, data: Dataset) -> nn.Module:
    """The model of a kind as its run with the first seed starts."""
    run = config.run(Cell(kind, "adamw", config.seed))
    with torch.random.fork_rng([]):
        torch.manual_seed(run.seed)
        return build_model(fitted_to_data(run, data), data).eval()


def _first_product(model: nn.Module) -> Tensor:
    """W_Q W_K^T of the first head of the first block, (d, d)."""
    first = blocks(model)[0]
    weights = first.family.weights(first.module)
    query, key = (matrix.view()[: weights.head_dim] for matrix in (weights.query, weights.key))
    return query.T @ key


@torch.no_grad()
def _attention(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The attention matrices (B, heads, N, N) of every block."""
    with attention_seen(model) as seen:
        model(images)
    return seen


def _as_grid(weights_N: Tensor, model: Any) -> Tensor:
    """The weights of the patches, without those of the class and register tokens before them, as the patches lie."""
    return weights_N[model.num_prefix_tokens :].reshape(model.patch_embed.grid_size)
