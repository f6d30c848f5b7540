"""What the blocks of a vision model give for a batch of images: the features that everything else here looks at.

Shapes: B images, N patches on a grid of rows x columns, width D.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgumentError, UnsuitableModelError
from wellposed.families import Trunk, keys_of, trunk
from wellposed.spectrum.modes import in_eval_mode

Kind = Literal["tokens", "keys"]


@dataclass(frozen=True)
class LayerFeatures:
    """The features of one block for a batch of images."""

    patches_BND: Tensor  # noqa: N815
    """A row per patch, row by row of the grid; class and register tokens are dropped."""
    grid: tuple[int, int]
    """Rows and columns of patches: N = rows x columns."""
    summary_BD: Tensor  # noqa: N815
    """What stands for the whole image: the class token where the model's head reads one, else the patches' mean."""


def layer_features(
    model: nn.Module, images_BCHW: Tensor, layers: Sequence[int] | None = (-1,), kind: Kind = "tokens"
) -> list[LayerFeatures]:
    """The features of some of the blocks of `model` for images, in the order of `layers`.

    Tokens go through the model's final norm, of every block as of the last, as DINO's protocols have it (models with
    stages: of the blocks as wide as the last). Models that normalize after pooling have no such norm: there the mean of
    the patches, not the patches, goes through it. Then the summary of the last block is what the model's head reads.

    Where the images are not of the size that the model was made for, its position embedding is resampled. The model
    runs in eval mode, without gradients, and is left as it was. Half-precision features are returned as float32.

    Args:
        model: a timm or transformers vision model, with or without wellposed's changes.
        images_BCHW: floating point, normalized as the model expects; on the model's device.
        layers: which blocks, from 0; negative ones count from the end; None for all.
        kind: "tokens", the output of the block, or "keys", those of its attention, all heads side by side.
    """
    found = trunk(model)
    chosen = chosen_layers(len(found.blocks), layers)
    _check(found, images_BCHW, kind)
    seen: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for layer in set(chosen):
            watched, taken = keys_of(found.blocks[layer]) if kind == "keys" else (found.blocks[layer], _same)
            stack.callback(watched.register_forward_hook(_keeping(seen, layer, taken)).remove)
        stack.enter_context(in_eval_mode(found.model))
        stack.enter_context(torch.no_grad())
        _run(found, images_BCHW)
        made = {layer: _made(found, layer, seen, images_BCHW, kind) for layer in set(chosen)}
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
    for name, size, patch in (("height", height, found.patch[0]), ("width", width, found.patch[1])):
        if size % patch or not size:
            nearest = [near for near in (size // patch * patch, -(-size // patch) * patch) if near] or [patch]
            raise InvalidArgumentError(
                f"images of {height} x {width}: the {name} is no multiple of the patch of {patch} pixels; resize to "
                f"{' or '.join(map(str, dict.fromkeys(nearest)))}"
            )
    if not found.takes_any_size and found.image_size != (height, width):
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


def _run(found: Trunk, images_BCHW: Tensor) -> None:
    height, width = images_BCHW.shape[-2:]
    try:
        found.run(images_BCHW.to(next(found.model.parameters()).dtype))
    except (AssertionError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and found.image_size in {None, (height, width)}:
            raise
        raise InvalidArgumentError(
            f"images of {height} x {width}: {type(found.model).__name__} cannot take them ({error}); resize them to "
            f"the size it was made for{'' if found.image_size is None else f', {found.image_size}'}"
        ) from error


def _keeping(seen: dict[int, Tensor], layer: int, taken: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        if layer in seen:
            raise UnsuitableModelError(f"block {layer} ran twice: expected a model that runs all of its blocks, once")
        seen[layer] = taken(output[0] if isinstance(output, tuple) else output)

    return hook


def _same(output: Tensor) -> Tensor:
    return output


def _made(found: Trunk, layer: int, seen: dict[int, Tensor], images_BCHW: Tensor, kind: Kind) -> LayerFeatures:
    if layer not in seen:
        raise UnsuitableModelError(f"block {layer} did not run: expected a model that runs all of its blocks, once")
    output = seen[layer]
    if output.ndim == 4:
        maps_BHWD = output if found.channels_last else output.movedim(1, -1)
        grid, prefix = (maps_BHWD.shape[1], maps_BHWD.shape[2]), 0
        tokens_BND = maps_BHWD.flatten(1, 2)
        if any(g > -(-s // p) for g, s, p in zip(grid, images_BCHW.shape[2:], found.patch, strict=True)):
            raise UnsuitableModelError(
                f"block {layer} gives {tuple(output.shape)}, which holds no map of images of "
                f"{tuple(images_BCHW.shape[2:])} with a patch of {found.patch}"
            )
    else:
        grid = images_BCHW.shape[2] // found.patch[0], images_BCHW.shape[3] // found.patch[1]
        tokens_BND, prefix = output, found.prefix
        if tokens_BND.ndim != 3 or tokens_BND.shape[1] != prefix + grid[0] * grid[1]:
            raise UnsuitableModelError(
                f"block {layer} gives {tuple(output.shape)}, expected {prefix} tokens and one for each of the "
                f"{grid[0]} x {grid[1]} patches"
            )
    pooled_norm = None
    if kind == "tokens":
        tokens_BND, pooled_norm = _normed(found.norm, tokens_BND), found.pooled_norm
    patches_BND = tokens_BND[:, prefix:]
    summary_BD = tokens_BND[:, 0] if found.reads_class_token and prefix else patches_BND.mean(1)
    return LayerFeatures(_single(patches_BND), grid, _single(_normed(pooled_norm, summary_BD)))


def _normed(norm: Any, tokens: Tensor) -> Tensor:
    """Tokens after the norm; as they are where it is made for another width, as in the early stages of a model."""
    widths = {parameter.shape[-1] for parameter in norm.parameters()} if norm is not None else set()
    return tokens if norm is None or widths - {tokens.shape[-1]} else norm(tokens)


def _single(tokens: Tensor) -> Tensor:
    return tokens if tokens.dtype == torch.float64 else tokens.float()
