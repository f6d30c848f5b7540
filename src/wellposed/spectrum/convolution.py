"""The singular values of a depthwise convolution, the token mixing of a ConvMixer."""

import torch
from torch import Tensor


def depthwise_singular_values(kernels_C1HW: Tensor, height: int, width: int) -> Tensor:
    """Those of each channel's convolution with stride 1 on `height` x `width` tokens, (C, height * width).

    With borders that wrap around it is diagonal in the Fourier basis; zero padding changes little but the borders.

    Example:
        >>> depthwise_singular_values(torch.ones(1, 1, 1, 1), 2, 2)
        tensor([[1., 1., 1., 1.]], dtype=torch.float64)
    """
    return torch.fft.fft2(kernels_C1HW.double().squeeze(1), s=(height, width)).abs().flatten(1)
