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
    kernels = kernels_C1HW.double().squeeze(1)
    wrapped = kernels.new_zeros(len(kernels), height, width)
    rows, columns = (torch.arange(size, device=kernels.device) for size in kernels.shape[1:])
    wrapped.index_put_(
        (torch.arange(len(kernels), device=kernels.device)[:, None, None], rows[:, None] % height, columns % width),
        kernels,
        accumulate=True,
    )
    return torch.fft.fft2(wrapped).abs().flatten(1)
