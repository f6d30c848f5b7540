"""Batches of a set that does not fit into memory, read by worker processes; and the loader that suits a set."""

import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Unpack

import torch
from torch import Tensor
from torch.utils import data as torch_data

from wellposed.data.images import Dataset, ImageSet
from wellposed.data.loader import DeviceLoader, Loader, LoaderOptions
from wellposed.data.processes import CONTEXT, await_server, settle, start_server
from wellposed.errors import DataError, InvalidArgumentError, WellposedError


class WorkerLoader(Loader):
    """A `Loader` that reads ahead in worker processes; mean and standard deviation are ImageNet's.

    Workers only read: batches do not depend on how many there are, nor on how far ahead they are when a run stops.
    They stay for later epochs. They are not forks of this process, so `data` must be picklable, and a script that uses
    them must begin its work under `if __name__ == "__main__":`.

    Args:
        data: the set.
        batch_size: images in a batch of all processes together.
        workers: processes that read, at most one per CPU; 0 reads in this one.
        options: as of `Loader`.
    """

    def __init__(self, data: Dataset, batch_size: int, *, workers: int = 4, **options: Unpack[LoaderOptions]) -> None:
        if workers < 0:
            raise InvalidArgumentError(f"workers={workers}: expected a number of processes, or 0 to do without")
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = min(workers, cpus)
        super().__init__(data, batch_size, **options)

    def _open(self, data: Dataset) -> tuple[Tensor, Tensor]:
        if self.workers:
            start_server()
        self._shares: list[list[int]] = []  # the sampler: what is in it when a pass begins is what is read
        self._batches = torch_data.DataLoader(
            _Shares(data),
            batch_size=None,
            sampler=self._shares,
            num_workers=self.workers,
            multiprocessing_context=CONTEXT if self.workers else None,
            persistent_workers=self.workers > 0,
            worker_init_fn=settle,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else every pass would draw a seed from torch's global generator
        )
        # Held from outside, so that it never is part of a reference cycle: collected in one, it loses its queues before
        # it can tell the workers to end, and waits 5 seconds for each.
        weakref.finalize(self, id, self._batches)
        return usual_statistics(data.image_shape[0])

    def _read(self, shares: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        self._shares[:] = [share.tolist() for share in shares]
        if self.workers:
            await_server()
        for read in self._batches:
            if isinstance(read, WellposedError):
                raise read
            images, labels = read
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)


def open_loader(data: Dataset, batch_size: int, *, workers: int = 4, **options: Unpack[LoaderOptions]) -> Loader:
    """A `DeviceLoader` for a set that is in memory, a `WorkerLoader` with `workers` for any other."""
    if isinstance(data, ImageSet):
        return DeviceLoader(data, batch_size, **options)
    return WorkerLoader(data, batch_size, workers=workers, **options)


class _Shares(torch_data.Dataset[tuple[Tensor, Tensor] | WellposedError]):
    """A set whose items are shares of batches: uint8 images (N, C, H, W) and labels (N,).

    An error of ours is an item too: the DataLoader would raise it anew with a traceback for its message.
    """

    def __init__(self, data: Dataset) -> None:
        self._data = data

    def __getitem__(self, share: list[int]) -> tuple[Tensor, Tensor] | WellposedError:
        images = torch.empty(len(share), *self._data.image_shape, dtype=torch.uint8)
        labels = torch.empty(len(share), dtype=torch.int64)
        try:
            for place, index in enumerate(share):
                image, labels[place] = self._data[index]
                if image.shape != images.shape[1:] or image.dtype != torch.uint8:
                    raise DataError(
                        f"image {index} of {self._data.name} is {image.dtype} {tuple(image.shape)}, expected uint8 "
                        f"{self._data.image_shape}"
                    )
                images[place] = image
        except WellposedError as error:
            return error
        return images, labels


def sampled_images(train: Dataset, test: Dataset, count: int) -> tuple[Tensor, Tensor]:
    """`count` images from all over the test set, normalized as in training, and their labels."""
    chosen = torch.linspace(0, len(test) - 1, min(count, len(test))).long().tolist()
    images, labels = zip(*(test[index] for index in chosen), strict=True)
    usual = open_loader(train, 1, workers=0)
    return (torch.stack(images) / 255 - usual.mean) / usual.std, torch.tensor(labels)


def usual_statistics(channels: int) -> tuple[Tensor, Tensor]:
    """ImageNet's mean and standard deviation, which most models expect; 1/2 unless there are 3 channels."""
    if channels != 3:
        return torch.full((channels, 1, 1), 0.5), torch.full((channels, 1, 1), 0.5)
    from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    return torch.tensor(IMAGENET_DEFAULT_MEAN).view(3, 1, 1), torch.tensor(IMAGENET_DEFAULT_STD).view(3, 1, 1)
