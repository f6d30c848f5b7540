"""Batches of a set that fits into the memory of the device it is used on."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wellposed.data.augment import Augment, draw
from wellposed.data.images import ImageSet
from wellposed.errors import InvalidArgumentError


class DeviceLoader:
    """Batches of augmented, normalized images and their labels, made on the device without any worker.

    A pass over the set starts where the last one stopped, so that a run interrupted within an epoch goes on with the
    very same batches after `load_state_dict`. With `ranks` processes each gets its part of every batch, the same
    numbers that one process alone would have in that place.

    Args:
        data: the set; its images are moved to `device`.
        batch_size: images in a batch of all processes together.
        device: where images and random numbers live.
        seed: of the order and of the augmentation.
        augment: what happens to each image; nothing if None.
        shuffle: a new order in every epoch, without the last, smaller batch; otherwise the set's order, and all of it.
        rank: which of `ranks` processes this is.
        ranks: number of processes.
        mean: of each channel, subtracted from images in [0, 1]; that of the set if None.
        std: of each channel, by which they are divided; that of the set if None.
    """

    def __init__(
        self,
        data: ImageSet,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        augment: Augment | None = None,
        shuffle: bool = True,
        rank: int = 0,
        ranks: int = 1,
        mean: Tensor | None = None,
        std: Tensor | None = None,
    ) -> None:
        if batch_size < 1 or batch_size % ranks or (shuffle and batch_size > len(data)):
            raise InvalidArgumentError(
                f"batch_size={batch_size}: expected 1 to {len(data)}, the size of {data.name}, and a multiple of the "
                f"{ranks} processes"
            )
        self.images, self.labels = data.images.to(device), data.labels.to(device)
        self.batch_size, self.shuffle, self.rank, self.ranks = batch_size, shuffle, rank, ranks
        self.augment = augment or Augment()
        measured_mean, measured_std = _statistics(self.images)
        self.mean = measured_mean if mean is None else mean.to(device)
        self.std = measured_std if std is None else std.to(device)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._order_state, self._done = self._generator.get_state(), 0

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.images) // self.batch_size if self.shuffle else -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The rest of the epoch: float images (N, C, H, W) and labels (N,), this process's part of each batch."""
        order = self._order()
        for number in range(self._done, len(self)):
            chosen = order[number * self.batch_size :][: self.batch_size]
            draws = draw(len(chosen), self._generator)
            share = slice(self.rank * len(chosen) // self.ranks, (self.rank + 1) * len(chosen) // self.ranks)
            images = self.augment(self.images[chosen[share]], draws[share])
            self._done = number + 1
            if self._done == len(self):  # now, and not after the yield: the caller may never ask for another batch
                self._order_state, self._done = self._generator.get_state(), 0
            yield (images - self.mean) / self.std, self.labels[chosen[share]]

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: the generator when the epoch's order was drawn, now, and the batches made since."""
        return {"order": self._order_state, "generator": self._generator.get_state(), "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the loader that `state` comes from stood."""
        self._order_state, self._done = state["order"].cpu(), state["done"]
        self._generator.set_state(state["generator"].cpu())

    def _order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self.images), device=self.images.device)
        now = self._generator.get_state()
        self._generator.set_state(self._order_state)
        order = torch.randperm(len(self.images), generator=self._generator, device=self.images.device)
        if self._done:
            self._generator.set_state(now)
        return order


def _statistics(images_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of images in [0, 1], shaped (C, 1, 1), from counts of values."""
    counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in images_NCHW.unbind(1)]).double()
    values = torch.arange(256, device=counts.device) / 255
    share = counts / counts.sum(1, keepdim=True)
    mean = (share * values).sum(1, keepdim=True)
    std = (share * (values - mean) ** 2).sum(1, keepdim=True).sqrt().clamp(min=1e-6)
    return mean.float()[:, :, None], std.float()[:, :, None]
