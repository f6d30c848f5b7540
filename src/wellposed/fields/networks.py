"""Coordinates in, colour or occupancy out: the network of images and shapes (arXiv 2403.19243).

    first layer, full rank  ->  `depth` hidden layers, full-rank, low-rank or sine  ->  last layer, full rank

with an activation after all but the last. ReLU needs Fourier features, which stand in the place of the first layer.
"""

from math import sqrt
from typing import Literal

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgumentError
from wellposed.fields.activations import FourierFeatures, Gaussian, Sine
from wellposed.fields.layers import Kind, field_linear
from wellposed.lowrank import LowRankLinear, SineLinear
from wellposed.lowrank.frequency import Omega

Activation = Literal["gauss", "siren", "relu-fourier"]
SCALES = {"gauss": 0.1, "siren": 30.0, "relu-fourier": 5.0}
"""Usual sigma of the Gaussian, frequency of SIREN's sine, standard deviation of the Fourier features.

The latter's authors have 10 for coordinates from 0 to 1.
"""


class CoordinateNetwork(nn.Module):
    """A field of `in_features` coordinates in [-1, 1].

    Args:
        in_features: coordinates.
        out_features: channels.
        width: of the hidden layers.
        depth: how many width x width layers there are.
        kind: of these.
        rank: k of these, unless they are full.
        omega: frequency of sine layers; "auto" for 6 sqrt(width).
        activation: "gauss", "siren" or "relu-fourier".
        scale: sigma, frequency or standard deviation; that of `SCALES` if None.

    Example:
        >>> network = CoordinateNetwork(3, 1, kind="sine", rank=1)
        >>> network(torch.zeros(5, 3)).shape, sum(p.numel() for p in network.parameters())
        (torch.Size([5, 1]), 2817)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        width: int = 256,
        depth: int = 2,
        kind: Kind = "full",
        rank: int | None = None,
        omega: Omega = "auto",
        activation: Activation = "gauss",
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if activation not in SCALES:
            raise InvalidArgumentError(f"activation={activation!r}: expected one of {', '.join(SCALES)}")
        scale = SCALES[activation] if scale is None else scale
        # SIREN's hidden weights have standard deviation sqrt(2 / in) / frequency; those of a sine layer 1 / (sqrt 2 g).
        gain = scale * sqrt(width) / 2 if activation == "siren" else None
        hidden = [field_linear(width, width, rank, kind, omega, gain=gain) for _ in range(depth)]
        last = nn.Linear(width, out_features)
        if activation == "relu-fourier":
            layers: list[nn.Module] = [FourierFeatures(in_features, width, scale)]
        else:
            layers = [nn.Linear(in_features, width), _function(activation, scale)]
        for layer in hidden:
            layers += [layer, _function(activation, scale)]
        self.layers = nn.Sequential(*layers, last)
        if activation == "siren":
            self._initialize_siren(scale)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        with torch.autocast(x.device.type, enabled=False):  # rounded to bfloat16, places would lie 1/256 apart
            x = first(x.float())
        for layer in others:
            x = layer(x)
        return x

    @torch.no_grad()
    def _initialize_siren(self, frequency: float) -> None:
        """Weights for which the argument of every sine has the same spread (arXiv 2006.09661)."""
        first = True
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                bound = 1 / layer.in_features if first else sqrt(6 / layer.in_features) / frequency
                nn.init.uniform_(layer.weight, -bound, bound)
                first = False
            elif isinstance(layer, LowRankLinear) and not isinstance(layer, SineLinear):
                factor = sqrt(3 * sqrt(2) / frequency)  # std(U V^T) is 1 / (3 sqrt(in)) before
                layer.U.mul_(factor)
                layer.Vt.mul_(factor)


def _function(activation: Activation, scale: float) -> nn.Module:
    if activation == "relu-fourier":
        return nn.ReLU()
    return Gaussian(scale) if activation == "gauss" else Sine(scale)
