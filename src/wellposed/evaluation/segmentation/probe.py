"""The dense linear probe: how well a linear head tells the class of every pixel from frozen features.

Shapes: B pictures of size x size, features of width D on a grid h x w, K classes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.data.masks import MaskedSet
from wellposed.data.pictures import Readings
from wellposed.errors import InvalidArgumentError
from wellposed.evaluation.backbones import Backbone
from wellposed.evaluation.segmentation.heads import (
    Batch,
    batch_order,
    check_labels,
    dense_probe,
    fit_head,
    patch_labels,
    predicted_mask,
    steps_of,
    upsampled,
)
from wellposed.evaluation.segmentation.iou import Agreement, agreement, confusion, most_frequent
from wellposed.evaluation.segmentation.protocols import DenseProtocol
from wellposed.evaluation.segmentation.reading import read_batches
from wellposed.evaluation.segmentation.views import DRAWS, resized, resized_mask, training_view, windows
from wellposed.runs import tracked

FeatureMaps = Callable[[Tensor], Tensor]
"""uint8 pictures (B, 3, size, size) to features (B, D, h, w) on the device the head is to be on."""


@dataclass(frozen=True)
class Example:
    """A test picture, uint8 (3, H, W), with its true and its predicted mask, (H, W)."""

    name: str
    picture: Tensor
    truth: Tensor
    predicted: Tensor


@dataclass(frozen=True)
class Segmentation:
    """What the probe found, and under which protocol."""

    protocol: DenseProtocol
    data: str
    classes: tuple[str, ...]
    agreement: Agreement
    baseline: Agreement
    """Of the commonest class of the test masks, predicted everywhere."""
    train_images: int
    test_images: int
    skipped: tuple[str, ...] = ()
    """What was wrong with each picture that could not be read."""
    head: nn.Module | None = field(default=None, compare=False, repr=False)
    examples: tuple[Example, ...] = field(default=(), compare=False, repr=False)


def segment(
    features: FeatureMaps,
    train: MaskedSet,
    test: MaskedSet,
    protocol: DenseProtocol,
    *,
    seed: int = 0,
    batch_size: int = 64,
    memory_gb: float = 4.0,
    examples: int = 0,
    readings: Readings | None = None,
) -> Segmentation:
    """Train a linear head on the features of `train` as `protocol` says, and compare its masks on `test`.

    Features are rounded to bfloat16. They are computed once where no two epochs differ and all of them fit into
    `memory_gb`, else again for every batch. The same seed gives the same numbers on the same machine.

    Args:
        features: of pictures of protocol.size pixels a side; `feature_maps` gives those of a model.
        train: pictures to train the head on.
        test: pictures to compare on, of the same classes.
        protocol: how, with a size.
        seed: of the head, the order of the batches and the views.
        batch_size: pictures whose features are computed at once, where the protocol does not say.
        memory_gb: gigabytes that the features and labels of the training pictures may take.
        examples: how many test pictures, from all over the set, to return with their masks.
        readings: what becomes of pictures that cannot be read; an error if None.
    """
    if protocol.size is None:
        raise InvalidArgumentError("protocol.size is None: expected the pixels a side that suit the features")
    if train.classes != test.classes:
        raise InvalidArgumentError(f"{train.name} and {test.name} have different classes: expected the same in both")
    if batch_size < 1 or memory_gb < 0 or examples < 0:
        raise InvalidArgumentError(
            f"batch_size={batch_size}, memory_gb={memory_gb}, examples={examples}: expected at least 1, 0 and 0"
        )
    probe = _Probe(features, protocol, protocol.size, len(train.classes), batch_size, readings or Readings())
    kept = None if protocol.augmented else probe.kept(train, memory_gb)
    if kept is None:
        steps = steps_of(protocol, len(train))
        head = fit_head(probe.recomputed(train, steps, seed), probe.classes, protocol, steps, seed)
    else:
        head = dense_probe(*kept, probe.classes, protocol, seed)
    counts_KK, shown, tested = probe.compared(head, test, examples)
    return Segmentation(
        protocol=protocol,
        data=train.name,
        classes=train.classes,
        agreement=agreement(counts_KK),
        baseline=agreement(most_frequent(counts_KK)),
        train_images=len(train) if kept is None else len(kept[0]),
        test_images=tested,
        skipped=tuple(dict.fromkeys(probe.readings.problems)),
        head=head,
        examples=tuple(shown),
    )


def feature_maps(backbone: Backbone, layers: Sequence[int]) -> FeatureMaps:
    """The patch tokens of these blocks side by side, as maps on the finest of their grids; on GPUs in bfloat16."""

    def maps(images_BCHW: Tensor) -> Tensor:
        kind = backbone.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            found = backbone.features(images_BCHW, layers)
        grid = max((layer.grid for layer in found), key=lambda grid: grid[0] * grid[1])
        each = [layer.patches_BND.float().mT.unflatten(-1, layer.grid) for layer in found]
        return torch.cat(
            [one if one.shape[-2:] == grid else F.interpolate(one, grid, mode="bilinear") for one in each], 1
        )

    return maps


@dataclass(frozen=True)
class _Probe:
    """What the stages of one probe share."""

    features: FeatureMaps
    protocol: DenseProtocol
    size: int
    classes: int
    batch_size: int
    readings: Readings

    @torch.no_grad()
    def kept(self, train: MaskedSet, memory_gb: float) -> Batch | None:
        """Features and labels of all training pictures; None where they take more than `memory_gb`."""
        kept: Batch | None = None
        done = 0
        orders = tracked(self._in_order(train), "features of the training pictures")
        for read in read_batches(train, orders, self._training_view, self.readings):
            if not read:
                continue
            batch = self._batch([seen for _, seen in read])
            if kept is None:
                if sum(tensor[0].nbytes for tensor in batch) * len(train) > memory_gb * 1e9:
                    return None
                features, labels = (tensor.new_empty(len(train), *tensor.shape[1:]) for tensor in batch)
                kept = features, labels
            for whole, part in zip(kept, batch, strict=True):
                whole[done : done + len(part)] = part
            done += len(read)
        return (kept[0][:done], kept[1][:done]) if kept else None

    def recomputed(self, train: MaskedSet, steps: int, seed: int) -> Iterator[Batch]:
        """`steps` batches in the order of the protocol, every picture seen anew."""
        generator = torch.Generator().manual_seed(seed + 1)
        orders = (
            list(zip(chosen.tolist(), torch.rand(len(chosen), DRAWS, generator=generator), strict=True))
            for chosen in islice(batch_order(len(train), self.protocol, seed), steps)
        )
        for read in read_batches(train, orders, self._training_view, self.readings):
            if read:
                yield self._batch([seen for _, seen in read])

    @torch.no_grad()
    def compared(self, head: nn.Module, test: MaskedSet, examples: int) -> tuple[Tensor, list[Example], int]:
        """The confusion matrix over all test pictures, some of them as examples, and how many could be read."""
        shown_at = set(test.some(examples).numbers) if examples else set()
        shown: list[Example] = []
        counts_KK, tested = torch.zeros(self.classes, self.classes, dtype=torch.long), 0
        orders = tracked(self._in_order(test), "masks of the test pictures")
        for read in read_batches(test, orders, self._test_view, self.readings):
            if not read:
                continue
            for (index, (picture, mask, _)), logits_Khw in zip(read, self._logits(head, read), strict=True):
                predicted, truth = self._at_the_labels(logits_Khw, mask.to(logits_Khw.device))
                counts_KK = counts_KK.to(predicted.device) + confusion(predicted, truth, self.classes)
                if test.numbers[index] in shown_at:
                    size = (mask.shape[0], mask.shape[1])
                    shown.append(Example(test.items[index], picture, mask, predicted_mask(logits_Khw, size).cpu()))
            tested += len(read)
        return counts_KK, shown, tested

    def _in_order(self, data: MaskedSet) -> list[list[tuple[int, Tensor]]]:
        nothing = torch.zeros(DRAWS)
        return [
            [(index, nothing) for index in range(start, min(start + self.batch_size, len(data)))]
            for start in range(0, len(data), self.batch_size)
        ]

    def _training_view(self, picture: Tensor, mask: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        crop = self.protocol.train_view == "crop"
        return training_view(picture, mask, self.size, draws, crop=crop, flip=self.protocol.flip)

    def _test_view(self, picture: Tensor, mask: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The picture as it is, its mask, and the picture as the model sees it, where that is one piece."""
        return picture, mask, resized(picture, (self.size, self.size))

    @torch.no_grad()
    def _batch(self, views: Sequence[tuple[Tensor, Tensor]]) -> Batch:
        """Rounded features of a batch and its labels, as small as they can be kept."""
        pictures_BCHW, labels_BHW = (torch.stack(tensors) for tensors in zip(*views, strict=True))
        check_labels(labels_BHW, self.classes)
        maps_BDhw = self._maps(pictures_BCHW)
        labels_BHW = labels_BHW.to(maps_BDhw.device)
        if self.protocol.train_labels == "grid":
            labels_BHW = patch_labels(labels_BHW, (maps_BDhw.shape[2], maps_BDhw.shape[3]), self.classes)
        return maps_BDhw, labels_BHW.to(torch.uint8)

    def _maps(self, pictures_BCHW: Tensor) -> Tensor:
        maps = self.features(pictures_BCHW)
        if maps.ndim != 4 or len(maps) != len(pictures_BCHW):
            raise InvalidArgumentError(
                f"features give {tuple(maps.shape)} for {len(pictures_BCHW)} pictures: expected (B, D, h, w)"
            )
        return maps.to(torch.bfloat16)

    def _logits(self, head: nn.Module, read: Sequence[tuple[int, tuple[Tensor, Tensor, Tensor]]]) -> Iterator[Tensor]:
        """The logits (K, h, w) of each picture, at whatever resolution the protocol's view gives them."""
        if self.protocol.test_view == "whole":
            yield from head(self._maps(torch.stack([seen for _, (_, _, seen) in read])).float())
            return
        for _, (picture, _, _) in read:
            yield self._in_windows(head, picture)

    def _in_windows(self, head: nn.Module, picture: Tensor) -> Tensor:
        """(K, H, W): the mean of the logits of the windows that a pixel is in, with the shorter side resized."""
        seen, places, (height, width) = windows(picture, self.size)
        total = covered = torch.zeros(())
        for some, where in zip(seen.split(self.batch_size), _split(places, self.batch_size), strict=True):
            logits_BKhw = head(self._maps(some).float())
            if not total.ndim:
                total = logits_BKhw.new_zeros(self.classes, height, width)
                covered = logits_BKhw.new_zeros(height, width)
            for piece, (top, left) in zip(logits_BKhw, where, strict=True):
                area = (slice(top, top + self.size), slice(left, left + self.size))
                total[:, *area] += upsampled(piece[None], (self.size, self.size))[0]
                covered[area] += 1
        return total / covered

    def _at_the_labels(self, logits_Khw: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted and true classes at the resolution where the protocol compares them."""
        if self.protocol.test_labels == "original":
            return predicted_mask(logits_Khw, (mask.shape[0], mask.shape[1])), mask
        at_input = resized_mask(mask, (self.size, self.size))
        if self.protocol.test_labels == "input":
            return predicted_mask(logits_Khw, (self.size, self.size)), at_input
        grid = (logits_Khw.shape[1], logits_Khw.shape[2])
        return logits_Khw.argmax(0), patch_labels(at_input[None], grid, self.classes)[0]


def _split(places: list[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    return [places[i : i + count] for i in range(0, len(places), count)]
