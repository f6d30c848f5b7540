"""Features with a class each, to fit a classifier on and to test it with.

Shapes: N samples, width D.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wellposed.errors import DataError, InvalidArgumentError


@dataclass(frozen=True)
class Accuracy:
    """Of a classifier on a test set."""

    top1: float
    """Share of samples, 0 to 1, whose class is the first guess."""
    top5: float
    """Share of samples whose class is among the first five guesses."""

    def __str__(self) -> str:
        return f"top-1 {100 * self.top1:.2f} %, top-5 {100 * self.top5:.2f} %"


@dataclass(frozen=True)
class Labelled:
    """One set of features, checked: finite, at least single precision, with the class of each sample."""

    features_ND: Tensor  # noqa: N815
    labels_N: Tensor  # noqa: N815
    """int64, from 0."""

    @classmethod
    def checked(cls, name: str, features_ND: Tensor, labels_N: Tensor) -> "Labelled":
        """The set; raises InvalidArgumentError, by its `name`, where it cannot be one."""
        if features_ND.ndim != 2 or not features_ND.numel() or not features_ND.is_floating_point():
            raise InvalidArgumentError(
                f"{name}: features are {features_ND.dtype} {tuple(features_ND.shape)}, expected floating point (N, D) "
                "with at least one sample"
            )
        if labels_N.shape != features_ND.shape[:1] or labels_N.is_floating_point() or labels_N.dtype == torch.bool:
            raise InvalidArgumentError(
                f"{name}: labels are {labels_N.dtype} {tuple(labels_N.shape)}, expected integers ({len(features_ND)},)"
            )
        if labels_N.min() < 0:
            raise InvalidArgumentError(f"{name}: there is the label {int(labels_N.min())}, expected classes from 0")
        if not features_ND.isfinite().all():
            rows = (~features_ND.isfinite().all(1)).nonzero().flatten()
            raise InvalidArgumentError(
                f"{name}: {len(rows)} of {len(features_ND)} samples hold NaN or Inf, the first is {int(rows[0])}; the "
                "model's weights or its inputs are broken"
            )
        exact = features_ND if features_ND.dtype == torch.float64 else features_ND.float()
        return cls(exact.detach(), labels_N.to(features_ND.device, torch.int64))


def checked_pair(
    train_ND: Tensor, train_labels_N: Tensor, test_MD: Tensor, test_labels_M: Tensor
) -> tuple[Labelled, Labelled, Tensor]:
    """Both sets, on the device and in the precision of the first, their labels as places in the classes of train.

    The third is these classes, (C,), in ascending order. Raises InvalidArgumentError where the sets do not go together:
    other widths, or a class that only the test set has, which no classifier could ever guess.
    """
    train = Labelled.checked("train", train_ND, train_labels_N)
    test = Labelled.checked("test", test_MD, test_labels_M)
    if train.features_ND.shape[1] != test.features_ND.shape[1]:
        raise InvalidArgumentError(
            f"features of train are {train.features_ND.shape[1]} wide, those of test {test.features_ND.shape[1]}; "
            "expected those of one model and layer"
        )
    test_labels_M = test.labels_N.to(train.labels_N.device)
    classes_C, train_places_N = train.labels_N.unique(return_inverse=True)
    test_places_M = torch.searchsorted(classes_C, test_labels_M).clamp(max=len(classes_C) - 1)
    unknown = test_labels_M[classes_C[test_places_M] != test_labels_M].unique().tolist()
    if unknown:
        raise InvalidArgumentError(
            f"test has {len(unknown)} classes that train has no sample of, such as {unknown[0]}; leave those samples "
            "out, or add some to train"
        )
    return (
        Labelled(train.features_ND, train_places_N),
        Labelled(test.features_ND.to(train.features_ND), test_places_M),
        classes_C,
    )


def accuracy(scores_MC: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
    """For each sample whether its class has the highest score, and whether it is among the five highest.

    Of equal scores the lower class goes first, and a class with score -inf is no guess.
    """
    own_M1 = scores_MC.gather(1, labels_M[:, None])
    classes = torch.arange(scores_MC.shape[1], device=scores_MC.device)
    before = (scores_MC > own_M1) | ((scores_MC == own_M1) & (classes < labels_M[:, None]))
    rank_M = before.sum(1).where(own_M1.squeeze(1) > -torch.inf, scores_MC.shape[1] + 5)
    return rank_M < 1, rank_M < 5


def read_features(folder: Path) -> dict[str, tuple[Labelled, Labelled]]:
    """Train and test set of each layer in a folder of features.

    The folder holds train.safetensors and test.safetensors, each with `labels` (N,) and one or more tensors (N, D) of
    any name, one per layer, the same names in both.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    parts = []
    for split in ("train", "test"):
        path = folder / f"{split}.safetensors"
        try:
            parts.append(load_file(path))
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{path} cannot be read ({error}); expected `labels` (N,) and a tensor (N, D) per layer"
            ) from error
        if "labels" not in parts[-1] or len(parts[-1]) < 2:
            raise DataError(f"{path} holds {', '.join(parts[-1]) or 'nothing'}; expected `labels` and features (N, D)")
    train, test = parts
    if train.keys() != test.keys():
        raise DataError(
            f"the two files in {folder} have different layers; only one of them has "
            f"{', '.join(sorted(train.keys() ^ test.keys()))}"
        )
    return {
        name: (
            Labelled.checked(f"{name} of train", train[name], train["labels"]),
            Labelled.checked(f"{name} of test", test[name], test["labels"]),
        )
        for name in sorted(train.keys() - {"labels"}, key=by_number)
    }


def write_features(folder: Path, layers: Mapping[str, tuple[Labelled, Labelled]]) -> None:
    """Write what `read_features` reads."""
    from safetensors.torch import save_file

    from wellposed.runs import atomic_path

    for number, split in enumerate(("train", "test")):
        sets = {name: pair[number] for name, pair in layers.items()}
        tensors = {name: one.features_ND.cpu().contiguous() for name, one in sets.items()}
        labels = next(iter(sets.values())).labels_N.cpu()
        with atomic_path(folder / f"{split}.safetensors") as temporary:
            save_file({**tensors, "labels": labels}, temporary)


def by_number(name: str) -> tuple[int, str]:
    """Sorts names of layers by the number in them."""
    digits = "".join(character for character in name if character.isdigit())
    return (int(digits) if digits else -1, name)
