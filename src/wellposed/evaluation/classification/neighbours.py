"""k-NN on frozen features: what they know without any training.

The weighted vote is that of DINO (arXiv 2104.14294): the k nearest samples by cosine similarity s vote for their class
with weight exp(s / temperature). With weighted=False every neighbour has one vote.

Shapes: N samples to learn from, M to classify, width D, C classes.
"""

import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import InvalidArgumentError
from wellposed.evaluation.labelled import Accuracy, accuracy, checked_pair

# Similarities held at once: 256 MiB of float32.
_TOGETHER = 2**26


def knn(
    train_ND: Tensor,
    train_labels_N: Tensor,
    test_MD: Tensor,
    test_labels_M: Tensor,
    k: int | Sequence[int] = 20,
    temperature: float = 0.07,
    *,
    weighted: bool = True,
) -> dict[int, Accuracy]:
    """Accuracy of the k nearest neighbours, for each k.

    Works on the device of `train_ND`, in float32 or float64, and never holds more than 2^26 similarities. A class that
    none of the k neighbours belongs to is no guess, so top-5 may count fewer than five.

    Args:
        train_ND: features of the samples that vote.
        train_labels_N: their classes.
        test_MD: features of the samples to classify.
        test_labels_M: their classes.
        k: how many neighbours vote; or several numbers of them.
        temperature: of the weights.
        weighted: weigh votes by similarity, or count them.
    """
    train, test, classes_C = checked_pair(train_ND, train_labels_N, test_MD, test_labels_M)
    ks = checked_neighbours(k, temperature)
    if max(ks) > len(train.labels_N):
        raise InvalidArgumentError(f"k={k}: expected 1 to {len(train.labels_N)}, the number of samples in train")
    units_ND, queries_MD = (F.normalize(part.features_ND, dim=1) for part in (train, test))
    right = torch.zeros(len(ks), 2, dtype=torch.int64, device=units_ND.device)
    step = max(1, _TOGETHER // max(len(units_ND), len(classes_C)))
    for queries_BD, labels_B in zip(queries_MD.split(step), test.labels_N.split(step), strict=True):
        nearest_BK, index_BK = (queries_BD @ units_ND.T).topk(max(ks), dim=1)
        classes_BK = train.labels_N[index_BK]
        weights_BK = ((nearest_BK - nearest_BK[:, :1]) / temperature).exp() if weighted else torch.ones_like(nearest_BK)
        for row, voters in enumerate(ks):
            scores_BC = weights_BK.new_zeros(len(labels_B), len(classes_C))
            scores_BC.scatter_add_(1, classes_BK[:, :voters], weights_BK[:, :voters])
            first, among_five = accuracy(scores_BC.where(scores_BC > 0, -torch.inf), labels_B)
            right[row] += torch.stack([first.sum(), among_five.sum()])
    shares = (right.double() / len(test.labels_N)).tolist()
    return {voters: Accuracy(*share) for voters, share in zip(ks, shares, strict=True)}


def checked_neighbours(k: int | Sequence[int], temperature: float) -> list[int]:
    """The numbers of neighbours, once they and the temperature can be."""
    try:
        ks = [operator.index(one) for one in ([k] if not isinstance(k, Sequence) else k)]
    except TypeError:
        ks = []
    if not ks or min(ks) < 1 or isinstance(k, bool):
        raise InvalidArgumentError(f"k={k}: expected whole numbers, at least 1")
    if not 0 < temperature < math.inf:
        raise InvalidArgumentError(f"temperature={temperature}: expected a number above 0")
    return ks
