"""What the blocks of a vision model give for a batch of images: the features that everything else here looks at.

Shapes: B images, N patches on a grid of rows x columns, width D.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgumentError
from wellposed.families import LayerOutput, Trunk, keys_of, recorded, trunk
from wellposed.spectrum.modes import in_eval_mode

Kind = Literal["tokens", "keys"]


@dataclass(frozen=True)
class LayerFeatures:
    """The features of one layer for a batch of images."""

    patches_BND: Tensor  # noqa: N815
    """A row per patch, row by row of the grid; class and register tokens are dropped."""
    grid: tuple[int, int]
    """Rows and columns of patches: N = rows x columns."""
    summary_BD: Tensor  # noqa: N815
    """What stands for the whole image: what the model's head would make of the layer (the class token, a mean, ...),
    where it can read it; else the patches' mean."""


def layer_features(
    model: nn.Module, images_BCHW: Tensor, layers: Sequence[int] | None = (-1,), kind: Kind = "tokens"
) -> list[LayerFeatures]:
    """The features of some of the layers of `model` for images, in the order of `layers`.

    A layer is a block, or, in a model whose maps shrink from stage to stage (Swin, ConvNeXt, ResNet ...), a stage.
    Tokens of blocks go through the model's final norm, of every block as of the last, as DINO's protocols have it; of
    stages, the last does, where it has a norm. The summary of the last layer is what the model's head reads.

    Where the images are not of the size that the model was made for, its position embedding is resampled. The model
    runs in eval mode, without gradients, and is left as it was. Half-precision features are returned as float32.

    Args:
        model: a timm or transformers vision model, with or without wellposed's changes.
        images_BCHW: floating point, normalized as the model expects; on the model's device.
        layers: which, from 0; negative ones count from the end; None for all.
        kind: "tokens", the output of the layer, or "keys", those of its attention, all heads side by side.
    """
    found = trunk(model)
    chosen = chosen_layers(len(found.blocks), layers)
    _check(found, images_BCHW, kind)
    ordered, look = sorted(set(chosen)), _keys if kind == "keys" else _tokens
    with in_eval_mode(found.model), torch.no_grad():
        made = dict(zip(ordered, _looked(look, found, images_BCHW, ordered), strict=True))
    return [made[layer] for layer in chosen]


def chosen_layers(count: int, layers: Sequence[int] | None) -> list[int]:
    """`layers` of a model with `count` blocks, counted from 0; all if None.

    Example:
        >>> chosen_layers(12, (-1, 0, 10))
        [11, 0, 10]
    """
    if layers is None:
        return list(range(count))
    wrong = [layer for layer in layers if not -count <= layer < count]
    if wrong or not layers:
        raise InvalidArgumentError(
            f"layers={tuple(layers)}: expected some of 0 to {count - 1}, or -1 to {-count} from the end"
        )
    return [layer % count for layer in layers]


def check_image_size(found: Trunk, height: int, width: int) -> None:
    """Raise InvalidArgumentError, with the nearest sizes that will do, where the model cannot take such images."""
    if found.image_size == (height, width):
        return
    for name, size, patch in (("height", height, found.patch[0]), ("width", width, found.patch[1])):
        if size % patch or not size:
            nearest = [near for near in (size // patch * patch, -(-size // patch) * patch) if near] or [patch]
            raise InvalidArgumentError(
                f"images of {height} x {width}: the {name} is no multiple of the patch of {patch} pixels; resize to "
                f"{' or '.join(map(str, dict.fromkeys(nearest)))}"
            )
    if not found.takes_any_size:
        raise InvalidArgumentError(
            f"images of {height} x {width}: this model was made for {found.image_size}; resize them, or give "
            "image_size where the model is opened"
        )


def _check(found: Trunk, images_BCHW: Tensor, kind: str) -> None:
    if kind not in {"tokens", "keys"}:
        raise InvalidArgumentError(f"kind={kind!r}: expected 'tokens' or 'keys'")
    if not isinstance(images_BCHW, Tensor) or images_BCHW.ndim != 4 or not len(images_BCHW):
        shape = tuple(images_BCHW.shape) if isinstance(images_BCHW, Tensor) else type(images_BCHW).__name__
        raise InvalidArgumentError(f"images are {shape}: expected a batch (B, {found.channels}, height, width)")
    if not images_BCHW.is_floating_point():
        raise InvalidArgumentError(
            f"images are {images_BCHW.dtype}: expected floating point, normalized as the model expects; "
            "open_backbone(...).features takes uint8"
        )
    if images_BCHW.shape[1] != found.channels:
        raise InvalidArgumentError(
            f"images have {images_BCHW.shape[1]} channels: expected {found.channels}, as this model does"
        )
    check_image_size(found, *images_BCHW.shape[-2:])


def _looked(
    look: Callable[[Trunk, Tensor, list[int]], list[LayerOutput]], found: Trunk, images_BCHW: Tensor, layers: list[int]
) -> list[LayerFeatures]:
    height, width = images_BCHW.shape[-2:]
    try:
        outputs = look(found, images_BCHW.to(next(found.model.parameters()).dtype), layers)
    except (AssertionError, RuntimeError) as error:
        own_size = found.image_size in {None, (height, width)}
        if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and own_size):
            raise
        raise InvalidArgumentError(
            f"images of {height} x {width}: {type(found.model).__name__} cannot take them ({error}); resize them to "
            f"the size it was made for{'' if found.image_size is None else f', {found.image_size}'}"
        ) from error
    return [
        LayerFeatures(
            patches_BND=_single(one.maps_BDHW.flatten(2).mT),
            grid=(one.maps_BDHW.shape[2], one.maps_BDHW.shape[3]),
            summary_BD=_single(one.summary_BD),
        )
        for one in outputs
    ]


def _tokens(found: Trunk, images_BCHW: Tensor, layers: list[int]) -> list[LayerOutput]:
    return found.outputs(images_BCHW, layers)


def _keys(found: Trunk, images_BCHW: Tensor, layers: list[int]) -> list[LayerOutput]:
    watched = {layer: keys_of(found.blocks[layer]) for layer in layers}
    with recorded({layer: module for layer, (module, _) in watched.items()}) as seen:
        found.run(images_BCHW)
    outputs = []
    for layer, (_, taken) in watched.items():
        before_BPD, maps_BDHW = found.split(taken(seen[layer]), images_BCHW, layer)
        outputs.append(LayerOutput(maps_BDHW, found.plain_summary(before_BPD, maps_BDHW)))
    return outputs


def _single(tokens: Tensor) -> Tensor:
    return tokens if tokens.dtype == torch.float64 else tokens.float()
