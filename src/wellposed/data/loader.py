"""Batches whose order and randomness can be resumed and shared; here, of a set that fits into the device's memory."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.data.augment import Augment, Mix, draw
from wellposed.data.images import Dataset, ImageSet
from wellposed.errors import InvalidArgumentError


class LoaderOptions(TypedDict, total=False):
    """What every `Loader` takes by name."""

    device: torch.device | str
    seed: int
    augment: Augment | None
    mix: Mix | None
    shuffle: bool
    rank: int
    ranks: int
    mean: Tensor | None
    std: Tensor | None
    compile: bool
    columns: int


class Loader(ABC):
    """Batches of augmented, normalized images and their labels, on the device.

    A pass over the set starts where the last one stopped, so that a run interrupted within an epoch goes on with the
    very same batches after `load_state_dict`. With `ranks` processes each gets its part of every batch, the same
    numbers that one process alone would have in that place. All random numbers are drawn here, none where images are
    read, so loaders that differ in that alone give the same batches.

    Args:
        data: the set.
        batch_size: images in a batch of all processes together.
        device: where batches and random numbers live.
        seed: of the order, the augmentation and the mixing.
        augment: what happens to each image; nothing if None.
        mix: mixup and CutMix within each process's part, which turn labels (N,) into class probabilities (N, K).
        shuffle: a new order in every epoch, without the last, smaller batch; otherwise the set's order, and all of it.
        rank: which of `ranks` processes this is.
        ranks: number of processes.
        mean: of each channel, shaped (C, 1, 1), subtracted from images in [0, 1]; the loader's own choice if None.
        std: of each channel, by which they are divided; likewise.
        compile: make a batch by one compiled function, which rounds differently and on a GPU takes an eighth of the
            time.
        columns: if not 0, batches are the uint8 images as they are and, in place of labels, so many random numbers in
            [0, 1) for each, (N, columns): for views that are made elsewhere, such as `MultiCrop`'s.
    """

    unit = "images"
    """What there are `batch_size` of in a batch."""

    def __init__(
        self,
        data: Dataset,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        augment: Augment | None = None,
        mix: Mix | None = None,
        shuffle: bool = True,
        rank: int = 0,
        ranks: int = 1,
        mean: Tensor | None = None,
        std: Tensor | None = None,
        compile: bool = False,
        columns: int = 0,
    ) -> None:
        if not 0 <= rank < ranks:
            raise InvalidArgumentError(f"rank={rank}, ranks={ranks}: expected ranks from 0 to ranks - 1")
        if batch_size < 1 or batch_size % ranks or (shuffle and batch_size > len(data)):
            raise InvalidArgumentError(
                f"batch_size={batch_size}: expected 1 to {len(data)}, the size of {data.name}, and a multiple of the "
                f"{ranks} processes"
            )
        self.mix = None if mix == Mix() else mix
        if self.mix and (batch_size % (2 * ranks) or (not shuffle and len(data) % (2 * ranks))):
            raise InvalidArgumentError(
                f"batch_size={batch_size}, ranks={ranks}: mixing pairs the images of each process; expected a multiple "
                f"of {2 * ranks}" + ("" if shuffle else f", also as the size of {data.name}, which is {len(data)}")
            )
        self.batch_size, self.shuffle, self.rank, self.ranks = batch_size, shuffle, rank, ranks
        self.device, self.augment = torch.device(device), augment or Augment()
        self._make = torch.compile(_made) if compile else _made
        self._columns = columns
        self._size, self._class_count = len(data), len(data.classes)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._order_state, self._done = self._generator.get_state(), 0
        own_mean, own_std = self._open(data)
        self.mean = (own_mean if mean is None else mean).to(device)
        self.std = (own_std if std is None else std).to(device)

    @abstractmethod
    def _open(self, data: Dataset) -> tuple[Tensor, Tensor]:
        """Make ready to read `data`; the mean and standard deviation, (C, 1, 1), for who gives no others."""

    @abstractmethod
    def _read(self, shares: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The uint8 images (N, C, H, W) and labels (N,), on the device, of each list of indices in `shares`."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._size // self.batch_size if self.shuffle else -(-self._size // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The rest of the epoch: images (N, C, H, W) and their targets, this process's part of each batch."""
        order = self._order()
        batches = [order[number * self.batch_size :][: self.batch_size] for number in range(self._done, len(self))]
        read = self._read([batch[self._part(len(batch))] for batch in batches])
        for done, (batch, (images, labels)) in enumerate(zip(batches, read, strict=True), start=self._done + 1):
            finished = self._finished(images, labels, len(batch))
            self._done = done
            if self._done == len(self):  # now, and not after the yield: the caller may never ask for another batch
                self._order_state, self._done = self._generator.get_state(), 0
            yield finished

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: the generator when the epoch's order was drawn, now, and the batches made since."""
        return {"order": self._order_state, "generator": self._generator.get_state(), "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the loader that `state` comes from stood."""
        self._order_state, self._done = state["order"].cpu(), state["done"]
        self._generator.set_state(state["generator"].cpu())

    def _part(self, count: int) -> slice:
        """Which of the `count` images of a batch are this process's."""
        return slice(self.rank * count // self.ranks, (self.rank + 1) * count // self.ranks)

    def _finished(self, images_NCHW: Tensor, labels_N: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """A part of a batch of `count`, made with its part of the random numbers, which all processes draw alike."""
        part = self._part(count)
        if self._columns:
            rows = torch.rand(count, self._columns, generator=self._generator, device=self.device)
            return images_NCHW, rows[part]
        draws = [draw(count, self._generator)[part] for _ in range(1 if self.mix is None else 2)]
        ways = (self.augment, self.mean, self.std, self.mix, self._class_count)
        return self._make(images_NCHW, labels_N, draws, *ways)

    def _order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(self._size, device=self.device)
        now = self._generator.get_state()
        self._generator.set_state(self._order_state)
        order = torch.randperm(self._size, generator=self._generator, device=self.device)
        if self._done:
            self._generator.set_state(now)
        return order


class DeviceLoader(Loader):
    """A `Loader` that keeps the whole set in the memory of the device; mean and standard deviation are the set's."""

    def _open(self, data: Dataset) -> tuple[Tensor, Tensor]:
        if not isinstance(data, ImageSet):
            raise InvalidArgumentError(
                f"data={data.name}: expected an ImageSet, which is in memory; WorkerLoader reads any other set"
            )
        self.images, self.labels = data.images.to(self.device), data.labels.to(self.device)
        return _statistics(self.images)

    def _read(self, shares: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for share in shares:
            yield self.images.index_select(0, share), self.labels.index_select(0, share)


def _made(
    images_NCHW: Tensor,
    labels_N: Tensor,
    draws_NK: list[Tensor],
    augment: Augment,
    mean: Tensor,
    std: Tensor,
    mix: Mix | None,
    class_count: int,
) -> tuple[Tensor, Tensor]:
    """Images augmented, normalized and mixed, and their targets."""
    images_NCHW = ((augment(images_NCHW, draws_NK[0]) - mean) / std).contiguous()
    if mix is None:
        return images_NCHW, labels_N
    targets_NK = F.one_hot(labels_N, class_count).to(images_NCHW.dtype)
    return mix(images_NCHW, targets_NK, draws_NK[1])


def _statistics(images_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of images in [0, 1], shaped (C, 1, 1), from counts of values."""
    counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in images_NCHW.unbind(1)]).double()
    values = torch.arange(256, device=counts.device) / 255
    share = counts / counts.sum(1, keepdim=True)
    mean = (share * values).sum(1, keepdim=True)
    std = (share * (values - mean) ** 2).sum(1, keepdim=True).sqrt().clamp(min=1e-6)
    return mean.float()[:, :, None], std.float()[:, :, None]
