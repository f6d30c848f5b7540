"""The linear probe against scikit-learn's logistic regression, and the schedule of DINO."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn import functional as F

from test_neighbours import clusters, digits
from wellposed.data import ImageSet, open_data
from wellposed.errors import InvalidArgumentError
from wellposed.evaluation.classification.linear import _held_out, linear_probe
from wellposed.evaluation.classification.linear_protocols import DinoSgd, Lbfgs
from wellposed.evaluation.labelled import accuracy

REAL = Path(os.environ.get("WELLPOSED_DATA", Path(__file__).parents[2] / "shared" / "data"))


def logistic(l2: float, count: int, **options: Any) -> LogisticRegression:
    return LogisticRegression(C=1 / (l2 * count), max_iter=10_000, tol=1e-10, **options)


@pytest.mark.parametrize("l2", [1e-1, 1e-3])
@pytest.mark.parametrize("classes", [2, 6])
def test_the_weights_are_scikit_learns(l2: float, classes: int) -> None:
    (train, labels), (test, truth) = clusters(300, classes, seed=1), clusters(200, classes, seed=2)
    found = linear_probe(train, labels, test, truth, Lbfgs(l2=(l2,), standardize=False))
    assert found.converged
    # scikit-learn has one column of weights for two classes; as two, opposite ones, they have half the squared norm.
    reference = logistic(l2 / 2 if classes == 2 else l2, 300).fit(train, labels)
    logits = test @ found.weight_DC + found.bias_C
    expected = torch.from_numpy(reference.predict_log_proba(test))
    torch.testing.assert_close(logits.log_softmax(1), expected, atol=1e-4, rtol=1e-4)
    assert found.accuracy.top1 == (logits.argmax(1) == truth).double().mean()


def test_standardized_features_are_those_of_a_pipeline() -> None:
    (train, labels), (test, truth) = digits("train"), digits("test")
    train = torch.cat([1e3 * train[:, :20] + 1e4, train[:, 20:]], 1)
    test = torch.cat([1e3 * test[:, :20] + 1e4, test[:, 20:]], 1)
    found = linear_probe(train, labels, test, truth, Lbfgs(l2=(1e-3,)))
    assert found.converged
    reference = make_pipeline(StandardScaler(), logistic(1e-3, len(train))).fit(train, labels)
    expected = torch.from_numpy(reference.predict_log_proba(test))
    logits = test @ found.weight_DC + found.bias_C
    torch.testing.assert_close(logits.log_softmax(1), expected, atol=2e-3, rtol=1e-3)
    assert found.accuracy.top1 == reference.score(test, truth)


def test_the_strength_is_chosen_on_what_is_held_out() -> None:
    """Many useless features and some wrong labels: without a penalty the classifier learns the noise."""
    generator = torch.Generator().manual_seed(3)
    truth = torch.arange(240) % 4
    centres = 2.0 * torch.eye(4, 100, dtype=torch.float64)
    train, test = (centres[truth] + torch.randn(240, 100, generator=generator, dtype=torch.float64) for _ in range(2))
    wrong = torch.rand(240, generator=generator) < 0.2
    labels = torch.where(wrong, torch.randint(0, 4, (240,), generator=generator), truth)
    alone = {l2: linear_probe(train, labels, test, truth, Lbfgs(l2=(l2,))) for l2 in (1.0, 1e-6)}
    assert alone[1.0].accuracy.top1 > alone[1e-6].accuracy.top1 + 0.1
    found = linear_probe(train, labels, test, truth, Lbfgs(l2=(1e-6, 1.0), holdout=0.3))
    assert found.l2 == 1.0
    assert found.accuracy == alone[1.0].accuracy
    assert torch.equal(found.weight_DC, alone[1.0].weight_DC)
    assert "l2 of 1e-06, 1 chosen on 30 % of train" in str(found)


def test_what_is_held_out() -> None:
    labels = torch.tensor([0] * 50 + [1] * 20 + [2] * 2 + [3])[torch.randperm(73)]
    held = _held_out(labels, Lbfgs(holdout=0.2))
    assert labels[held].bincount(minlength=4).tolist() == [10, 4, 1, 0]
    assert torch.equal(held, _held_out(labels, Lbfgs(holdout=0.2)))
    assert not torch.equal(held, _held_out(labels, Lbfgs(holdout=0.2, seed=1)))
    with pytest.raises(InvalidArgumentError, match="give one l2 alone"):
        linear_probe(torch.eye(3), torch.arange(3), torch.eye(3), torch.arange(3))
    assert (
        linear_probe(torch.eye(3), torch.arange(3), torch.eye(3), torch.arange(3), Lbfgs(l2=(0.1,))).accuracy.top1 == 1
    )


def test_the_usual_probe_on_digits_in_every_precision() -> None:
    (train, labels), (test, truth) = digits("train"), digits("test")
    exact = linear_probe(train, labels, test, truth)
    assert exact.accuracy.top1 > 0.95
    assert exact.accuracy.top5 >= exact.accuracy.top1
    for dtype in (torch.float32, torch.bfloat16):
        found = linear_probe(train.to(dtype), labels, test.to(dtype), truth)
        assert found.weight_DC.dtype == torch.float32
        assert found.accuracy.top1 == pytest.approx(exact.accuracy.top1, abs=0.01)
        assert found.converged


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    (train, labels), (test, truth) = digits("train"), digits("test")
    for protocol in (Lbfgs(l2=(1e-3,)), DinoSgd(lr=0.1, epochs=10)):
        exact = linear_probe(train, labels, test, truth, protocol)
        found = linear_probe(train.cuda(), labels.cuda(), test, truth, protocol)
        assert found.weight_DC.is_cuda
        assert found.accuracy.top1 == pytest.approx(exact.accuracy.top1, abs=0.01)


def test_constant_features_and_missing_classes_do_no_harm() -> None:
    (train, labels), (test, truth) = clusters(100, 4, seed=1), clusters(50, 4, seed=2)
    plain = linear_probe(train, labels, test, truth, Lbfgs(l2=(1e-2,)))
    constant = torch.full((100, 1), 1 / 3, dtype=torch.float64)
    wide = linear_probe(
        torch.cat([train, constant], 1), labels, torch.cat([test, constant[:50]], 1), truth, Lbfgs(l2=(1e-2,))
    )
    assert wide.accuracy == plain.accuracy
    assert wide.weight_DC[-1].abs().max() == 0
    apart = linear_probe(train, labels * 100 + 3, test, truth * 100 + 3, Lbfgs(l2=(1e-2,)))
    assert apart.accuracy == plain.accuracy
    assert apart.classes_C.tolist() == [3, 103, 203, 303]


def test_gradients_may_be_off_around_it() -> None:
    (train, labels), (test, truth) = clusters(60, 3, seed=1), clusters(30, 3, seed=2)
    for protocol in (Lbfgs(l2=(1e-2,)), DinoSgd(epochs=2)):
        plain = linear_probe(train, labels, test, truth, protocol)
        with torch.no_grad():
            assert torch.equal(linear_probe(train, labels, test, truth, protocol).weight_DC, plain.weight_DC)


def test_the_schedule_of_dino() -> None:
    """The same steps, written out with a Linear layer and a learning rate by hand."""
    (train, labels), (test, truth) = clusters(300, 5, seed=1), clusters(100, 5, seed=2)
    train, test = train.float(), test.float()
    settings = DinoSgd(lr=0.05, epochs=4, batch_size=128, seed=2)
    found = linear_probe(train, labels, test, truth, settings)
    generator = torch.Generator().manual_seed(2)
    weight = 0.01 * torch.randn(6, 5, generator=generator)
    bias, momentum = torch.zeros(5), [torch.zeros(6, 5), torch.zeros(5)]
    for epoch in range(4):
        lr = 0.05 * 128 / 256 * (1 + torch.tensor(torch.pi * epoch / 4).cos()) / 2
        order = torch.randperm(300, generator=generator)
        for batch in (order[:128], order[128:256]):
            slope = (train[batch] @ weight + bias).softmax(1) - F.one_hot(labels[batch], 5)
            gradients = [train[batch].T @ slope / 128, slope.mean(0)]
            momentum = [0.9 * m + g for m, g in zip(momentum, gradients, strict=True)]
            weight, bias = weight - lr * momentum[0], bias - lr * momentum[1]
    torch.testing.assert_close(found.weight_DC, weight, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.bias_C, bias, atol=1e-5, rtol=1e-4)
    assert "4 epochs, batch 128" in str(found)


def test_both_protocols_agree_where_the_answer_is_clear() -> None:
    (train, labels), (test, truth) = clusters(300, 5, seed=1, spread=0.3), clusters(100, 5, seed=2, spread=0.3)
    assert linear_probe(train, labels, test, truth, "lbfgs").accuracy.top1 > 0.98
    assert linear_probe(train, labels, test, truth, DinoSgd(lr=0.1)).accuracy.top1 > 0.98


def test_ranks() -> None:
    scores = torch.tensor([[3.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.0], [0.0, -torch.inf, 5.0, 1.0, 1.0, 1.0, 1.0]])
    for label, (first, five) in {0: (True, True), 2: (False, True), 4: (False, True), 5: (False, False)}.items():
        assert [bool(found[0]) for found in accuracy(scores[:1], torch.tensor([label]))] == [first, five]
    assert not accuracy(scores[1:, :3], torch.tensor([1]))[1], "minus infinity is no guess"


def test_cifar_pixels() -> None:
    if not (REAL / "cifar-10-batches-bin").is_dir():
        pytest.skip(f"CIFAR-10 is not in {REAL}")
    data = open_data(f"cifar10:{REAL / 'cifar-10-batches-bin'}", "test")
    assert isinstance(data, ImageSet)
    pixels: Tensor = F.avg_pool2d(data.images.float(), 4).flatten(1)
    train, labels, test, truth = pixels[:5000], data.labels[:5000], pixels[5000:], data.labels[5000:]
    found = linear_probe(train, labels, test, truth, Lbfgs(l2=(1e-3,)))
    reference = make_pipeline(StandardScaler(), logistic(1e-3, 5000)).fit(train.double(), labels)
    assert found.converged
    assert found.accuracy.top1 == pytest.approx(reference.score(test.double(), truth), abs=0.002)
    assert 0.3 < found.accuracy.top1 < 0.45


# --- what cannot be


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Lbfgs(l2=()), r"l2=\(\)"),
        (lambda: Lbfgs(l2=(-1.0,)), "at least 0"),
        (lambda: Lbfgs(holdout=1.0), "holdout=1.0"),
        (lambda: DinoSgd(lr=0.0), "lr=0.0"),
        (lambda: DinoSgd(epochs=0), "epochs=0"),
        (lambda: "ridge", "protocol='ridge': expected one of lbfgs, dino"),
        (lambda: DinoSgd(lr=1e300), "diverged"),
    ],
)
def test_bad_protocols(make: Any, match: str) -> None:
    (train, labels), (test, truth) = clusters(50, 5, seed=1), clusters(20, 5, seed=2)
    with pytest.raises(InvalidArgumentError, match=match):
        linear_probe(1e9 * train, labels, test, truth, make())


def test_bad_input() -> None:
    (train, labels), (test, truth) = clusters(50, 5, seed=1), clusters(20, 5, seed=2)
    with pytest.raises(InvalidArgumentError, match="one class only"):
        linear_probe(train, torch.zeros_like(labels), test, torch.zeros_like(truth))
    with pytest.raises(InvalidArgumentError, match="NaN"):
        linear_probe(train * torch.nan, labels, test, truth)
    with pytest.raises(InvalidArgumentError, match="no sample of, such as 5"):
        linear_probe(train, labels, test, truth + 4)
    with pytest.raises(InvalidArgumentError, match="wide"):
        linear_probe(train, labels, test[:, :3], truth)
