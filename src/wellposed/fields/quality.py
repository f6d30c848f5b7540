"""How alike two pictures are: PSNR and SSIM.

Shapes: C channels, H rows, W columns; values in [0, 1].
"""

import torch
from torch import Tensor
from torch.nn import functional as F

WINDOW = 11
"""Pixels a side of SSIM's window; a picture must be as large."""
_SIGMA = 1.5


def psnr(found: Tensor, truth: Tensor) -> Tensor:
    """-10 log10 of the mean squared error, in dB.

    Example:
        >>> psnr(torch.full((3, 4, 4), 0.5), torch.full((3, 4, 4), 0.6))
        tensor(20.0000)
    """
    return -10 * torch.log10(F.mse_loss(found, truth))


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
    """The Gaussian means over all windows that fit."""
    at = torch.arange(WINDOW, dtype=x_NCHW.dtype, device=x_NCHW.device) - WINDOW // 2
    weights = torch.exp(-0.5 * (at / _SIGMA) ** 2)
    weights = weights / weights.sum()
    planes = x_NCHW.flatten(0, 1)[:, None]
    with torch.autocast(x_NCHW.device.type, enabled=False):
        planes = F.conv2d(F.conv2d(planes, weights[None, None, :, None]), weights[None, None, None, :])
    return planes[:, 0].unflatten(0, x_NCHW.shape[:2])
