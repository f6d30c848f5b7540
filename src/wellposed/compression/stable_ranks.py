"""How far quantization can move a stable rank (arXiv 2505.21895)."""

from torch import Tensor

from wellposed.errors import InvalidArgumentError
from wellposed.spectrum import frobenius_norm, spectral_norm


def stable_rank_bounds(matrix: Tensor, quantized: Tensor) -> tuple[float, float]:
    """The least and the largest stable rank that Q(A) can have, from the norms of A and of E = Q(A) - A alone.

    (||A||_F - ||E||_F)^2 / (||A||_2 + ||E||_2)^2 <= SR(Q(A)) <= (||A||_F + ||E||_F)^2 / (||A||_2 - ||E||_2)^2, and in
    any case it is between 1 and the smaller side, or 0 for a matrix of zeros. The right side holds for
    ||E||_2 < ||A||_2: a low rank stays low, so that what the sine adds to it has to come after quantization.

    Args:
        matrix: A, (m, n).
        quantized: Q(A), of the same shape.

    Example:
        >>> import torch
        >>> low, high = stable_rank_bounds(torch.eye(4), 1.1 * torch.eye(4))
        >>> round(low, 3), round(high, 3)
        (2.678, 4.0)
    """
    if matrix.shape != quantized.shape or matrix.ndim != 2:
        raise InvalidArgumentError(
            f"matrices of shapes {tuple(matrix.shape)} and {tuple(quantized.shape)}: expected two of one shape (m, n)"
        )
    whole, largest = float(frobenius_norm(matrix)), float(spectral_norm(matrix))
    error = quantized.double() - matrix.double()
    lost, moved = float(frobenius_norm(error)), float(spectral_norm(error))
    side = float(min(matrix.shape))
    low = (max(0.0, whole - lost) / (largest + moved)) ** 2 if largest + moved > 0 else 0.0
    high = ((whole + lost) / (largest - moved)) ** 2 if moved < largest else side
    return low, min(high, side)
