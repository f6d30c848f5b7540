"""Patch features as pictures: three principal components of a layer become red, green and blue.

The components are fitted over all images of a layer together, so one colour means one thing in all of them. Their
signs, and their order where two hold about the same variance, are arbitrary: each layer is therefore turned by the
orthogonal 3 x 3 matrix that brings its three components, of unit variance each, nearest to those of the layer after it
(orthogonal Procrustes), and the last layer keeps its own, or is turned to the last layer of another model. A turn shows
the same three dimensions as before; a choice of signs and order alone could not follow two components that mix.

Shapes: L layers, B images, N patches on a grid of h x w, D features, M = B N, C = 3 components.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import InvalidArgumentError

Grid = tuple[int, int]
_ROWS = 8192  # that are in double precision at a time


@dataclass(frozen=True)
class PcaScores:
    """The three components of every patch, comparable across images and layers."""

    maps: Tensor
    """(L, B, h, w, 3): of mean 0 and variance 1 over the foreground of a layer, and 0 outside it."""
    explained: Tensor
    """(L, 3): the fraction of a layer's variance in each of its components, before they were turned."""
    foreground: Tensor
    """(B, h, w) bool: the patches that count."""

    def colours(self, quantile: float = 0.01) -> Tensor:
        """(L, B, h, w, 3) in [0, 1]; background black, a component without variance half bright.

        Each component of a layer runs from its `quantile` to its 1 - `quantile`; what lies beyond is clipped.
        """
        if not 0 <= quantile < 0.5:
            raise InvalidArgumentError(f"quantile={quantile}: expected a number in [0, 0.5)")
        colours = torch.zeros_like(self.maps)
        for layer_BHWC, shown_BHWC in zip(self.maps, colours, strict=True):
            shown_BHWC[self.foreground] = _stretched(layer_BHWC[self.foreground], quantile)
        return colours


def pca_maps(
    layers: Sequence[Tensor],
    grid: Grid | Sequence[Grid],
    *,
    foreground: bool = False,
    like: PcaScores | None = None,
    quantile: float = 0.01,
) -> Tensor:
    """Pictures of patch features, (L, B, h, w, 3) in [0, 1], whose colours are comparable across images and layers.

    Args:
        layers: patch features (B, N, D) of each layer; N and D may differ. Computed on their device, in double
            precision.
        grid: rows and columns of patches, N = rows x columns; one for all layers or one for each, the finest of which
            is h x w.
        foreground: show only the patches on one side of the last layer's first component, as `pca_scores` says.
        like: what `pca_scores` gave for another model on the same images, to have its colours.
        quantile: the share of patches at each end of a component that is clipped.

    Example:
        >>> pca_maps([torch.tensor([[[0.0], [1.0], [2.0], [4.0]]])], (2, 2), quantile=0.0)[0, 0, ..., 0]
        tensor([[0.0000, 0.2500],
                [0.5000, 1.0000]])
    """
    return pca_scores(layers, grid, foreground=foreground, like=like).colours(quantile)


def pca_scores(
    layers: Sequence[Tensor],
    grid: Grid | Sequence[Grid],
    *,
    foreground: bool = False,
    like: PcaScores | None = None,
) -> PcaScores:
    """The three principal components of each layer at every patch, turned so that layers can be compared.

    The foreground, if asked for, is one side of the mean of the last layer's first component: the side that has fewer
    of the patches at the images' edges. It is the same for all layers, whose components are then fitted to it alone.
    """
    grids = _one_for_each(grid, len(layers))
    _check(layers, grids, like)
    shown_BHW = torch.ones(len(layers[-1]), *grids[-1], dtype=torch.bool, device=layers[-1].device)
    if foreground:
        shown_BHW = _foreground(_principal(layers[-1].flatten(0, 1))[0][:, 0].view(shown_BHW.shape))
    nearby_BHWC = None if like is None else _last_with_variance(like.maps).to(shown_BHW.device)
    finest = max(grids, key=math.prod)
    maps, explained = [], []
    for layer_BND, own in zip(reversed(layers), reversed(grids), strict=True):
        shown_M = _nearest(shown_BHW[..., None].float(), own).flatten() > 0
        fitted, fractions = _principal(layer_BND.flatten(0, 1)[shown_M])
        scores_M3 = fitted.new_zeros(len(shown_M), 3)
        scores_M3[shown_M] = fitted
        if nearby_BHWC is not None:
            scores_M3 = _turned(scores_M3, _smooth(nearby_BHWC, own).flatten(0, 2).to(scores_M3))
        scores_BHWC = scores_M3.view(-1, *own, 3).float()
        if scores_BHWC.any():  # a layer without variance gives no colours to turn to
            nearby_BHWC = scores_BHWC
        maps.append(_nearest(scores_BHWC, finest))
        explained.append(fractions.float())
    shown_BHW = _nearest(shown_BHW[..., None].float(), finest)[..., 0] > 0
    return PcaScores(torch.stack(maps[::-1]), torch.stack(explained[::-1]), shown_BHW)


def _one_for_each(grid: Grid | Sequence[Grid], layers: int) -> list[Grid]:
    is_one = all(isinstance(number, int) for number in grid)
    return [cast(Grid, tuple(grid))] * layers if is_one else list(cast(Sequence[Grid], grid))


