"""A linear head on maps of features: training it, and turning what it says into masks.

Shapes: N images, features of width D on a grid h x w, labels on H x W pixels, K classes.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import DataError, DivergedError, InvalidArgumentError
from wellposed.evaluation.segmentation.iou import IGNORED
from wellposed.evaluation.segmentation.protocols import DenseProtocol
from wellposed.optim.schedules import cosine_with_warmup
from wellposed.runs import tracked

_PIECE = 1 << 26
"""Numbers that upsampled logits may hold at once where masks are predicted."""

Batch = tuple[Tensor, Tensor]
"""Features (N, D, h, w) and labels (N, H, W)."""


def dense_probe(
    features_NDhw: Tensor, labels_NHW: Tensor, classes: int, protocol: DenseProtocol, seed: int = 0
) -> nn.Module:
    """A head trained on features that are already there, on their device; in eval mode.

    Args:
        features_NDhw: of the training images, in any floating type.
        labels_NHW: their classes, of any size H x W that all share, or `IGNORED`.
        classes: their number K.
        protocol: how to train. What it says of views does not matter here.
        seed: of the head's initialization and of the order of the batches.
    """
    if features_NDhw.ndim != 4 or labels_NHW.ndim != 3 or len(features_NDhw) != len(labels_NHW):
        raise InvalidArgumentError(
            f"features {tuple(features_NDhw.shape)}, labels {tuple(labels_NHW.shape)}: expected (N, D, h, w) and "
            "(N, H, W) with the same N"
        )
    for part in labels_NHW.split(256):
        check_labels(part, classes)
    if protocol.train_labels == "grid" and labels_NHW.shape[1:] != features_NDhw.shape[2:]:
        labels_NHW = patch_labels(labels_NHW, (features_NDhw.shape[2], features_NDhw.shape[3]), classes)
    batches = (
        (features_NDhw[chosen], labels_NHW[chosen]) for chosen in batch_order(len(features_NDhw), protocol, seed)
    )
    return fit_head(batches, classes, protocol, steps_of(protocol, len(features_NDhw)), seed)


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise InvalidArgumentError where a label is neither a class nor `IGNORED`."""
    wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]
    if len(wrong):
        raise InvalidArgumentError(f"labels hold {int(wrong[0])}: expected 0 to {classes - 1}, or {IGNORED} for none")


def fit_head(batches: Iterable[Batch], classes: int, protocol: DenseProtocol, steps: int, seed: int = 0) -> nn.Module:
    """A head trained on one batch after the other, `steps` of them; in eval mode."""
    head: nn.Module | None = None
    taken = torch.zeros(())
    for step, (features_NDhw, labels_NHW) in zip(tracked(range(steps), "training the head"), batches, strict=False):
        if head is None:
            head = linear_head(features_NDhw.shape[1], classes, batch_norm=protocol.batch_norm, seed=seed)
            head = head.to(features_NDhw.device).train()
            optimizer = _optimizer(head, protocol)
        for group in optimizer.param_groups:
            group["lr"] = protocol.lr * _lr_factor(step, steps, protocol)
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            loss, pixels = _loss(head(features_NDhw.float()), labels_NHW)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        taken = taken.to(pixels.device) + pixels
        if step % 50 == 0 and not math.isfinite(loss.item()):
            raise DivergedError(f"the loss of the head is {loss.item()} at step {step}; lower lr, now {protocol.lr}")
    if head is None or not taken:
        raise DataError("no pixel of the training images has a class: expected masks with classes in them")
    if not all(torch.isfinite(param).all() for param in head.parameters()):
        raise DivergedError(f"the head is no longer made of finite numbers; lower lr, now {protocol.lr}")
    return head.eval()


def linear_head(width: int, classes: int, *, batch_norm: bool, seed: int = 0) -> nn.Sequential:
    """A 1x1 convolution, after BatchNorm if wanted; weights of standard deviation 0.01 from the seed, no bias yet."""
    convolution = nn.Conv2d(width, classes, 1)
    with torch.no_grad():
        convolution.weight.normal_(0, 0.01, generator=torch.Generator().manual_seed(seed))
        convolution.get_parameter("bias").zero_()
    return nn.Sequential(*([nn.BatchNorm2d(width)] if batch_norm else []), convolution)


def upsampled(logits_NKhw: Tensor, size: tuple[int, int]) -> Tensor:
    """(N, K, H, W): bilinear interpolation as torch's, with align_corners=False.

    As two matrix products, whose gradient is the same every time on a GPU too, which torch's own is not there.
    """
    rows, columns = (
        _interpolation(count, target, logits_NKhw) for count, target in zip(logits_NKhw.shape[-2:], size, strict=True)
    )
    return rows @ (logits_NKhw @ columns.mT)


