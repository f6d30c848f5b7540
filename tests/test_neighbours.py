"""k-NN against scikit-learn, against votes counted by hand, and on what cannot be."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import top_k_accuracy_score
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from wellposed.data import ImageSet, open_data
from wellposed.errors import InvalidArgumentError
from wellposed.evaluation.classification import neighbours
from wellposed.evaluation.classification.neighbours import knn

REAL = Path(os.environ.get("WELLPOSED_DATA", Path(__file__).parents[2] / "shared" / "data"))


def digits(split: str) -> tuple[Tensor, Tensor]:
    data = open_data("digits", split)
    assert isinstance(data, ImageSet)
    return data.images.flatten(1).double(), data.labels


def clusters(count: int, classes: int, seed: int, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    """Overlapping clusters around the same centres for every seed."""
    centres = torch.randn(classes, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    noise = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return centres[labels] + spread * noise, labels


@pytest.mark.parametrize("k", [1, 5, 20])
def test_the_plain_vote_is_scikit_learns(k: int) -> None:
    for (train, labels), (test, truth) in (
        (digits("train"), digits("test")),
        (clusters(400, 7, seed=1), clusters(300, 7, seed=2)),
    ):
        reference = KNeighborsClassifier(k, metric="cosine", algorithm="brute").fit(train, labels)
        found = knn(train, labels, test, truth, k, weighted=False)[k]
        assert found.top1 == reference.score(test, truth)


@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_the_weighted_vote_is_scikit_learns_with_those_weights(temperature: float) -> None:
    (train, labels), (test, truth) = clusters(400, 7, seed=1), clusters(300, 7, seed=2)

    def weights(distances: Any) -> Any:
        return np.exp((1 - distances) / temperature)

    reference = KNeighborsClassifier(20, metric="cosine", algorithm="brute", weights=weights).fit(train, labels)
    found = knn(train, labels, test, truth, 20, temperature)[20]
    assert found.top1 == reference.score(test, truth)
    assert found.top1 != knn(train, labels, test, truth, 20, weighted=False)[20].top1
    expected = reference.predict_proba(test)
    assert found.top5 == pytest.approx(top_k_accuracy_score(truth, expected, k=5), abs=0.02)
    voted = (np.argsort(-expected, axis=1, kind="stable")[:, :5] == truth.numpy()[:, None]).any(1)
    voted &= expected[np.arange(300), truth] > 0  # a class without a vote is no guess
    assert found.top5 == voted.mean()


def test_a_class_without_a_vote_is_no_guess() -> None:
    train, labels = torch.eye(8).double(), torch.arange(8)
    test, truth = torch.eye(8).double()[:2] + 0.1, torch.tensor([0, 5])
    assert knn(train, labels, test, truth, 1)[1].top5 == 0.5


def test_several_k_at_once_are_the_same_as_one_by_one() -> None:
    (train, labels), (test, truth) = clusters(200, 5, seed=1), clusters(100, 5, seed=2)
    together = knn(train, labels, test, truth, (1, 10, 50, 200))
    assert list(together) == [1, 10, 50, 200]
    assert together == {k: knn(train, labels, test, truth, k)[k] for k in together}
    assert len({found.top1 for found in together.values()}) > 1


def test_memory_stays_bounded_whatever_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    (train, labels), (test, truth) = clusters(200, 5, seed=1), clusters(100, 5, seed=2)
    whole = knn(train, labels, test, truth, (3, 20))
    largest = 0
    original = torch.Tensor.topk

    def watched(self: Tensor, *arguments: Any, **options: Any) -> Any:
        nonlocal largest
        largest = max(largest, self.numel())
        return original(self, *arguments, **options)

    monkeypatch.setattr(neighbours, "_TOGETHER", 700)
    monkeypatch.setattr(torch.Tensor, "topk", watched)
    assert knn(train, labels, test, truth, (3, 20)) == whole
    assert largest == 600


def test_scale_and_labels_do_not_matter() -> None:
    (train, labels), (test, truth) = clusters(200, 5, seed=1), clusters(100, 5, seed=2)
    plain = knn(train, labels, test, truth)
    scales = torch.rand(200, 1, dtype=torch.float64) + 0.1
    assert knn(train * scales, labels, 1e-3 * test, truth) == plain
    assert knn(train, labels * 10**12 + 7, test, truth * 10**12 + 7) == plain, "a label is a name, not a size"
    assert knn(train, labels.to(torch.uint8), test, truth.to(torch.int32)) == plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_come_close(dtype: torch.dtype) -> None:
    (train, labels), (test, truth) = digits("train"), digits("test")
    exact = knn(train, labels, test, truth)[20]
    found = knn(train.to(dtype), labels, test.to(dtype), truth)[20]
    assert found.top1 == pytest.approx(exact.top1, abs=0.01)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    (train, labels), (test, truth) = digits("train"), digits("test")
    exact = knn(train, labels, test, truth, (1, 20))
    for k, found in knn(train.cuda(), labels, test, truth, (1, 20)).items():
        assert (found.top1, found.top5) == pytest.approx((exact[k].top1, exact[k].top5), abs=1e-9)


def test_cifar_pixels() -> None:
    if not (REAL / "cifar-10-batches-bin").is_dir():
        pytest.skip(f"CIFAR-10 is not in {REAL}")
    test = open_data(f"cifar10:{REAL / 'cifar-10-batches-bin'}", "test")
    assert isinstance(test, ImageSet)
    pixels = test.images.flatten(1).float()
    pixels -= pixels.mean(0)
    found = knn(pixels[:8000], test.labels[:8000], pixels[8000:], test.labels[8000:])[20]
    reference = KNeighborsClassifier(20, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07))
    expected = reference.fit(pixels[:8000], test.labels[:8000]).score(pixels[8000:], test.labels[8000:])
    assert found.top1 == pytest.approx(expected, abs=0.002)
    assert 0.3 < found.top1 < 0.45, "what pixels know"


# --- what cannot be


def good() -> dict[str, Any]:
    (train, labels), (test, truth) = clusters(50, 5, seed=1), clusters(20, 5, seed=2)
    return {"train_ND": train, "train_labels_N": labels, "test_MD": test, "test_labels_M": truth, "k": 5}


def changed(name: str, index: int, value: float) -> dict[str, Any]:
    tensor = good()[name].clone()
    tensor[index] = value
    return {name: tensor}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (changed("train_labels_N", 3, -1), "train: there is the label -1"),
        (changed("test_labels_M", 3, 9), "test has 1 classes that train has no sample of, such as 9"),
        (changed("train_ND", 7, float("nan")), "train: 1 of 50 samples hold NaN or Inf, the first is 7"),
        (changed("test_MD", 2, float("inf")), "test: 1 of 20 samples hold NaN or Inf"),
        ({"train_ND": torch.zeros(0, 6), "train_labels_N": torch.zeros(0, dtype=torch.long)}, "at least one sample"),
        ({"test_MD": torch.zeros(0, 6), "test_labels_M": torch.zeros(0, dtype=torch.long)}, "at least one sample"),
        ({"test_MD": torch.zeros(20, 7)}, "train are 6 wide, those of test 7"),
        ({"train_labels_N": torch.zeros(49, dtype=torch.long)}, r"expected integers \(50,\)"),
        ({"train_labels_N": torch.zeros(50)}, "expected integers"),
        ({"train_ND": torch.zeros(50, 6, dtype=torch.long)}, "expected floating point"),
        ({"train_ND": torch.zeros(50, 2, 3)}, "expected floating point"),
        ({"k": 51}, "k=51: expected 1 to 50"),
        ({"k": (5, 0)}, "expected whole numbers, at least 1"),
        ({"k": ()}, "expected whole numbers"),
        ({"k": 2.5}, "expected whole numbers"),
        ({"k": True}, "expected whole numbers"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
    ],
    ids=str,
)
def test_bad_input(change: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        knn(**(good() | change))
