"""How good features are while they are learned: k-NN accuracy on a labelled set, and how different they are."""

import math
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn import functional as F

from wellposed.data import Dataset, ImageSet, Loader, open_loader
from wellposed.evaluation.classification.neighbours import knn
from wellposed.training.dino_loss import spread
from wellposed.training.dino_network import Network

NEIGHBOURS = 20


class Subset:
    """Some images of a set that is not in memory."""

    def __init__(self, data: Dataset, chosen: list[int]) -> None:
        self._data, self._chosen = data, chosen
        self.name, self.classes, self.image_shape = data.name, data.classes, data.image_shape

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._data[self._chosen[index]]


def some_of(data: Dataset, count: int) -> Dataset:
    """At most `count` images from all over the set, the same ones always."""
    if len(data) <= count:
        return data
    chosen = torch.linspace(0, len(data) - 1, count).long()
    if isinstance(data, ImageSet):
        parts: dict[str, Any] = {"masks": data.masks, "boxes": data.boxes}
        parts = {name: None if part is None else part[chosen] for name, part in parts.items()}
        return replace(data, images=data.images[chosen], labels=data.labels[chosen], **parts)
    return Subset(data, chosen.tolist())


class Neighbours:
    """The sets that are classified after every epoch, as loaders on the device."""

    def __init__(
        self,
        train: Dataset,
        test: Dataset,
        count: int,
        batch_size: int,
        accelerator: Accelerator,
        like: Loader,
        workers: int,
    ) -> None:
        self._accelerator = accelerator
        ranks = accelerator.num_processes
        self._loaders = [
            open_loader(
                *(data, batch_size),
                device=accelerator.device,
                rank=accelerator.process_index,
                ranks=ranks,
                shuffle=False,
                mean=like.mean,
                std=like.std,
                workers=workers,
            )
            for data in (some_of(train, count), some_of(test, count))
        ]

    def evaluate(self, network: Network, image_size: int) -> dict[str, float]:
        """Top-1 accuracy of the test set by its nearest neighbours in the training set, and the spread of its features.

        Images are shown at `image_size`. All are NaN where a feature is not finite. Images of a class that none of the
        neighbours has count as wrong.
        """
        (train_ND, train_labels_N), (test_MD, test_labels_M) = (
            self._features(network, loader, image_size) for loader in self._loaders
        )
        if not (train_ND.isfinite().all() and test_MD.isfinite().all()):
            return dict.fromkeys(("knn", "std", "rank"), math.nan)
        voters = min(NEIGHBOURS, len(train_ND))
        known_M = torch.isin(test_labels_M, train_labels_N)
        top1 = 0.0
        # Similarities rounded to half precision could not tell the neighbours among features that lie close together.
        with torch.autocast(test_MD.device.type, enabled=False):
            if known_M.any():
                top1 = knn(train_ND, train_labels_N, test_MD[known_M], test_labels_M[known_M], voters)[voters].top1
            std, rank = spread(test_MD)
        return {"knn": top1 * known_M.double().mean().item(), "std": std.item(), "rank": rank.item()}

    def _features(self, network: Network, loader: Loader, image_size: int) -> tuple[Tensor, Tensor]:
        parts, labels = [], []
        for images_BCHW, labels_B in loader:
            size = (image_size, image_size)
            if images_BCHW.shape[-2:] != size:
                images_BCHW = F.interpolate(images_BCHW, size, mode="bicubic", antialias=True)  # noqa: PLW2901
            parts.append(network.features(images_BCHW).float())
            labels.append(labels_B)
        own = torch.cat(parts), torch.cat(labels)
        if self._accelerator.num_processes == 1:
            return own
        gathered = gather_object([(own[0].cpu(), own[1].cpu())])
        device = self._accelerator.device
        features_ND, labels_N = (torch.cat([pair[place] for pair in gathered]).to(device) for place in (0, 1))
        return features_ND, labels_N
