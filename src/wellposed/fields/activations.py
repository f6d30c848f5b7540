"""What stands between the layers of a field, and what may stand before them: Gaussian, SIREN's sine, Fourier features.

Shapes: P points, D coordinates, F frequencies.
"""

import math

import torch
from torch import Tensor, nn


class Gaussian(nn.Module):
    """exp(-z^2 / (2 sigma^2)), the activation of the paper's occupancy network (arXiv 2403.19243).

    Example:
        >>> Gaussian(sigma=0.5)(torch.tensor([0.0, 0.5]))
        tensor([1.0000, 0.6065])
    """

    def __init__(self, sigma: float = 0.1) -> None:
        super().__init__()
        self.sigma = sigma

    def forward(self, z: Tensor) -> Tensor:
        return torch.exp(z.square() * (-0.5 / self.sigma**2))


class Sine(nn.Module):
    """sin(frequency z), SIREN's activation (arXiv 2006.09661).

    Example:
        >>> Sine(frequency=2.0)(torch.tensor([0.0, torch.pi / 4]))
        tensor([0., 1.])
    """

    def __init__(self, frequency: float = 30.0) -> None:
        super().__init__()
        self.frequency = frequency

    def forward(self, z: Tensor) -> Tensor:
        return torch.sin(self.frequency * z)


class FourierFeatures(nn.Module):
    """[sin(2 pi B x), cos(2 pi B x)] with a fixed Gaussian B, (F, D), of standard deviation `scale` (arXiv 2006.10739).

    B is rounded to what float16 holds, so that a weights file in float16 gives the same features.

    Example:
        >>> features = FourierFeatures(2, 8)
        >>> features(torch.zeros(1, 2)).tolist()
        [[0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]]
    """

    frequencies: Tensor

    def __init__(self, in_features: int, out_features: int, scale: float = 5.0) -> None:
        super().__init__()
        frequencies = scale * torch.randn(out_features // 2, in_features)
        self.register_buffer("frequencies", frequencies.half().float())

    def forward(self, x_PD: Tensor) -> Tensor:
        phases_PF = 2 * math.pi * (x_PD @ self.frequencies.T)
        return torch.cat([phases_PF.sin(), phases_PF.cos()], dim=-1)
