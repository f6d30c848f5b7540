"""Scores of a classifier from its confusion matrix, in which counts of several processes can be added."""

from math import sqrt

from torch import Tensor


def confusion(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """How often each class (row) was taken for each (column), (classes, classes).

    Example:
        >>> import torch
        >>> confusion(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2).tolist()
        [[1, 1], [0, 1]]
    """
    return (labels * classes + predicted).bincount(minlength=classes**2).view(classes, classes)


def scores(counts: Tensor) -> dict[str, float]:
    """Accuracy, and for two classes Matthews' correlation (CoLA's score) and the F1 of the second class (MRPC's).

    Both are 0 where they are not defined, as scikit-learn has it: nothing of a class is there, or nothing is predicted.

    Example:
        >>> import torch
        >>> {name: round(score, 4) for name, score in scores(torch.tensor([[6, 2], [1, 3]])).items()}
        {'accuracy': 0.75, 'matthews': 0.4781, 'f1': 0.6667}
    """
    counts = counts.double()
    found = {"accuracy": float(counts.diagonal().sum() / counts.sum())}
    if len(counts) != 2:
        return found
    (negative, wrong), (missed, right) = counts.tolist()
    sides = (right + wrong) * (right + missed) * (negative + wrong) * (negative + missed)
    either = 2 * right + wrong + missed
    found["matthews"] = (right * negative - wrong * missed) / sqrt(sides) if sides else 0.0
    found["f1"] = 2 * right / either if either else 0.0
    return found
