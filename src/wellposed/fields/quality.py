"""How alike two pictures are: PSNR and SSIM.

Shapes: C channels, H rows, W columns; values in [0, 1].
"""

from math import exp

import torch
from torch import Tensor
from torch.nn import functional as F

WINDOW = 11
"""Pixels a side of SSIM's window; a picture must be as large."""
_SIGMA = 1.5
_LEAST_ERROR = 1e-10


def psnr(found: Tensor, truth: Tensor) -> Tensor:
    """-10 log10 of the mean squared error, in dB, at most 100.

    Example:
        >>> psnr(torch.full((3, 4, 4), 0.5), torch.full((3, 4, 4), 0.6))
        tensor(20.0000)
    """
    return decibels(F.mse_loss(found, truth))


def decibels(error: Tensor) -> Tensor:
    """The PSNR that belongs to a mean squared error; at most 100, also where pictures of one colour are met exactly."""
    return -10 * torch.log10(error.clamp(min=_LEAST_ERROR))


def ssim(found_CHW: Tensor, truth_CHW: Tensor) -> Tensor:
    """The structural similarity of Wang et al. (2004): a Gaussian window of 11 x 11 with sigma 1.5, K = (0.01, 0.03).

    The mean over all places where the window fits, and over the channels.

    Example:
        >>> picture = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))
        >>> ssim(picture, picture)
        tensor(1.)
    """
    x, y = found_CHW.float(), truth_CHW.float()
    means = _blurred(torch.stack([x, y, x * x, y * y, x * y]))
    mean_x, mean_y, var_x, var_y, covariance = means.unbind()
    var_x, var_y, covariance = var_x - mean_x**2, var_y - mean_y**2, covariance - mean_x * mean_y
    one, two = 0.01**2, 0.03**2
    above = (2 * mean_x * mean_y + one) * (2 * covariance + two)
    return (above / ((mean_x**2 + mean_y**2 + one) * (var_x + var_y + two))).mean()


def _blurred(x_NCHW: Tensor) -> Tensor:
    """The Gaussian means over all windows that fit.

    As sums of shifted pictures: cuDNN's convolutions round to TF32, in which a variance of 1e-3 is lost.
    """
    weights = [exp(-0.5 * ((i - WINDOW // 2) / _SIGMA) ** 2) for i in range(WINDOW)]
    for dim in (2, 3):
        size = x_NCHW.shape[dim] - WINDOW + 1
        x_NCHW = sum(
            (weight / sum(weights) * x_NCHW.narrow(dim, i, size) for i, weight in enumerate(weights)),
            start=torch.zeros((), device=x_NCHW.device),
        )
    return x_NCHW
