"""The network of NeRF (arXiv 2003.08934), each of its layers full-rank, low-rank or sine low-rank (arXiv 2403.19243).

    gamma(x) -> 8 layers of 256, gamma(x) once more beside the input of the sixth -> density
                                                                                  -> feature, gamma(d) -> 128 -> colour

A sample costs 1.2 million operations, and three times that in training. Every layer is one product with a matrix that
is made anew each step: 256 x 256 is nothing against the 10^5 samples of a batch.

Shapes: S samples.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.fields.layers import Kind, field_linear
from wellposed.fields.nerf_config import OCTAVES, VIEW_OCTAVES, encoded_width
from wellposed.lowrank.frequency import Omega

_ALIGNED = 8
"""Tensor cores take products whose inner width is a multiple of this."""


def encode(x_S3: Tensor, octaves: int) -> Tensor:
    """x, sin(2^l x) and cos(2^l x) for l below `octaves`, and zeros up to a multiple of 8.

    Example:
        >>> encode(torch.zeros(1, 3), 1).tolist()
        [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    """
    phases = (x_S3[:, None] * 2.0 ** torch.arange(octaves, device=x_S3.device)[:, None]).flatten(1)
    width = encoded_width(octaves)
    return F.pad(torch.cat([x_S3, phases.sin(), phases.cos()], 1), (0, -width % _ALIGNED))


class NerfMLP(nn.Module):
    """One network from place and direction to density and colour; see `NerfNetwork` for its arguments."""

    def __init__(
        self,
        width: int,
        depth: int,
        skip: int,
        octaves: int,
        view_octaves: int,
        kind: Kind,
        rank: int | None,
        omega: Omega,
    ) -> None:
        super().__init__()
        self.skip, self.octaves, self.view_octaves = skip, octaves, view_octaves
        place, view = encoded_width(octaves), encoded_width(view_octaves)
        inputs = [place if i == 0 else width + place if i == skip else width for i in range(depth)]
        self.layers = nn.ModuleList(field_linear(each, width, rank, kind, omega) for each in inputs)
        self.feature = field_linear(width, width, rank, kind, omega)
        self.view = field_linear(width + view, width // 2, rank, kind, omega)
        self.density_head = nn.Linear(width, 1)
        self.colour_head = nn.Linear(width // 2, 3)

    def forward(self, points_S3: Tensor, views_S3: Tensor) -> tuple[Tensor, Tensor]:
        """Density (S,) and colour (S, 3), in float32; `views_S3` have length 1."""
        hidden = self._trunk(points_S3)
        feature = _product(self.feature, hidden)
        seen = _product(self.view, torch.cat([feature, encode(views_S3, self.view_octaves).to(feature.dtype)], 1))
        return self._density(hidden), torch.sigmoid(_product(self.colour_head, seen.relu()).float())

    def density(self, points_S3: Tensor) -> Tensor:
        """Density (S,) alone."""
        return self._density(self._trunk(points_S3))

    def _trunk(self, points_S3: Tensor) -> Tensor:
        place = encode(points_S3, self.octaves)
        hidden = place
        for i, layer in enumerate(self.layers):
            if i > 0 and i == self.skip:
                hidden = torch.cat([hidden, place.to(hidden.dtype)], 1)
            hidden = _product(layer, hidden).relu()
        return hidden

    def _density(self, hidden: Tensor) -> Tensor:
        # Softplus in the place of ReLU: a density that has become 0 everywhere would never come back.
        return F.softplus(_product(self.density_head, hidden)[:, 0].float() - 1)


class NerfNetwork(nn.Module):
    """NeRF's network, or with `coarse` its pair of networks.

    Args:
        width: of the hidden layers.
        depth: how many there are.
        skip: the layer, counted from 0, that sees the place again.
        octaves: of the place's encoding.
        view_octaves: of the direction's encoding.
        kind: of all layers but the two that give density and colour, which have 1 and 3 outputs.
        rank: k of these, unless they are full.
        omega: frequency of sine layers; "auto" for 6 sqrt(in) of each.
        coarse: a second network, for hierarchical sampling.

    Example:
        >>> [sum(p.numel() for p in NerfNetwork(kind=kind, rank=5).parameters()) for kind in ("full", "sine")]
        [595844, 27521]
    """

    def __init__(
        self,
        width: int = 256,
        depth: int = 8,
        skip: int = 5,
        octaves: int = OCTAVES,
        view_octaves: int = VIEW_OCTAVES,
        kind: Kind = "full",
        rank: int | None = None,
        omega: Omega = "auto",
        coarse: bool = False,
    ) -> None:
        super().__init__()
        arguments: tuple[Any, ...] = (width, depth, skip, octaves, view_octaves, kind, rank, omega)
        self.fine = NerfMLP(*arguments)
        self.coarse = NerfMLP(*arguments) if coarse else None

    def forward(self, points_S3: Tensor, views_S3: Tensor) -> tuple[Tensor, Tensor]:
        """Density and colour by the network that counts."""
        return self.fine(points_S3, views_S3)


def _product(layer: nn.Module, x_SI: Tensor) -> Tensor:
    """What the layer gives for x; its matrix is made in float32 and, where x is padded with zeros, padded too."""
    with torch.autocast(x_SI.device.type, enabled=False):
        weight_OI: Any = layer.weight
    return F.linear(x_SI, F.pad(weight_OI, (0, x_SI.shape[1] - weight_OI.shape[1])), layer.bias)  # type: ignore[arg-type]
