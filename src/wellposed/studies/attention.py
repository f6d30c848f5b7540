"""The pictures of attention in a study: the matrices it starts from, and where the trained models look."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.data import Dataset
from wellposed.diagnosis import attention_seen
from wellposed.families import blocks
from wellposed.recipes import load
from wellposed.reporting import Section, heat_panel, image_panel
from wellposed.studies.config import Cell, StudyConfig
from wellposed.studies.words import TITLES
from wellposed.training.models import build_model, fitted_to_data

SAMPLES = 3


def weights_and_attention(config: StudyConfig, train: Dataset, images: Tensor) -> Section:
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


def attention_on_images(config: StudyConfig, finished: set[Cell], test: Dataset, images: Tensor) -> Section:
    """Where the models look that the last of the optimizers has trained with the first seed."""
    optimizer = config.optimizers[-1]
    cells = {kind.key: Cell(kind.key, optimizer, config.seed) for kind in config.compared}
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
        f"last block of the models trained with {TITLES[optimizer]}, the mean over heads. The colours go from 0 to 3 "
        "times what each would get if all got the same; one plain colour is uniform attention.",
        panels,
        across=1 + 2 * len(models),
        strip=True,
    )


def softmax_bound(config: StudyConfig, train: Dataset, images: Tensor) -> float:
    """The largest Frobenius norm that softmax attention over the tokens of an image can have, sqrt(N)."""
    model = _initial_model(config, config.compared[0].key, train)
    return float(_attention(model, images[:1])[0].shape[-1] ** 0.5)


def _initial_model(config: StudyConfig, kind: str, data: Dataset) -> nn.Module:
    """The model of a kind as its run with the first seed starts."""
    run = config.run(Cell(kind, config.optimizers[0], config.seed))
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