def _check(layers: Sequence[Tensor], grids: Sequence[Grid], like: PcaScores | None) -> None:
    """Raise unless all layers have features of the same images, finite, and as many as their grid has patches."""
    if not layers or len(grids) != len(layers):
        raise InvalidArgumentError(
            f"{len(layers)} layers with {len(grids)} grids: expected features (B, N, D) of one layer at least, and one "
            "grid for all of them or one for each"
        )
    for i, (layer_BND, (rows, columns)) in enumerate(zip(layers, grids, strict=True)):
        if layer_BND.ndim != 3 or not layer_BND.is_floating_point() or not layer_BND.numel():
            raise InvalidArgumentError(
                f"layers[{i}] is {layer_BND.dtype} {tuple(layer_BND.shape)}: expected floating point (B, N, D), none 0"
            )
        if layer_BND.shape[1] != rows * columns or rows < 1:
            raise InvalidArgumentError(
                f"layers[{i}] has {layer_BND.shape[1]} patches, which are no grid of {rows} x {columns}: give "
                "features without class and register tokens, and rows and columns of patches"
            )
        if len(layer_BND) != len(layers[0]):
            raise InvalidArgumentError(
                f"layers[{i}] has {len(layer_BND)} images and layers[0] has {len(layers[0])}: expected the same ones"
            )
        broken = [index for index, image_ND in enumerate(layer_BND) if not image_ND.isfinite().all()]
        if broken:
            raise InvalidArgumentError(
                f"layers[{i}] holds NaN or infinity in image {', '.join(map(str, broken[:5]))}: expected finite "
                "features; half precision may have overflowed"
            )
    if like is not None and like.maps.shape[1] != len(layers[0]):
        raise InvalidArgumentError(
            f"like has {like.maps.shape[1]} images, expected the same {len(layers[0])} as the layers"
        )


def _principal(x_MD: Tensor) -> tuple[Tensor, Tensor]:
    """The first three components (M, 3), of unit variance, and the fractions of all variance that they hold (3,).

    From the eigenvectors of the covariance or of the Gram matrix, whichever is smaller. The largest score is positive.
    Components which there are not, or which the rounding of the features accounts for, are 0.
    """
    count, width = x_MD.shape
    double = torch.float32 if x_MD.device.type == "mps" else torch.float64
    chunks = x_MD.split(_ROWS)
    mean_D = torch.stack([chunk.to(double).mean(0) * (len(chunk) / count) for chunk in chunks]).sum(0)
    if count < width:
        centred_MD = x_MD.to(double) - mean_D
        second = centred_MD @ centred_MD.mT / count
    else:
        second = torch.zeros(width, width, dtype=double, device=x_MD.device)
        for chunk in chunks:
            centred = chunk.to(double) - mean_D
            second.addmm_(centred.mT, centred, alpha=1 / count)
    variances, vectors = (found.flip(-1)[..., :3] for found in torch.linalg.eigh(second))
    scores = vectors if count < width else torch.cat([(chunk.to(double) - mean_D) @ vectors for chunk in chunks])

    total = second.trace()
    rounding = (torch.finfo(x_MD.dtype).eps / 2) ** 2 * (total + mean_D.square().sum())
    real = variances > rounding
    scores = scores / scores.square().mean(0).sqrt().where(real, 1) * real
    scores = scores * scores.gather(0, scores.abs().argmax(0, keepdim=True)).sign()
    lacking = (0, 3 - scores.shape[1])
    return F.pad(scores, lacking), F.pad(variances * real / total.where(total > 0, 1), lacking)


def _foreground(first_BHW: Tensor) -> Tensor:
    """That side of the first component, (B, h, w), which has fewer of the patches at the edge; all if it is flat."""
    positive_BHW = first_BHW > 0
    edge_HW = torch.ones_like(positive_BHW[0])
    edge_HW[1:-1, 1:-1] = False
    is_inside = positive_BHW[:, edge_HW].float().mean() <= positive_BHW.float().mean()
    return (positive_BHW == is_inside) | (first_BHW == 0).all()


def _turned(scores_M3: Tensor, to_M3: Tensor) -> Tensor:
    """`scores_M3` times the orthogonal matrix that brings it nearest to `to_M3`."""
    left, _, right = torch.linalg.svd(scores_M3.mT @ to_M3)
    return scores_M3 @ (left @ right)


def _last_with_variance(maps_LBHWC: Tensor) -> Tensor:
    return next((layer for layer in maps_LBHWC.flip(0) if layer.any()), maps_LBHWC[-1])


def _nearest(maps_BHWC: Tensor, grid: Grid) -> Tensor:
    return F.interpolate(maps_BHWC.movedim(-1, 1), grid, mode="nearest-exact").movedim(1, -1)


def _smooth(maps_BHWC: Tensor, grid: Grid) -> Tensor:
    return F.interpolate(maps_BHWC.movedim(-1, 1), grid, mode="bilinear", antialias=True).movedim(1, -1)


def _stretched(scores_M3: Tensor, quantile: float) -> Tensor:
    """Each column from its `quantile` to its 1 - `quantile` as 0 to 1, clipped; 0.5 where it does not vary."""
    ordered = scores_M3.sort(0).values
    beyond = int(quantile * (len(ordered) - 1))
    low, high = ordered[beyond], ordered[-1 - beyond]
    flat = high - low < 1e-4  # of a standard deviation: nearly all patches are the same, a few are not
    low, high = low.where(~flat, ordered[0]), high.where(~flat, ordered[-1])
    flat = high - low < 1e-4
    return ((scores_M3 - low) / (high - low).where(~flat, 1)).clamp(0, 1).where(~flat, 0.5)
