"""`shapes`: textured objects on textured backgrounds, drawn from a seed.

The class is the silhouette alone. Colours, textures, place, size and rotation are random for object and background
alike, so no pixel by itself says anything about the class.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from wellposed.data.images import ImageSet, boxes_of
from wellposed.errors import InvalidArgumentError

# Inside or outside, for coordinates in which the object fills the unit disc.
SILHOUETTES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "disc": lambda x, y: x**2 + y**2 < 0.8,
    "ring": lambda x, y: (x**2 + y**2 < 1) & (x**2 + y**2 > 0.3),
    "square": lambda x, y: torch.maximum(x.abs(), y.abs()) < 0.75,
    "frame": lambda x, y: (torch.maximum(x.abs(), y.abs()) < 0.8) & (torch.maximum(x.abs(), y.abs()) > 0.45),
    "triangle": lambda x, y: (y > -0.6) & (y < 1 - 1.8 * x.abs()),
    "cross": lambda x, y: (torch.minimum(x.abs(), y.abs()) < 0.25) & (torch.maximum(x.abs(), y.abs()) < 0.95),
    "bar": lambda x, y: (x.abs() < 0.98) & (y.abs() < 0.3),
    "star": lambda x, y: torch.hypot(x, y) < 0.6 + 0.4 * torch.cos(5 * torch.atan2(y, x)),
    "crescent": lambda x, y: (x**2 + y**2 < 1) & ((x - 0.5) ** 2 + y**2 > 0.6),
    "half disc": lambda x, y: (x**2 + y**2 < 1) & (y > 0),
}


def make_shapes(count: int, image_size: int = 32, seed: int = 0) -> ImageSet:
    """`count` images of `image_size` pixels a side, the same for the same arguments, every class equally often.

    Args:
        count: number of images.
        image_size: height and width; at least 16, since a silhouette of fewer pixels cannot be told.
        seed: of the generator all random numbers come from.
    """
    if count < 1 or image_size < 16:
        raise InvalidArgumentError(f"count={count}, image_size={image_size}: expected at least 1 and at least 16")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randperm(count, generator=generator) % len(SILHOUETTES)
    pieces = [_draw(part, image_size, generator) for part in labels.split(2048)]
    images, masks = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return ImageSet("shapes", tuple(SILHOUETTES), images, labels, masks, boxes_of(masks))


def _draw(labels_N: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    axis = torch.linspace(-1, 1, size)
    y_1HW, x_1HW = (grid[None] for grid in torch.meshgrid(axis, axis, indexing="ij"))
    masks_NHW = _silhouettes(labels_N, x_1HW, y_1HW, generator)
    background_N3, object_N3 = _two_colours(len(labels_N), generator)
    images_NCHW = torch.where(
        masks_NHW[:, None],
        _textured(object_N3, x_1HW, y_1HW, generator),
        _textured(background_N3, x_1HW, y_1HW, generator),
    )
    images_NCHW += 0.03 * torch.randn(images_NCHW.shape, generator=generator)
    return (255 * images_NCHW.clamp(0, 1)).round().to(torch.uint8), masks_NHW


def _silhouettes(labels_N: Tensor, x_1HW: Tensor, y_1HW: Tensor, generator: torch.Generator) -> Tensor:
    """The masks: each class's silhouette at a random place, size and rotation, wholly inside the image."""
    count = len(labels_N)
    scale = _uniform((count, 1, 1), 0.4, 0.75, generator)
    angle = _uniform((count, 1, 1), 0, 2 * math.pi, generator)
    centre_x, centre_y = (_uniform((count, 1, 1), -1, 1, generator) * (1 - scale) for _ in range(2))
    x, y = (x_1HW - centre_x) / scale, (y_1HW - centre_y) / scale
    x, y = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
    masks = torch.zeros(x.shape, dtype=torch.bool)
    for label, inside in enumerate(SILHOUETTES.values()):
        members = labels_N == label
        masks[members] = inside(x[members], y[members])
    return masks


def _two_colours(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two random colours that differ in every channel, so that the object can be told from what is behind it."""
    first = torch.rand(count, 3, generator=generator)
    return first, (first + _uniform((count, 3), 0.3, 0.7, generator)) % 1


def _textured(colour_N3: Tensor, x_1HW: Tensor, y_1HW: Tensor, generator: torch.Generator) -> Tensor:
    """(N, 3, H, W): the colour, lighter and darker by stripes, checks, dots or clouds of random size and direction."""
    count = len(colour_N3)
    frequency, angle = _uniform((count, 1, 1), 4, 14, generator), _uniform((count, 1, 1), 0, math.pi, generator)
    phase, strength = _uniform((count, 1, 1), 0, 2 * math.pi, generator), _uniform((count, 1, 1), 0.1, 0.25, generator)
    along = torch.sin(frequency * (x_1HW * angle.cos() + y_1HW * angle.sin()) + phase)
    across = torch.sin(frequency * (y_1HW * angle.cos() - x_1HW * angle.sin()) + phase)
    clouds = torch.sin(1.7 * frequency * along.cos() + across + 3 * x_1HW)
    patterns = torch.stack([along, (along * across).sign(), 2.0 * (along + across > 1) - 1, clouds])
    chosen = patterns[torch.randint(len(patterns), (count,), generator=generator), torch.arange(count)]
    return colour_N3[:, :, None, None] + (strength * chosen)[:, None]


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)
