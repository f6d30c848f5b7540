"""A linear classifier on frozen features, by one of the protocols in `linear_protocols`.

Shapes: N samples, width D, C classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import InvalidArgumentError
from wellposed.evaluation.classification.linear_protocols import PROTOCOLS, DinoSgd, Lbfgs, Name, Protocol
from wellposed.evaluation.labelled import Accuracy, Labelled, accuracy, checked_pair
from wellposed.runs import tracked

# Logits held at once in testing: 256 MiB of float32.
_TOGETHER = 2**26
# Steps after which the curvature is looked at again.
_BETWEEN = 100


@dataclass(frozen=True)
class LinearProbe:
    """A fitted linear classifier, and how well it does."""

    accuracy: Accuracy
    protocol: str
    """What was done, in words."""
    classes_C: Tensor  # noqa: N815
    """The classes of train, which the columns below belong to."""
    weight_DC: Tensor  # noqa: N815
    """Of the features as they were given: logits are features @ weight + bias."""
    bias_C: Tensor  # noqa: N815
    l2: float | None = None
    """The strength that was chosen, of "lbfgs"."""
    converged: bool = True
    """Whether "lbfgs" reached its optimum within its steps."""

    def __str__(self) -> str:
        chosen = f"; l2 {self.l2:g}" if self.l2 is not None else ""
        return f"{self.accuracy} ({self.protocol}{chosen}{'' if self.converged else '; not converged'})"


def linear_probe(
    train_ND: Tensor,
    train_labels_N: Tensor,
    test_MD: Tensor,
    test_labels_M: Tensor,
    protocol: Name | Protocol = "lbfgs",
) -> LinearProbe:
    """Fit a linear classifier to train and test it, on the device of `train_ND`, in float32 or float64.

    Args:
        train_ND: features to learn from.
        train_labels_N: their classes.
        test_MD: features to classify.
        test_labels_M: their classes.
        protocol: one of `PROTOCOLS`, or one with other settings.
    """
    if isinstance(protocol, str) and protocol not in PROTOCOLS:
        raise InvalidArgumentError(f"protocol={protocol!r}: expected one of {', '.join(PROTOCOLS)}")
    settings = PROTOCOLS[protocol] if isinstance(protocol, str) else protocol
    train, test, classes_C = checked_pair(train_ND, train_labels_N, test_MD, test_labels_M)
    class_count = len(classes_C)
    if class_count < 2:
        raise InvalidArgumentError("there is one class only: expected two or more to tell apart")
    l2, converged = None, True
    if isinstance(settings, Lbfgs):
        l2 = _chosen_l2(train, class_count, settings)
        weight_DC, bias_C, converged = _logistic_regression(train, class_count, [l2], settings)[-1]
    else:
        weight_DC, bias_C = _trained(train, class_count, settings)
    found, _ = _tested(test, weight_DC, bias_C)
    return LinearProbe(found, str(settings), classes_C, weight_DC, bias_C, l2, converged)


def _chosen_l2(train: Labelled, class_count: int, settings: Lbfgs) -> float:
    """The strength with the best accuracy on the held-out part; of equal ones that with the smaller loss."""
    if len(settings.l2) == 1:
        return settings.l2[0]
    held_N = _held_out(train.labels_N, settings)
    parts = [Labelled(train.features_ND[mask], train.labels_N[mask]) for mask in (~held_N, held_N)]
    strengths = sorted(settings.l2, reverse=True)
    fits = _logistic_regression(parts[0], class_count, strengths, settings)
    results = [_tested(parts[1], weight, bias) for weight, bias, _ in fits]
    ranking = [(-found.top1, loss) for found, loss in results]
    return strengths[ranking.index(min(ranking))]


def _held_out(labels_N: Tensor, settings: Lbfgs) -> Tensor:
    """Which samples are held out: that share of every class, at least one where there are two."""
    order = torch.randperm(len(labels_N), generator=torch.Generator().manual_seed(settings.seed))
    labels = labels_N.cpu()[order]
    # Within each class, in the random order: 0, 1, 2, ...
    by_class = labels.argsort(stable=True)
    counts = labels.bincount()
    place = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[by_class]]
    share = (counts * settings.holdout).round().long().clamp(min=1).minimum(counts - 1)
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[order[by_class]] = place < share[labels[by_class]]
    if not held.any():
        raise InvalidArgumentError(
            "train has one sample of each class, so none can be held out to choose l2 on; give one l2 alone"
        )
    return held.to(labels_N.device)


def _logistic_regression(
    train: Labelled, class_count: int, strengths: list[float], settings: Lbfgs
) -> list[tuple[Tensor, Tensor, bool]]:
    """Weights, bias and whether they are optimal for each strength; each begins where the one before ended."""
    x_ND = train.features_ND
    shift_D, scale_D = x_ND.mean(0), torch.ones_like(x_ND[0])  # with a bias, the shift changes no optimum
    if settings.standardize:
        deviation_D = x_ND.std(0, correction=0)
        # A feature that is constant up to rounding says nothing.
        rounding_D = 8 * torch.finfo(x_ND.dtype).eps * shift_D.abs()
        scale_D = deviation_D.where(deviation_D > rounding_D, torch.inf).reciprocal()
    x_ND = (x_ND - shift_D) * scale_D
    spectrum = torch.linalg.eigh((x_ND.T @ x_ND).double() / len(x_ND))
    weight_DC = spectrum.eigenvectors.new_zeros(x_ND.shape[1], class_count)
    bias_C = weight_DC.new_zeros(class_count)
    fits = []
    for l2 in strengths:
        converged, steps = False, 0
        while not converged and steps < settings.max_iter:
            weight_DC, bias_C, converged = _descended(x_ND, train.labels_N, weight_DC, bias_C, l2, spectrum)
            steps += _BETWEEN
        own_DC = weight_DC * scale_D.double()[:, None]
        own_bias_C = bias_C - shift_D.double() @ own_DC
        fits.append((own_DC.to(x_ND.dtype), own_bias_C.to(x_ND.dtype), converged))
    return fits


def _descended(
    x_ND: Tensor, labels_N: Tensor, weight_DC: Tensor, bias_C: Tensor, l2: float, spectrum: Any
) -> tuple[Tensor, Tensor, bool]:
    """Weights and bias after some steps of L-BFGS, and whether they are optimal.

    The steps are taken in variables v and u in which the curvature, where they begin, is about 1 in every direction:
    W = basis x root x v, b = u / sqrt(spread), for centred features with covariance `spectrum`.
    """
    values_D, basis_DD = spectrum

    # Only products with the features are in their precision: sums in float32 would hide the last descents.
    def logits(weight_DC: Tensor, bias_C: Tensor) -> Tensor:
        return (x_ND @ weight_DC.to(x_ND.dtype)).double() + bias_C

    p_NC = logits(weight_DC, bias_C).softmax(1)
    spread = float((p_NC * (1 - p_NC)).mean().clamp(min=1e-9))
    root_D1 = (spread * values_D.clamp(min=1e-9 * float(values_D.max())) + l2).clamp(min=1e-12).rsqrt()[:, None]
    v_DC = (basis_DD.T @ weight_DC / root_D1).requires_grad_()
    u_C = (bias_C * spread**0.5).requires_grad_()

    def loss() -> Tensor:
        weight_DC = basis_DD @ (root_D1 * v_DC)
        fit = F.cross_entropy(logits(weight_DC, u_C / spread**0.5), labels_N)
        return fit + l2 / 2 * weight_DC.square().sum()

    converged = _minimized(loss, [v_DC, u_C], tolerance=1e-4 if x_ND.dtype == torch.float32 else 1e-6)
    return basis_DD @ (root_D1 * v_DC.detach()), u_C.detach() / spread**0.5, converged


def _minimized(loss: Callable[[], Tensor], parameters: list[Tensor], tolerance: float) -> bool:
    """Make `loss` smaller by changing `parameters`; whether every gradient ended below `tolerance`."""
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=_BETWEEN,
        max_eval=2 * _BETWEEN,
        history_size=20,
        tolerance_grad=tolerance / 10,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
        closure()
    return all(bool(parameter.grad.abs().max() <= tolerance) for parameter in parameters if parameter.grad is not None)


def _trained(train: Labelled, class_count: int, settings: DinoSgd) -> tuple[Tensor, Tensor]:
    x_ND, labels_N = train.features_ND, train.labels_N
    device, count = x_ND.device, len(x_ND)
    generator = torch.Generator().manual_seed(settings.seed)
    weight_DC = (0.01 * torch.randn(x_ND.shape[1], class_count, generator=generator)).to(x_ND).requires_grad_()
    bias_C = x_ND.new_zeros(class_count, requires_grad=True)
    batch = min(settings.batch_size, count)
    optimizer = torch.optim.SGD([weight_DC, bias_C], lr=settings.lr * batch / 256, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs)
    for _ in tracked(range(settings.epochs), "linear probe"):
        order = torch.randperm(count, generator=generator).to(device)
        for chosen in order[: count // batch * batch].split(batch):
            with torch.enable_grad():
                loss = F.cross_entropy(torch.addmm(bias_C, x_ND[chosen], weight_DC), labels_N[chosen])
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
        schedule.step()
    if not (weight_DC.isfinite().all() and bias_C.isfinite().all()):
        raise InvalidArgumentError(f"lr={settings.lr}: training diverged on these features; expected a smaller one")
    return weight_DC.detach(), bias_C.detach()


def _tested(test: Labelled, weight_DC: Tensor, bias_C: Tensor) -> tuple[Accuracy, float]:
    """Accuracy and mean cross-entropy."""
    sums = torch.zeros(3, dtype=torch.float64, device=weight_DC.device)
    step = max(1, _TOGETHER // len(bias_C))
    for x_BD, labels_B in zip(test.features_ND.split(step), test.labels_N.split(step), strict=True):
        logits_BC = torch.addmm(bias_C, x_BD, weight_DC)
        first, among_five = accuracy(logits_BC, labels_B)
        sums += torch.stack([first.sum(), among_five.sum(), F.cross_entropy(logits_BC, labels_B, reduction="sum")])
    top1, top5, loss = (sums / len(test.labels_N)).tolist()
    return Accuracy(top1, top5), loss
