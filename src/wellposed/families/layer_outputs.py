"""What a vision model gives layer by layer, whichever library laid it out.

Shapes: B images, D the width of a layer, H and W the rows and columns of its patches, N = H x W.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from wellposed.errors import UnsuitableModelError


@dataclass(frozen=True)
class LayerOutput:
    """What one layer gives for a batch of images."""

    maps_BDHW: Tensor  # noqa: N815
    """One vector per patch; class and register tokens are dropped."""
    summary_BD: Tensor  # noqa: N815
    """What stands for the whole image."""


@dataclass(frozen=True)
class Trunk(ABC):
    """A vision model, laid out."""

    model: Any
    """The module that takes images; of a transformers model with a head, or with a text model, the part before that."""
    blocks: tuple[nn.Module, ...]
    """Its layers, in the order in which they run: blocks, or the stages of a model whose maps shrink from one to the
    next."""
    prefix: int
    """Class and register tokens that stand before the patches in each block."""
    reads_class_token: bool
    """Whether the first token is a class token, and the model's head reads it."""
    patch: tuple[int, int]
    """Height and width of the pixels behind one token of the first layer."""
    image_size: tuple[int, int] | None
    """Height and width that the model was made for, where it says so."""
    takes_any_size: bool
    """Whether it can be asked to run on images of another size."""
    channels: int

    @abstractmethod
    def run(self, images_BCHW: Tensor) -> Any:
        """Send images, normalized, through the model; where their size is not the model's, positions are resampled."""

    @abstractmethod
    def outputs(self, images_BCHW: Tensor, layers: Sequence[int]) -> list[LayerOutput]:
        """What these layers, in ascending order and each once, give for images, normalized."""

    def split(self, tokens_BND: Tensor, images_BCHW: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The tokens before the patches, (B, prefix, D), and the patches as maps, (B, D, H, W)."""
        grid = images_BCHW.shape[2] // self.patch[0], images_BCHW.shape[3] // self.patch[1]
        if tokens_BND.ndim != 3 or tokens_BND.shape[1] != self.prefix + grid[0] * grid[1]:
            raise UnsuitableModelError(
                f"block {layer} gives {tuple(tokens_BND.shape)}, expected {self.prefix} tokens and one for each of the "
                f"{grid[0]} x {grid[1]} patches"
            )
        return tokens_BND[:, : self.prefix], tokens_BND[:, self.prefix :].mT.unflatten(-1, grid)

    def plain_summary(self, before_BPD: Tensor, maps_BDHW: Tensor) -> Tensor:
        """The class token where there is one and the model's head reads it, else the mean of the patches."""
        return before_BPD[:, 0] if self.reads_class_token and before_BPD.shape[1] else maps_BDHW.mean((2, 3))


@contextmanager
def recorded(modules: Mapping[int, nn.Module]) -> Iterator[dict[int, Tensor]]:
    """What each module, by the number of its layer, gives while the model runs once."""
    seen: dict[int, Tensor] = {}

    def keeping(layer: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if layer in seen:
                raise UnsuitableModelError(f"block {layer} ran twice: expected a model that runs all of them, once")
            seen[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [module.register_forward_hook(keeping(layer)) for layer, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
    missing = sorted(modules.keys() - seen.keys())
    if missing:
        raise UnsuitableModelError(f"block {missing[0]} did not run: expected a model that runs all of them, once")


def listed(container: Any) -> tuple[nn.Module, ...]:
    """What stands in a list of modules; nothing if it is none."""
    return tuple(container) if isinstance(container, nn.ModuleList | nn.Sequential) else ()


def first_convolution(model: nn.Module) -> Any:
    """The convolution that takes the pixels; None where there is none."""
    return next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)


def pair(size: Any) -> tuple[int, int]:
    """Height and width from one number or two."""
    return (int(size), int(size)) if isinstance(size, int | float) else (int(size[0]), int(size[1]))
