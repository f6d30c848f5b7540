"""TokenCut on a whole batch at once against one call of scipy's eigh per image."""

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from wellposed.bench.table import Table
from wellposed.bench.timing import seconds
from wellposed.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DiscoverBench:
    """Images per second of wellposed.discover against a loop over scipy.linalg.eigh(D - A, D), second vector alone."""

    side: int = 28
    """Patches a side."""
    width: int = 384
    """Of the features."""
    noise: tuple[float, ...] = (0.3, 0.6, 1.0)
    """Of the features, where 1 is the size of what tells the regions apart; the more, the harder to cut."""
    batch_size: int = 256
    references: int = 16
    """Images of the batch that the loop is timed on."""
    repeats: int = 5
    """Timed runs, after one to warm up; the median is reported."""
    device: str = "cuda"
    """Of wellposed.discover; scipy works on the CPU, on features that are there already."""
    seed: int = 0

    def run(self) -> Table:
        """Measure every level of noise."""
        import torch

        from wellposed.evaluation.discovery.tokencut import discover
        from wellposed.runs import device_named, provenance

        device = device_named(self.device)
        for name in ("side", "width", "batch_size", "references", "repeats"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}: expected at least 1")
        rows, grid = [], (self.side, self.side)
        for noise in self.noise:
            features_BND = regions(self.batch_size, self.side, self.width, noise, self.seed)
            there_BND = features_BND.to(device)
            batch = median(seconds(partial(discover, there_BND, grid), device, repeats=self.repeats))
            found_B4 = discover(there_BND, grid).boxes.cpu()
            few_RND = features_BND[: self.references]
            loop = median(seconds(partial(loop_boxes, few_RND, grid), torch.device("cpu"), repeats=self.repeats))
            agree = int((loop_boxes(few_RND, grid) == found_B4[: len(few_RND)]).all(1).sum())
            ours, theirs = self.batch_size / batch, len(few_RND) / loop
            rows.append(
                (f"{noise}", f"{theirs:.1f}", f"{ours:.0f}", f"{ours / theirs:.1f}", f"{agree} of {len(few_RND)}")
            )
        return Table(
            title=f"TokenCut on {self.side} x {self.side} patches, {self.batch_size} images a batch",
            columns=("noise", "scipy loop, images/s", "discover, images/s", "times as many", "boxes equal"),
            rows=tuple(rows),
            facts=provenance(device, seed=self.seed),
        )


def regions(count: int, side: int, width: int, noise: float, seed: int) -> "Tensor":
    """(count, side * side, width): smooth regions with a feature each, eight an image, and noise on every patch."""
    import torch
    from torch.nn import functional as F

    generator = torch.Generator().manual_seed(seed)
    coarse_B855 = torch.randn(count, 8, 5, 5, generator=generator)
    fields_B8hw = F.interpolate(coarse_B855, (side, side), mode="bicubic")
    shares_BN8 = (3 * fields_B8hw).softmax(1).flatten(2).mT
    features_B8D = torch.randn(count, 8, width, generator=generator)
    return shares_BN8 @ features_B8D + noise * torch.randn(count, side**2, width, generator=generator)


def loop_boxes(features_BND: "Tensor", grid: tuple[int, int], tau: float = 0.2, eps: float = 1e-5) -> "Tensor":
    """The boxes, (B, 4), one image after the other in numpy and scipy."""
    import numpy as np
    import torch
    from scipy.linalg import eigh
    from scipy.ndimage import find_objects, label

    boxes = []
    for features_ND in features_BND.numpy():
        x_ND = features_ND / np.linalg.norm(features_ND, axis=1, keepdims=True)
        A_NN = np.where(x_ND @ x_ND.T > tau, 1.0, eps)
        D_NN = np.diag(A_NN.sum(1))
        y_N = eigh(D_NN - A_NN, D_NN, subset_by_index=[1, 1])[1][:, 0]
        seed = np.abs(y_N).argmax()
        side_N = y_N > y_N.mean()
        labels_hw, _ = label((side_N if side_N[seed] else ~side_N).reshape(grid))
        rows, columns = find_objects(labels_hw)[labels_hw.flat[seed] - 1]
        boxes.append([columns.start, rows.start, columns.stop, rows.stop])
    return torch.tensor(boxes)
