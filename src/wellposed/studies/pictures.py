"""The pictures of the study, from what its runs wrote and the models they left."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from wellposed.data import Dataset, open_data
from wellposed.families import blocks
from wellposed.recipes import load
from wellposed.reporting import Line, Section, heat_panel, image_panel, line_panel, save_lines
from wellposed.runs import read_journal
from wellposed.studies.config import KINDS, NAMES, OPTIMIZERS, Cell, StudyConfig
from wellposed.studies.running import probed_images
from wellposed.training.models import build_model, fitted_to_data

if TYPE_CHECKING:
    from wellposed.studies.skips import StudyResult

COLOURS = {"skip": "#4477aa", "skipless": "#ee6677", "conditioned": "#228833"}
TITLES = {"adamw": "AdamW", "soap": "SOAP"}
SAMPLES = 3

Cells = dict[tuple[str, str], Cell]


def sections(config: StudyConfig, result: "StudyResult") -> list[Section]:
    """What the page shows, in the order in which it explains itself."""
    run = config.run(Cell("skip", "soap", config.seed))
    train, test = (open_data(run.data, split, run.image_size) for split in ("train", "test"))
    images, _ = probed_images(train, test)
    cells: Cells = {(cell.kind, cell.optimizer): cell for cell in config.cells() if cell.seed == config.seed}
    finished = {(o.cell.kind, o.cell.optimizer) for o in result.outcomes if o.accuracy is not None}
    return [
        _table(config, result),
        _curves(config),
        _at_initialization(config, cells),
        _over_training(config, cells),
        _weights_and_attention(config, train, images),
        _attention_on_images(config, {key: cell for key, cell in cells.items() if key in finished}, test, images),
    ]


def _table(config: StudyConfig, result: "StudyResult") -> Section:
    rows = []
    for kind, (name, *accuracies) in zip(KINDS, result.rows(), strict=True):
        rates = [f"{config.learning_rate(Cell(kind, optimizer, 0)):g}" for optimizer in OPTIMIZERS]
        rows.append((name, *(cell for pair in zip(accuracies, rates, strict=True) for cell in pair)))
    return Section(
        "Test accuracy, in percent",
        f"After {config.epochs} epochs, each optimizer at a learning rate that suits it.",
        columns=("", *(heading for optimizer in OPTIMIZERS for heading in (TITLES[optimizer], "at rate"))),
        rows=rows,
    )


def save_accuracies(config: StudyConfig, path: Path) -> None:
    """The result in one picture: test accuracy over the epochs, a panel per optimizer."""
    panels = [(TITLES[optimizer], _lines(config, optimizer, "test", "accuracy")) for optimizer in OPTIMIZERS]
    save_lines(path, panels, x="epoch", y="test accuracy")


def _curves(config: StudyConfig) -> Section:
    panels = [
        line_panel(f"{TITLES[o]}: {title}", _lines(config, o, event, name), x="epoch", y=title)
        for event, name, title in (("train", "loss", "training loss"), ("test", "accuracy", "test accuracy"))
        for o in OPTIMIZERS
    ]
    return Section(
        "Learning",
        "The loss on the training set, and how many test images are told right after each epoch. A curve that stays "
        "flat is a network that cannot tell its images apart, so that no gradient says which way to go.",
        panels,
        across=4,
    )


def _at_initialization(config: StudyConfig, cells: Cells) -> Section:
    measures = (
        ("token_condition", "condition number of the tokens", True),
        ("token_cosine", "mean cosine between tokens", False),
        ("attention_diagonal", "attention of a token to itself", False),
        ("gradient_norm", "norm of the gradient", True),
    )
    panels = []
    for name, title, log in measures:
        lines = []
        for kind in KINDS:
            values = [block[name] for block in _events(config, cells[kind, "adamw"], "observe")[0]["blocks"]]
            lines.append(Line(NAMES[kind], range(1, len(values) + 1), values, COLOURS[kind]))
        panels.append(line_panel(f"{title}, at the start", lines, x="block", y=title, log=log))
    return Section(
        "Why: every block before the first step",
        "Each block mixes the tokens of an image. Where their cosine reaches 1 all tokens have become the same and "
        "nothing can be told from them: their matrix is singular, its condition number as large as rounding allows. "
        "The conditioned weights make attention look at the token itself, which slows this collapse.",
        panels,
        across=4,
    )


def _over_training(config: StudyConfig, cells: Cells) -> Section:
    panels = []
    for optimizer in OPTIMIZERS:
        for kind in KINDS:
            events = _events(config, cells[kind, optimizer], "observe")
            table = [[math.log10(block["token_condition"]) for block in event["blocks"]] for event in events]
            transposed = [list(column) for column in zip(*table, strict=True)]
            title = f"{TITLES[optimizer]}, {NAMES[kind]}"
            panels.append(
                heat_panel(title, transposed, x="epoch", y="block", low=1, high=7, label="log10 condition", first_row=1)
            )
    return Section(
        "The condition number of the tokens over training",
        "One row per block, the first on top; time goes to the right, beginning before the first step. Dark is well "
        "conditioned. A block that stays bright passes on tokens that are nearly all the same.",
        panels,
    )


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
        weights = blocks(model)[0].family.weights(blocks(model)[0].module)
        h = weights.head_dim
        product = weights.query.view()[:h].T @ weights.key.view()[:h]
        limit = float(product.abs().max())
        attention = _attention(model, images[:1])[0][0, 0]
        most = float(attention.max())
        told.append(f"{name}: {float(attention.diagonal().mean()):.2f}")
        products.append(heat_panel(f"{name}: W_Q W_K^T", product.numpy(), low=-limit, high=limit, x="width", y="width"))
        maps.append(heat_panel(f"{name}: attention", attention.numpy(), low=0, high=most, x="key", y="query"))
    return Section(
        "The matrices behind it",
        "The first head of the first block at initialization, and its attention on the first test image. By default "
        "W_Q W_K^T is small noise and attention nearly uniform, so that every token becomes the mean of all. The "
        f"conditioned W_Q W_K^T is the best approximation of rank {h} to alpha Z + beta I, with Z Gaussian; the "
        "second is the one trained here, the third that of Figure 5 in the paper, where the diagonal is plain to see. "
        f"The mean attention of a token to itself: {'; '.join(told)}.",
        [*products, *maps],
    )


def _attention_on_images(config: StudyConfig, cells: Cells, test: Dataset, images: Tensor) -> Section:
    shown = [kind for kind in KINDS if (kind, "soap") in cells]
    models = {kind: load(config.run(cells[kind, "soap"]).folder) for kind in shown}
    panels = []
    for index in range(SAMPLES):
        picture = test[index][0]
        panels.append(image_panel(f"image {index + 1}", picture.permute(1, 2, 0).squeeze(-1).numpy()))
        for kind in shown:
            maps = _attention(models[kind], images[index : index + 1])
            for which, attention in (("first", maps[0]), ("last", maps[-1])):
                received = _as_grid(attention[0].mean(0).mean(0) * attention.shape[-1])
                panels.append(image_panel(f"{kind}, {which}", received.numpy(), low=0.0, high=3.0))
    return Section(
        "Where the trained models look",
        "For three test images, how much attention each patch receives from all others, in the first and the last "
        "block of the models trained with SOAP, the mean over heads. The colours go from 0 to 3 times the attention "
        "that each patch would get if all got the same.",
        panels,
        across=1 + 2 * len(shown),
        strip=True,
    )


def _lines(config: StudyConfig, optimizer: Literal["adamw", "soap"], event: str, name: str) -> list[Line]:
    """How a number went with each kind of model, in the runs with the first seed."""
    lines = []
    for kind in KINDS:
        events = _events(config, Cell(kind, optimizer, config.seed), event)
        lines.append(Line(NAMES[kind], [e["epoch"] for e in events], [e[name] for e in events], COLOURS[kind]))
    return lines


def _events(config: StudyConfig, cell: Cell, event: str) -> list[dict[str, Any]]:
    return read_journal(config.run(cell).folder, event)


def _initial_model(config: StudyConfig, kind: str, data: Dataset) -> nn.Module:
    """The model of a kind as its run with the first seed starts."""
    run = config.run(Cell(kind, "adamw", config.seed))
    with torch.random.fork_rng([]):
        torch.manual_seed(run.seed)
        return build_model(fitted_to_data(run, data), data).eval()


@torch.no_grad()
def _attention(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The attention matrices (B, heads, N, N) of every block."""
    found: list[Tensor] = []
    handles = []
    for block in blocks(model):
        assert block.family.attention is not None
        name, matrices = block.family.attention

        def look(layer: nn.Module, arguments: Any, matrices: Any = matrices) -> None:
            found.append(matrices(layer, arguments[0]))

        handles.append(block.module.get_submodule(name).register_forward_pre_hook(look))
    model(images)
    for handle in handles:
        handle.remove()
    return found


def _as_grid(weights_N: Tensor) -> Tensor:
    """The weights of the patches, without those of class tokens before them, as they lie in the image."""
    side = math.isqrt(len(weights_N))
    return weights_N[len(weights_N) - side**2 :].reshape(side, side)
