"""CorLoc: in how many images the one box that was found fits one of the true ones.

Boxes are left, top, right, bottom, the last two exclusive.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.errors import InvalidArgumentError


def box_iou(boxes_N4: Tensor, truths_K4: Tensor) -> Tensor:
    """Intersection over union of every pair of boxes, (N, K), float64; 0 where both have no area.

    Example:
        >>> box_iou(torch.tensor([[0, 0, 2, 2]]), torch.tensor([[1, 0, 3, 2], [0, 0, 2, 2]])).tolist()
        [[0.3333333333333333, 1.0]]
    """
    for name, boxes in (("boxes", boxes_N4), ("truths", truths_K4)):
        if boxes.ndim != 2 or boxes.shape[1] != 4:
            raise InvalidArgumentError(f"{name} of shape {tuple(boxes.shape)}: expected (number, 4)")
    a_N14, b_1K4 = boxes_N4.double()[:, None], truths_K4.double()[None].to(boxes_N4.device)
    low, high = torch.maximum(a_N14[..., :2], b_1K4[..., :2]), torch.minimum(a_N14[..., 2:], b_1K4[..., 2:])
    shared_NK = (high - low).clamp(min=0).prod(2)
    union_NK = _area(a_N14) + _area(b_1K4) - shared_NK
    return torch.where(union_NK > 0, shared_NK / union_NK, 0.0)


def best_iou(boxes_B4: Tensor, truths: Sequence[Tensor]) -> Tensor:
    """(B,), float64: how well each image's box fits the true one it fits best; 0 where the image has none.

    Args:
        boxes_B4: one box an image.
        truths: of each image (K, 4), its true boxes.
    """
    if len(boxes_B4) != len(truths):
        raise InvalidArgumentError(f"{len(boxes_B4)} boxes and {len(truths)} images of true ones: expected one each")
    best = [
        box_iou(box[None], truth).amax() if len(truth) else 0.0 for box, truth in zip(boxes_B4, truths, strict=True)
    ]
    return torch.tensor([float(value) for value in best], dtype=torch.float64)


def corloc(boxes_B4: Tensor, truths: Sequence[Tensor]) -> float:
    """The part of the images, of those that have an object, whose box has an IoU of at least 0.5 with a true one.

    Args:
        boxes_B4: one box an image.
        truths: of each image (K, 4), its true boxes; images without any are left out.

    Example:
        >>> truths = [torch.tensor([[0, 0, 2, 4]]), torch.tensor([[4, 4, 5, 5]])]
        >>> corloc(torch.tensor([[0, 0, 2, 2], [0, 0, 1, 1]]), truths)
        0.5
    """
    hits = best_iou(boxes_B4, truths) >= 0.5
    counted = torch.tensor([len(truth) > 0 for truth in truths], dtype=torch.bool)
    if not counted.any():
        raise InvalidArgumentError(f"none of {len(truths)} images has a true box: there is nothing to measure")
    return float(hits[counted].double().mean())


def _area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)