@torch.no_grad()
def predicted_mask(logits_Khw: Tensor, size: tuple[int, int]) -> Tensor:
    """(H, W) int64: the likeliest class of each pixel once the logits are upsampled, a few rows at a time."""
    rows = _interpolation(logits_Khw.shape[1], size[0], logits_Khw)
    across_KhW = logits_Khw @ _interpolation(logits_Khw.shape[2], size[1], logits_Khw).mT
    at_once = max(1, _PIECE // (across_KhW.shape[0] * size[1]))
    return torch.cat([(part @ across_KhW).argmax(0) for part in rows.split(at_once)])


def patch_labels(labels_NHW: Tensor, grid: tuple[int, int], classes: int) -> Tensor:
    """(N, h, w): the commonest class of each patch, the lower number where two are equal, `IGNORED` where none is.

    Example:
        >>> patch_labels(torch.tensor([[[0, 1, 255, 255], [1, 1, 255, 2]]]), (1, 2), classes=3)
        tensor([[[1, 2]]])
    """
    n, height, width = labels_NHW.shape
    rows, columns = (
        torch.arange(count, device=labels_NHW.device) * cells // count
        for count, cells in zip((height, width), grid, strict=True)
    )
    cells_HW = rows[:, None] * grid[1] + columns
    image_N11 = torch.arange(n, device=labels_NHW.device).view(-1, 1, 1)
    slots = torch.where(labels_NHW == IGNORED, classes, labels_NHW.long())
    places = (image_N11 * (grid[0] * grid[1]) + cells_HW) * (classes + 1) + slots
    counts = torch.bincount(places.flatten(), minlength=n * grid[0] * grid[1] * (classes + 1))
    most, label = counts.view(n, *grid, classes + 1)[..., :classes].max(-1)
    return torch.where(most > 0, label, IGNORED)


def steps_of(protocol: DenseProtocol, images: int) -> int:
    """How many batches the protocol trains on."""
    return protocol.steps or (protocol.epochs or 1) * math.ceil(images / protocol.batch_size)


def batch_order(images: int, protocol: DenseProtocol, seed: int) -> Iterator[Tensor]:
    """For each step the numbers of its images: one shuffled epoch after the other, the last batch of each smaller."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(images, generator=generator).split(protocol.batch_size)


def _loss(logits_NKhw: Tensor, labels_NHW: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy over the pixels that have a class, and their number."""
    size = (labels_NHW.shape[1], labels_NHW.shape[2])
    if logits_NKhw.shape[-2:] != labels_NHW.shape[-2:]:
        logits_NKhw = upsampled(logits_NKhw, size)
    labels_P = labels_NHW.flatten().long()
    # Flat, since the loss over maps has no deterministic kernel on GPUs.
    logits_PK = logits_NKhw.movedim(1, -1).flatten(0, -2)
    total = F.cross_entropy(logits_PK, labels_P, ignore_index=IGNORED, reduction="sum")
    counted = (labels_P != IGNORED).sum()
    return total / counted.clamp(min=1), counted


def _interpolation(count: int, target: int, like: Tensor) -> Tensor:
    """(target, count): the matrix that interpolates `count` values at `target` places."""
    place = ((torch.arange(target, dtype=torch.float64) + 0.5) * count / target - 0.5).clamp(0, count - 1)
    below = place.floor().long().clamp(max=max(count - 2, 0))
    matrix = torch.zeros(target, count, dtype=torch.float64)
    matrix.scatter_(1, below[:, None], (1 - (place - below))[:, None])
    if count > 1:
        matrix.scatter_(1, below[:, None] + 1, (place - below)[:, None])
    return matrix.to(like)


def _optimizer(head: nn.Module, protocol: DenseProtocol) -> torch.optim.Optimizer:
    if protocol.optimizer == "sgd":
        return torch.optim.SGD(head.parameters(), protocol.lr, momentum=0.9, weight_decay=protocol.weight_decay)
    return torch.optim.AdamW(head.parameters(), protocol.lr, weight_decay=protocol.weight_decay)


def _lr_factor(step: int, steps: int, protocol: DenseProtocol) -> float:
    warmup = min(protocol.warmup, steps // 2)
    if protocol.schedule == "cosine" or step < warmup:
        return cosine_with_warmup(step, steps=steps, warmup=warmup)
    return 1 - (step - warmup) / (steps - warmup)
