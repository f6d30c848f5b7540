"""What a model is shown of a picture of any size: the whole of it, a random window, or windows that cover it.

Shapes: a picture is uint8 (3, H, W), its mask int64 (H, W).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.evaluation.segmentation.iou import IGNORED

DRAWS = 4
"""Random numbers that a view in training takes."""


def whole(picture: Tensor, mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Both at `size` x `size`, whatever their aspect was; the mask by nearest neighbour."""
    return resized(picture, (size, size)), resized_mask(mask, (size, size))


def random_window(picture: Tensor, mask: Tensor, size: int, draws: Tensor) -> tuple[Tensor, Tensor]:
    """A window of `size` x `size` out of both, their shorter side first brought to `size` times 0.5 to 2.

    Where the picture is smaller than the window, the rest is black and has no class. `draws` holds the scale, the place
    from the top and from the left, as numbers in [0, 1).
    """
    target = _with_shorter_side(mask, size * (0.5 + 1.5 * float(draws[0])))
    picture, mask = resized(picture, target), resized_mask(mask, target)
    down, right = (max(0, size - count) for count in target)
    picture = F.pad(picture, (0, right, 0, down))
    mask = F.pad(mask, (0, right, 0, down), value=IGNORED)
    top, left = (int(float(place) * (count - size + 1)) for place, count in zip(draws[1:3], mask.shape, strict=True))
    return picture[:, top : top + size, left : left + size], mask[top : top + size, left : left + size]


def training_view(
    picture: Tensor, mask: Tensor, size: int, draws: Tensor, *, crop: bool, flip: bool
) -> tuple[Tensor, Tensor]:
    """The whole of both or a random window, mirrored every other time if `flip`."""
    seen = random_window(picture, mask, size, draws) if crop else whole(picture, mask, size)
    return (seen[0].flip(-1), seen[1].flip(-1)) if flip and draws[3] < 0.5 else seen


def windows(picture: Tensor, size: int) -> tuple[Tensor, list[tuple[int, int]], tuple[int, int]]:
    """Windows (B, 3, size, size) that cover the picture, once its shorter side is `size`, and overlap by a third.

    Returns them with the top and left of each and the height and width of the resized picture.
    """
    target = _with_shorter_side(picture, size)
    picture = resized(picture, target)
    places = [(top, left) for top in _starts(target[0], size) for left in _starts(target[1], size)]
    return torch.stack([picture[:, y : y + size, x : x + size] for y, x in places]), places, target


def resized(picture: Tensor, target: tuple[int, int]) -> Tensor:
    """The picture at another height and width, bilinear and without aliasing."""
    from torchvision.transforms.v2 import functional

    return picture if picture.shape[-2:] == target else functional.resize(picture, list(target), antialias=True)


def resized_mask(mask: Tensor, target: tuple[int, int]) -> Tensor:
    """The mask at another height and width: each pixel has the class of the one that is under its middle."""
    rows, columns = (
        ((torch.arange(new, device=mask.device) + 0.5) * old / new).long()
        for old, new in zip(mask.shape, target, strict=True)
    )
    return mask[rows[:, None], columns]


def _with_shorter_side(image: Tensor, length: float) -> tuple[int, int]:
    height, width = image.shape[-2:]
    scale = length / min(height, width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def _starts(length: int, size: int) -> list[int]:
    """Where windows begin so that they overlap by a third and the last one ends with the picture."""
    return [*range(0, length - size, max(1, 2 * size // 3)), length - size]
