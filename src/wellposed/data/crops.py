"""Multi-crop on the device: several large and many small views of every image of a batch (arXiv 2104.14294).

A crop is one linear map of rows and one of columns, out = R X C^T: a row of R holds the weights with which a row of
pixels of the view is read off those of the image, and cropping, antialiased resizing and mirroring are all in these
weights. So all views of a size are two batched matrix products, each sample with its own box. Blur is two more.

As in `augment`, all randomness of a batch is one matrix of uniform numbers, a row per image, drawn beforehand.

Shapes: N images, V views of each, C channels, S pixels a side of a view.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InvalidArgumentError

_PER_VIEW = 14
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True, kw_only=True)
class MultiCrop:
    """DINO's views: random boxes, mirrored, with jittered colours, some of them grey, blurred or solarized.

    As torchvision's transforms of these names, but that all of them work on numbers that are not rounded, colours are
    changed in the order brightness, contrast, saturation, hue, a box that does not fit is cut off rather than drawn
    again, and the blur is an exact Gaussian. The first global view is always blurred and never solarized, further ones
    are blurred with probability 0.1, local views with probability 0.5. Colour needs three channels: of others, only
    brightness and contrast change.
    """

    global_size: int
    """Pixels a side of the large views."""
    local_size: int
    """Pixels a side of the small ones."""
    global_crops: int = 2
    local_crops: int = 8
    global_scale: tuple[float, float] = (0.4, 1.0)
    """The part of the image's area that a large view shows, at least and at most."""
    local_scale: tuple[float, float] = (0.05, 0.4)
    """The same for small views."""
    flip: bool = True
    """Mirror left and right with probability 1/2."""
    jitter: float = 1.0
    """Strength of the change of colours, of 4 views in 5: at 1, brightness and contrast change by up to 0.4,
    saturation by 0.2 and hue by 0.1 of the circle; 0 is off."""
    grey: float = 0.2
    """Probability that a view loses its colours."""
    blur: float = 2.0
    """Largest standard deviation of the blur, in pixels of the view; 0 is off."""
    solarize: float = 0.2
    """Probability that bright pixels of the further global views are inverted."""

    def __post_init__(self) -> None:
        sizes = {"global_size": self.global_size, "local_size": self.local_size, "global_crops": self.global_crops}
        for name, value in sizes.items():
            if value < 1:
                raise InvalidArgumentError(f"{name}={value}: expected at least 1")
        if self.local_crops < 0:
            raise InvalidArgumentError(f"local_crops={self.local_crops}: expected at least 0")
        for name in ("global_scale", "local_scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise InvalidArgumentError(f"{name}={(low, high)}: expected two parts of an area, 0 < low <= high <= 1")
        for name in ("jitter", "grey", "solarize"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}: expected a number in [0, 1]")
        if not 0 <= self.blur < math.inf:
            raise InvalidArgumentError(f"blur={self.blur}: expected a finite number of pixels, at least 0")

    @property
    def columns(self) -> int:
        """Random numbers that an image takes."""
        return _PER_VIEW * (self.global_crops + self.local_crops)

    def __call__(self, images_NCHW: Tensor, draws_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Global views (N, V, C, S, S) and local ones of uint8 images, as numbers in [0, 1]."""
        draws_NVK = draws_NK.unflatten(1, (-1, _PER_VIEW))
        pixels_NCHW = images_NCHW.to(torch.float32) / 255
        first = torch.arange(self.global_crops, device=draws_NK.device) == 0
        return (
            self._views(
                *(pixels_NCHW, draws_NVK[:, : self.global_crops], self.global_size, self.global_scale),
                blurred=torch.where(first, 1.0, 0.1),
                solarized=torch.where(first, 0.0, self.solarize),
            ),
            self._views(
                *(pixels_NCHW, draws_NVK[:, self.global_crops :], self.local_size, self.local_scale),
                blurred=first.new_full((), 0.5, dtype=torch.float32),
                solarized=first.new_full((), 0.0, dtype=torch.float32),
            ),
        )

    def _views(
        self,
        images_NCHW: Tensor,
        draws_NVK: Tensor,
        size: int,
        scale: tuple[float, float],
        *,
        blurred: Tensor,
        solarized: Tensor,
    ) -> Tensor:
        """Views of one size, each as its own row of numbers says; `blurred` and `solarized` are probabilities."""
        if not draws_NVK.shape[1]:
            return images_NCHW.new_empty(len(images_NCHW), 0, images_NCHW.shape[1], size, size)
        area, aspect, x, y, mirror, change, *amounts, grey, soft, sigma, solar = draws_NVK.unbind(-1)
        boxes_NV4 = boxes(area, aspect, x, y, scale=scale, height=images_NCHW.shape[2], width=images_NCHW.shape[3])
        views = resampled(images_NCHW, boxes_NV4, (mirror < 0.5) & self.flip, size)
        changes = (change < 0.8) * self.jitter
        strengths = (
            (2 * amount - 1) * changes * most for amount, most in zip(amounts, (0.4, 0.4, 0.2, 0.1), strict=True)
        )
        views = coloured(views, *strengths, grey=grey < self.grey)
        if self.blur:
            widths_NV = torch.where(soft < blurred, 0.05 * self.blur + 0.95 * self.blur * sigma, 0.0)
            views = softened(views, widths_NV)
        if self.solarize:
            views = torch.where((solar < solarized)[..., None, None, None] & (views >= 0.5), 1 - views, views)
        return views.contiguous()


def boxes(
    area: Tensor, aspect: Tensor, x: Tensor, y: Tensor, *, scale: tuple[float, float], height: int, width: int
) -> Tensor:
    """Random boxes (..., 4) as top, left, height, width in pixels, from numbers in [0, 1), each (...).

    Their areas are spread evenly over `scale` times that of the image, the logarithms of their aspects over those of
    3/4 to 4/3; they lie wholly inside and are at least a pixel wide.
    """
    side = ((scale[0] + (scale[1] - scale[0]) * area) * height * width).sqrt()
    root = torch.exp((2 * aspect - 1) * math.log(4 / 3) / 2)
    tall, wide = (side / root).clamp(1, height), (side * root).clamp(1, width)
    return torch.stack([y * (height - tall), x * (width - wide), tall, wide], -1)


def resampled(images_NCHW: Tensor, boxes_NV4: Tensor, mirrored_NV: Tensor, size: int) -> Tensor:
    """The part of each image inside each box, at `size` x `size`: (N, V, C, S, S).

    Bilinear and without aliasing, as torchvision's resized_crop(antialias=True); boxes need not lie on whole pixels.
    """
    count, channels, height, width = images_NCHW.shape
    views = boxes_NV4.shape[1]
    top, left, tall, wide = boxes_NV4.unbind(-1)
    rows_NVSH = _weights(top, tall, torch.zeros_like(mirrored_NV), size, height)
    columns_NVSW = _weights(left, wide, mirrored_NV, size, width)
    flat_NHX = images_NCHW.transpose(1, 2).reshape(count, height, channels * width)
    read_NSX = torch.bmm(rows_NVSH.flatten(1, 2), flat_NHX)
    read = read_NSX.reshape(count * views, size * channels, width)
    made = torch.bmm(read, columns_NVSW.flatten(0, 1).mT)
    return made.view(count, views, size, channels, size).transpose(2, 3)


def _weights(start_NV: Tensor, length_NV: Tensor, mirrored_NV: Tensor, size: int, count: int) -> Tensor:
    """How much each of `count` pixels in a line tells each of `size` new ones, (N, V, size, count); rows sum to 1."""
    scale = (length_NV / size)[..., None, None]
    place = torch.arange(size, device=start_NV.device)
    place = torch.where(mirrored_NV[..., None], place.flip(0), place)[..., None]
    centre = start_NV[..., None, None] + (place + 0.5) * scale
    pixel = torch.arange(count, device=start_NV.device) + 0.5
    first, last = start_NV[..., None, None], (start_NV + length_NV)[..., None, None]
    weights = (1 - (pixel - centre).abs() / scale.clamp(min=1)).clamp(min=0) * ((pixel >= first) & (pixel <= last))
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)


def coloured(
    views: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor, hue: Tensor, *, grey: Tensor
) -> Tensor:
    """Views (N, V, C, S, S) with other colours; each change is (N, V), 0 for none, hue in parts of the circle."""
    brightness, contrast, saturation, hue, grey = (
        change[..., None, None, None] for change in (brightness, contrast, saturation, hue, grey)
    )
    views = (views * (1 + brightness)).clamp(0, 1)
    middle = luminance(views).mean((-2, -1), keepdim=True)
    views = (middle + (1 + contrast) * (views - middle)).clamp(0, 1)
    if views.shape[-3] != 3:
        return views
    plain = luminance(views)
    views = (plain + (1 + saturation) * (views - plain)).clamp(0, 1)
    views = turned(views, hue)
    return torch.where(grey, luminance(views), views)


def luminance(views: Tensor) -> Tensor:
    """The brightness of each pixel as an eye sees it, one channel instead of three; else the mean of the channels."""
    if views.shape[-3] != 3:
        return views.mean(-3, keepdim=True)
    red, green, blue = views.split(1, -3)
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue


def turned(views: Tensor, hue: Tensor) -> Tensor:
    """RGB views whose hue is turned by `hue`, in parts of the circle; value and saturation stay, as in HSV."""
    red, green, blue = views.split(1, -3)
    value, least = views.amax(-3, keepdim=True), views.amin(-3, keepdim=True)
    chroma = value - least
    unit = chroma.where(chroma > 0, 1.0)
    by_red, by_green, by_blue = (green - blue) / unit, 2 + (blue - red) / unit, 4 + (red - green) / unit
    sextant = torch.where(value == red, by_red, torch.where(value == green, by_green, by_blue)) + 6 * hue
    # On the hexagon of hues, a channel lacks the more chroma the farther the pixel is from the channel's own corner.
    distances = torch.cat([(corner + sextant) % 6 for corner in (5, 3, 1)], -3)
    return value - chroma * torch.minimum(distances, 4 - distances).clamp(0, 1)


def softened(views: Tensor, sigma_NV: Tensor) -> Tensor:
    """Views (N, V, C, S, S) blurred by Gaussians of standard deviation `sigma_NV`, 0 for none.

    At the edges the weights of the pixels that are there are made to sum to 1.
    """
    place = torch.arange(views.shape[-1], device=views.device, dtype=views.dtype)
    distance_SS = place[:, None] - place
    weights = torch.exp(-0.5 * (distance_SS / sigma_NV[..., None, None].clamp(min=1e-3)) ** 2)
    blur_NV1SS = (weights / weights.sum(-1, keepdim=True))[:, :, None]
    return blur_NV1SS @ views @ blur_NV1SS.mT
