"""What graying does before and in the first block: Figures 7 and 8 of Always Skip Attention (arXiv 2505.01996)."""

from statistics import median

import torch
from torch import Tensor, nn

from wellposed.diagnosis import calls_seen, diagnose
from wellposed.families import blocks, embeddings
from wellposed.graying import gray_tokens, ungray_tokens
from wellposed.reporting import Curves, Line, Section
from wellposed.spectrum import jacobian_spectrum

SWEEP = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
_COLOURS = ("#8888aa", "#4477aa", "#228833", "#ccbb44", "#ee6677", "#aa3377")
_SINGULAR = 1e-7
"""Smallest singular values, over the largest, are drawn as this where they are less."""
_WAYS = {"svd": ("SVD", "#4477aa"), "dct": ("DCT", "#ee6677")}


def graying_of_input(model: nn.Module, images: Tensor) -> Section:
    """The condition of what the first block gets and of its attention's Jacobian as eps falls, with weights fixed."""
    conditions: dict[str, list[float]] = {}
    panels = []
    for kind, (name, _) in _WAYS.items():
        lines = []
        for eps, colour in zip(SWEEP, _COLOURS, strict=True):
            gray_tokens(model, "svd" if kind == "svd" else "dct", eps=eps)
            conditions.setdefault(f"{name}: pixel patches", []).append(_patch_condition(model, images))
            tokens = diagnose(model, images).blocks[0].tokens["input"]
            conditions.setdefault(f"{name}: tokens", []).append(min(tokens.condition.median, 1 / _SINGULAR))
            share, values = _attention_spectrum(model, images[:1])
            lines.append(Line(f"eps {eps:g}", share, values, colour))
            ungray_tokens(model)
        title = f"{name}: Jacobian of the first attention"
        panels.append(Curves(title, lines, "share of the spectrum", "singular value", log=True, whole=False))
    drawn = [
        Line(what, SWEEP, values, _WAYS[what[:3].lower()][1], ":" if what.endswith("tokens") else "-")
        for what, values in conditions.items()
    ]
    first = Curves("what the first block gets", drawn, "eps", "condition number", log=True, whole=False)
    return Section(
        "What graying does to the input",
        "The weights are those of the model trained without graying; its input is grayed more from the right to the "
        "left, from eps 1, which is none. On the left the condition number of an image's pixel patches, one row each, "
        "and of the tokens the first block gets, medians over test images. Beside it all singular values of the "
        "Jacobian of the first block's attention on one image, the largest on the left: the flatter, the better "
        "conditioned (Figures 7 and 8 of the paper).",
        [curves.svg() for curves in (first, *panels)],
    )


def _patch_condition(model: nn.Module, images: Tensor) -> float:
    """The median over images of the condition number of the patches that the embedding's convolution sees."""
    _, embedding, _ = embeddings(model)[0]
    seen: list[Tensor] = []
    projection = next(module for module in embedding.modules() if isinstance(module, nn.Conv2d))
    handle = projection.register_forward_pre_hook(lambda layer, arguments: seen.append(arguments[0].detach()))
    try:
        with torch.no_grad():
            model(images)
    finally:
        handle.remove()
    patches = nn.functional.unfold(seen[0], projection.kernel_size, stride=projection.stride).mT
    values = torch.linalg.svdvals(patches.double())
    least = _SINGULAR * values[:, 0]
    return median((values[:, 0] / torch.maximum(values[:, -1], least)).tolist())


def _attention_spectrum(model: nn.Module, image: Tensor) -> tuple[list[float], list[float]]:
    """The singular values of the Jacobian of the first attention, and the share of the spectrum above each."""
    first = blocks(model)[:1]
    with torch.no_grad(), calls_seen(first, "attention") as calls:
        model(image)
    spectrum = jacobian_spectrum(*calls[0], generator=torch.Generator().manual_seed(0))
    order = spectrum.nodes.argsort(descending=True)
    share = spectrum.weights[order].cumsum(0)
    return share.tolist(), spectrum.nodes[order].clamp(min=1e-9).tolist()
