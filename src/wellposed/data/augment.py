"""Augmentation of whole batches on the device they lie on, every sample by itself.

All randomness of a batch is one matrix of uniform numbers, a row per sample, drawn beforehand. What happens to a sample
depends on its row alone, so the processes of a distributed run that each take a part of the batch do to it what one
process would have done.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import InvalidArgumentError

COLUMNS = 48


class _Row:
    """Hands out the columns of the random matrix one after the other, shaped to broadcast against (N, C, H, W)."""

    def __init__(self, draws_NK: Tensor) -> None:
        self._draws, self._next = draws_NK, 0

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        column = self._draws[:, self._next]
        self._next += 1
        return (low + (high - low) * column).view(-1, 1, 1, 1)

    def chance(self, probability: float) -> Tensor:
        return self.uniform() < probability


@dataclass(frozen=True)
class Augment:
    """Random crop, flip, geometry, colour and erasing, in this order.

    `geometry` and `colour` are as RandAugment's in kind but not in its bookkeeping: each operation is applied to a
    sample with probability 1/2 (solarization and posterization 1/4), up to the given strength, and all geometry is one
    bilinear resampling.
    """

    crop: Literal["none", "pad", "resize"] = "none"
    """"pad": a window of the image's size from the image padded with zeros; "resize": a part of it, enlarged."""
    padding: int = 4
    smallest_area: float = 0.35
    """Of the part that crop="resize" takes, as a fraction of the image."""
    flip: bool = False
    """Mirror left and right with probability 1/2."""
    geometry: float = 0.0
    """Strength in [0, 1]: at 1, rotations by up to 30 degrees, shears up to 0.3, shifts up to 0.3 of the image."""
    colour: float = 0.0
    """Strength in [0, 1]: at 1, brightness, contrast and saturation from 0.1 to 1.9, solarization and posterization."""
    erase: float = 0.0
    """Probability that a rectangle of 2 to 33 % of the image is set to grey."""

    def __post_init__(self) -> None:
        for name in ("geometry", "colour", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidArgumentError(f"{name}={getattr(self, name)!r}: expected a number in [0, 1]")
        if self.crop not in {"none", "pad", "resize"} or self.padding < 0 or not 0 < self.smallest_area <= 1:
            raise InvalidArgumentError(
                f"crop={self.crop!r}, padding={self.padding!r}, smallest_area={self.smallest_area!r}: expected 'none', "
                "'pad' or 'resize', a number of pixels >= 0 and a fraction in (0, 1]"
            )

    def __call__(self, images_NCHW: Tensor, draws_NK: Tensor) -> Tensor:
        """The uint8 images as numbers in [0, 1], each changed as its row of `draw` says."""
        row = _Row(draws_NK)
        if self.crop == "pad" or self.flip:
            images_NCHW = self._cropped(images_NCHW, row)
        images_NCHW = images_NCHW.to(torch.float32) / 255
        if self.crop == "resize" or self.geometry:
            images_NCHW = self._resampled(images_NCHW, row)
        if self.colour:
            images_NCHW = self._coloured(images_NCHW, row)
        if self.erase:
            images_NCHW = self._erased(images_NCHW, row)
        return images_NCHW

    def _cropped(self, images: Tensor, row: _Row) -> Tensor:
        """Whole-pixel shifts and mirroring, without resampling."""
        height, width = images.shape[-2:]
        padding = self.padding if self.crop == "pad" else 0
        top, left = (row.uniform(0, 2 * padding + 1).floor().long().view(-1, 1) for _ in range(2))
        rows, columns = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
        mirrored = row.chance(0.5).view(-1, 1) & self.flip
        columns_NW = left + torch.where(mirrored, columns.flip(0), columns)
        padded = F.pad(images, (padding,) * 4)
        sample = torch.arange(len(images), device=images.device).view(-1, 1, 1)
        return padded[sample, :, (top + rows)[:, :, None], columns_NW[:, None, :]].permute(0, 3, 1, 2)

    def _resampled(self, images: Tensor, row: _Row) -> Tensor:
        """A part of the image enlarged, rotated, sheared and shifted: where each output pixel is read from."""
        side = row.uniform(self.smallest_area if self.crop == "resize" else 1, 1).sqrt()
        aspect = torch.exp(row.uniform(-1, 1) * math.log(4 / 3) / 2) if self.crop == "resize" else 1
        scale_x, scale_y = (side * aspect).clamp(max=1), (side / aspect).clamp(max=1)
        centre_x, centre_y = row.uniform(-1, 1) * (1 - scale_x), row.uniform(-1, 1) * (1 - scale_y)
        limits = (math.pi / 6, 0.3, 0.3, 0.6, 0.6)
        angle, shear_x, shear_y, shift_x, shift_y = (
            row.chance(0.5) * row.uniform(-limit, limit) * self.geometry for limit in limits
        )
        first = torch.cat([scale_x * angle.cos(), scale_x * (shear_x - angle.sin()), centre_x + shift_x], -1)
        second = torch.cat([scale_y * (shear_y + angle.sin()), scale_y * angle.cos(), centre_y + shift_y], -1)
        theta_N23 = torch.cat([first, second], -2).squeeze(1)
        grid = F.affine_grid(theta_N23, list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, align_corners=False)

    def _coloured(self, images: Tensor, row: _Row) -> Tensor:
        grey = images.mean(1, keepdim=True)
        brightness, contrast, saturation = torch.zeros_like(grey), grey.mean((-2, -1), keepdim=True), grey
        for base in (brightness, contrast, saturation):
            factor = 1 + row.chance(0.5) * row.uniform(-0.9, 0.9) * self.colour
            images = (base + factor * (images - base)).clamp(0, 1)
        threshold = 1 - row.chance(0.25) * row.uniform(0, 0.8) * self.colour
        images = torch.where(images > threshold, 1 - images, images)
        levels = 2 ** (8 - (row.chance(0.25) * row.uniform(0, 5) * self.colour).round())
        return (images * (levels - 1)).round() / (levels - 1)

    def _erased(self, images: Tensor, row: _Row) -> Tensor:
        area, aspect = row.uniform(0.02, 0.33), torch.exp(row.uniform(-1, 1) * math.log(3) / 2)
        inside = _rectangle(images, (area.sqrt() * aspect).clamp(max=1), (area.sqrt() / aspect).clamp(max=1), row)
        return torch.where(inside & row.chance(self.erase), 0.5, images)


@dataclass(frozen=True)
class Mix:
    """Mixup and CutMix between neighbours of a batch: samples 2i and 2i + 1 are each other's partner.

    Where both are on, each sample takes one or the other with probability 1/2.
    """

    mixup: float = 0.0
    """Parameter of the Beta distribution of mixup's weight; 0 is off."""
    cutmix: float = 0.0
    """Parameter of the Beta distribution of the area CutMix leaves; 0 is off."""

    def __post_init__(self) -> None:
        if not (0 <= self.mixup <= 1 and 0 <= self.cutmix <= 1):
            raise InvalidArgumentError(f"mixup={self.mixup}, cutmix={self.cutmix}: expected numbers in [0, 1]")

    def __call__(self, images_NCHW: Tensor, targets_NK: Tensor, draws_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Images and class probabilities, both mixed; the batch must hold an even number of samples."""
        if not (self.mixup or self.cutmix):
            return images_NCHW, targets_NK
        if len(images_NCHW) % 2:
            raise InvalidArgumentError(f"a batch of {len(images_NCHW)}: mixing takes pairs, expected an even number")
        row = _Row(draws_NK)
        use_mixup = row.chance(0.5 if self.mixup and self.cutmix else float(self.mixup > 0))
        blend, keep = (_beta(row, alpha) for alpha in (self.mixup, self.cutmix))
        partner = torch.arange(len(images_NCHW), device=images_NCHW.device) ^ 1
        side = (1 - keep).sqrt()
        inside = _rectangle(images_NCHW, side, side, row)
        weight_NCHW = torch.where(use_mixup, blend, 1 - inside.to(images_NCHW.dtype))
        weight_N1 = weight_NCHW.mean((1, 2, 3)).unsqueeze(1).to(targets_NK.dtype)
        mixed = weight_NCHW * images_NCHW + (1 - weight_NCHW) * images_NCHW[partner]
        return mixed, weight_N1 * targets_NK + (1 - weight_N1) * targets_NK[partner]


def draw(count: int, generator: torch.Generator) -> Tensor:
    """The random numbers for one use of `Augment` or `Mix` on `count` samples, on the generator's device."""
    return torch.rand(count, COLUMNS, generator=generator, device=generator.device)


def _beta(row: _Row, alpha: float, candidates: int = 8) -> Tensor:
    """Numbers of the distribution Beta(alpha, alpha) from uniform ones, by Johnk's method; 1 where alpha is 0.

    The first of `candidates` pairs that is accepted is taken, 1/2 if none is: for alpha = 0.8, where 0.61 of the pairs
    are accepted, once in two thousand times.
    """
    if alpha in {0, 1}:
        return row.uniform(1 - alpha, 1)
    result = row.uniform(0.5, 0.5)
    accepted = torch.zeros_like(result, dtype=torch.bool)
    for _ in range(candidates):
        u, v = row.uniform() ** (1 / alpha), row.uniform() ** (1 / alpha)
        take = (u + v <= 1) & ~accepted
        result, accepted = torch.where(take, u / (u + v), result), accepted | take
    return result


def _rectangle(images: Tensor, width: Tensor, height: Tensor, row: _Row) -> Tensor:
    """Which pixels lie in a rectangle of the given size, in parts of the image, at a random place wholly inside it."""
    inside = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=images.device)
    for size, dimension in ((height, -2), (width, -1)):
        count = images.shape[dimension]
        position = (torch.arange(count, device=images.device) + 0.5) / count
        position = position.view(-1, 1) if dimension == -2 else position
        start = row.uniform() * (1 - size)
        inside = inside & (position >= start) & (position < start + size)
    return inside
