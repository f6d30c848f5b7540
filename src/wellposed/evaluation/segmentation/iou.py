"""How well predicted masks agree with true ones: intersection over union, from a confusion matrix.

Shapes: K classes; confusion_KK counts pixels, rows by their true class, columns by the predicted one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InvalidArgumentError

IGNORED = 255


@dataclass(frozen=True)
class Agreement:
    """What a confusion matrix says."""

    mean_iou: float
    """The mean over the classes that occur in truth or prediction; classes that occur in neither are left out."""
    class_iou: tuple[float | None, ...]
    """Of each class, None where it occurs in neither."""
    pixel_accuracy: float
    """The part of the pixels with a class that is predicted rightly."""


def confusion(predicted: Tensor, truth: Tensor, classes: int, ignored: int = IGNORED) -> Tensor:
    """(K, K) int64 on the tensors' device: how many pixels of each class were predicted as each.

    Args:
        predicted: classes, of any integer type and any shape.
        truth: the true classes, of the same shape; pixels that are `ignored` do not count.
        classes: their number K.
        ignored: the value in `truth` that stands for no class.

    Example:
        >>> confusion(torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 0, 255]), 2).tolist()
        [[1, 1], [0, 1]]
    """
    if predicted.shape != truth.shape:
        raise InvalidArgumentError(
            f"predicted is {tuple(predicted.shape)}, truth is {tuple(truth.shape)}: expected the same shape"
        )
    counted = truth != ignored
    pairs = torch.stack([truth[counted], predicted[counted]]).long()
    for name, values in zip(("truth", "predicted"), pairs, strict=True):
        wrong = values[(values < 0) | (values >= classes)]
        if len(wrong):
            raise InvalidArgumentError(f"{name} holds the class {int(wrong[0])}: expected 0 to {classes - 1}")
    return torch.bincount(pairs[0] * classes + pairs[1], minlength=classes**2).view(classes, classes)


def mean_iou(confusion_KK: Tensor) -> float:
    """The mean intersection over union of the classes that occur in truth or prediction.

    Example:
        >>> round(mean_iou(torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])), 3)
        0.5
    """
    return agreement(confusion_KK).mean_iou


def agreement(confusion_KK: Tensor) -> Agreement:
    """Intersection over union of every class and the mean of them, and the pixel accuracy.

    Where no pixel has a class there is nothing to agree on, and the numbers are nan.
    """
    counts = confusion_KK.double().cpu()
    hits, union = counts.diagonal(), counts.sum(0) + counts.sum(1) - counts.diagonal()
    seen = union > 0
    return Agreement(
        mean_iou=float((hits[seen] / union[seen]).mean()),
        class_iou=tuple(float(h / u) if u else None for h, u in zip(hits, union, strict=True)),
        pixel_accuracy=float(hits.sum() / counts.sum()),
    )


def most_frequent(truth_KK: Tensor) -> Tensor:
    """The confusion matrix that predicting the class `truth_KK` has most of everywhere would have given."""
    totals = truth_KK.sum(1)
    guessed = torch.zeros_like(truth_KK)
    guessed[:, totals.argmax()] = totals
    return guessed
