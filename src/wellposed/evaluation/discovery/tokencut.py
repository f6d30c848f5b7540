"""TokenCut: where the object of an image is, from its patch features alone (Wang et al., 2022; arXiv 2202.11539)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.data.images import boxes_of
from wellposed.errors import InvalidArgumentError
from wellposed.evaluation.discovery.cuts import are_alike, graphs_at_once, second_eigenvectors

_ROUNDING = 1e-6  # of the largest entry: values this near one another count as equal


@dataclass(frozen=True)
class Discovery:
    """The object found in each of B images, on a grid of h x w patches."""

    boxes: Tensor
    """(B, 4), int64, in patches: left, top, right, bottom, the last two exclusive."""
    masks: Tensor
    """(B, h, w), bool: the object itself, which `boxes` holds tightly."""
    eigenvectors: Tensor
    """(B, N): the cut before it is a mask, largest and positive on the object; 0 where there was nothing to cut."""

    def pixel_boxes(self, height: int, width: int) -> Tensor:
        """`boxes` in the pixels of an image of this size that the grid covers, (B, 4), float32."""
        rows, columns = self.masks.shape[1:]
        return self.boxes.float() * self.boxes.new_tensor([width / columns, height / rows] * 2, dtype=torch.float32)


@torch.no_grad()
def discover(features_BND: Tensor, grid: tuple[int, int], tau: float = 0.2) -> Discovery:
    """Cut each image's patches in two and take the part that stands out (TokenCut, arXiv 2202.11539).

    Patches are joined where the cosine of their features exceeds `tau`: affinity 1, else 1e-5. The second smallest y of
    (D - A) y = lambda D y is split at its mean; the side that holds the largest |y| is the object's, and its connected
    component (patches that share an edge) around that largest entry is the object. All images of the batch are solved
    together, on whichever device the features are.

    An image without an object has an answer too: where all patches are alike, or none is like any other, the object is
    the whole image. A feature of 0 has the cosine 0 with all others.

    Args:
        features_BND: of the patches alone, row by row, without class or register tokens; of any float dtype. The method
            takes the keys of an attention block.
        grid: rows and columns of patches, whose product is N.
        tau: the cosine above which two patches are joined, in [-1, 1).

    Example:
        >>> features = torch.tensor([[1.0, 0.0]] * 12).view(1, 3, 4, 2)
        >>> features[0, 1, 1:3] = torch.tensor([0.0, 1.0])
        >>> discover(features.flatten(1, 2), (3, 4)).boxes
        tensor([[1, 1, 3, 2]])
    """
    _check(features_BND, grid, tau)
    images = graphs_at_once(features_BND.shape[1], features_BND.device)
    with torch.autocast(features_BND.device.type, enabled=False):
        parts = [_cut(part_BND, grid, tau) for part_BND in features_BND.split(images)]
    return Discovery(*(torch.cat(values) for values in zip(*parts, strict=True)))


def _cut(features_BND: Tensor, grid: tuple[int, int], tau: float) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes, masks and eigenvectors."""
    joined_BNN = _joined(features_BND, tau)
    y_BN = second_eigenvectors(joined_BNN)
    seed_B = _first_largest(y_BN.abs())
    y_BN = y_BN * torch.where(y_BN.gather(1, seed_B[:, None]) < 0, -1.0, 1.0).to(y_BN)
    side_BN = (y_BN > y_BN.mean(1, keepdim=True) + _ROUNDING) | are_alike(joined_BNN).to(y_BN.device)[:, None]
    masks_Bhw = _component(side_BN.view(-1, *grid), seed_B)
    return boxes_of(masks_Bhw).to(features_BND.device), masks_Bhw.to(features_BND.device), y_BN


def _joined(features_BND: Tensor, tau: float) -> Tensor:
    """Which patches are alike, (B, N, N)."""
    x_BND = features_BND.to(torch.promote_types(features_BND.dtype, torch.float32))
    x_BND = x_BND / x_BND.abs().amax(2, keepdim=True).clamp(min=torch.finfo(x_BND.dtype).tiny)  # squares stay finite
    x_BND = F.normalize(x_BND, dim=2)
    joined_BNN = x_BND @ x_BND.mT > tau
    return joined_BNN & joined_BNN.mT  # rounding may differ on the two sides of the diagonal


def _first_largest(values_BN: Tensor) -> Tensor:
    """The index of the largest value; of those that are equal up to rounding the first, so that devices agree."""
    return (values_BN >= values_BN.amax(1, keepdim=True) * (1 - _ROUNDING)).int().argmax(1)


def _component(masks_Bhw: Tensor, seed_B: Tensor) -> Tensor:
    """The part of each mask that is connected with its seed, over edges and not over corners."""
    reached_BN = torch.zeros_like(masks_Bhw).flatten(1)
    reached_Bhw = reached_BN.scatter_(1, seed_B[:, None], True).view_as(masks_Bhw)
    while True:
        before_Bhw = reached_Bhw
        for _ in range(8):  # between two looks at whether anything has changed, for which a GPU has to wait
            padded = F.pad(reached_Bhw, (1, 1, 1, 1))
            beside = padded[:, 1:-1, :-2] | padded[:, 1:-1, 2:] | padded[:, :-2, 1:-1] | padded[:, 2:, 1:-1]
            reached_Bhw = (reached_Bhw | beside) & masks_Bhw
        if torch.equal(reached_Bhw, before_Bhw):
            return reached_Bhw


def _check(features_BND: Tensor, grid: tuple[int, int], tau: float) -> None:
    shape = tuple(features_BND.shape)
    if features_BND.ndim != 3 or not features_BND.is_floating_point() or 0 in shape:
        raise InvalidArgumentError(
            f"features of shape {shape} and {features_BND.dtype}: expected floats of shape (images, patches, width)"
        )
    if not isinstance(grid, tuple | list) or len(grid) != 2 or not all(isinstance(side, int) for side in grid):
        raise InvalidArgumentError(f"grid={grid!r}: expected rows and columns of patches, such as (14, 14)")
    rows, columns = grid
    if min(grid) < 1 or rows * columns != shape[1]:
        raise InvalidArgumentError(
            f"grid={rows} x {columns} has {rows * columns} patches, the features have {shape[1]} per image: leave out "
            "class and register tokens, and give rows and columns of what is left"
        )
    if not -1 <= tau < 1:
        raise InvalidArgumentError(f"tau={tau}: expected a cosine, at least -1 and below 1")
    broken = (~features_BND.isfinite().flatten(1).all(1)).nonzero().flatten().tolist()
    if broken:
        named = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
        raise InvalidArgumentError(
            f"features of {len(broken)} of {shape[0]} images hold NaN or infinity (images {named}): look at the model "
            "or its precision first"
        )
