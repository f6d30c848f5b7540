"""Numbers as b-bit codes and a codebook of 2^b values: k-means, uniform, and normal-float (arXiv 2505.21895).

The values of k-means are means of what they stand for, so that a row x becomes a shorter one x': <x, x'> = ||x'||^2,
a share s of ||x||^2, 0.64 in one bit and 0.88 in two for normal x. In dW = B A the factors multiply. "stretched" has
the codes of k-means, and its values over s, the scale of DRIVE and EDEN (arXiv 2105.08339, 2108.08842) without their
random rotation: x' keeps the length of x along x, and what lies across grows with it. For normal factors the error of
dW is then sqrt(1 / s^2 - 1) instead of sqrt(1 - s^2): 0.53 instead of 0.47 in two bits, 1.21 instead of 0.77 in one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args

import torch
from torch import Tensor

from wellposed.compression.kmeans import kmeans_codebooks
from wellposed.errors import InvalidArgumentError

Scheme = Literal["kmeans", "uniform", "normal", "stretched"]
MOST_BITS = 8
_TOGETHER = 2**22
"""Numbers that are quantized at a time."""


@dataclass(frozen=True)
class Quantized:
    """Rows of numbers as codes, (T, n) of uint8, and float16 codebooks, (T, 2^b), times a power of two."""

    codes: Tensor
    codebooks: Tensor
    exponent: int
    """Small numbers would be lost in float16: the values are codebooks * 2^exponent, the largest of them about 1."""

    @property
    def bits(self) -> int:
        """Of each code."""
        return (self.codebooks.shape[1] - 1).bit_length()

    def values(self) -> Tensor:
        """What the codes stand for, (T, n), in float32."""
        return decode(self.codes, self.codebooks, self.exponent)


def quantize(rows: Sequence[Tensor], bits: int, scheme: Scheme = "kmeans") -> list[Quantized]:
    """Each matrix (T, n) with a codebook of 2^bits values for each of its rows; a matrix of one row has one codebook.

    Args:
        rows: matrices of finite numbers, on any device; those of equal n are worked on together.
        bits: 1 to 8.
        scheme: how the values are chosen. "kmeans": so that the squared error is least. "uniform": equal steps from the
            smallest number to the largest. "normal": the levels of QLoRA's NormalFloat, made for numbers from a normal
            distribution, times the root mean square of the row. "stretched": those of k-means, times what a row
            needs to keep its length along itself, which products of factors may need more than a small error.

    Raises:
        InvalidArgumentError: bits out of range, an unknown scheme, or a matrix with NaN, Inf or no numbers.

    Example:
        >>> (found,) = quantize([torch.tensor([[0.0, 0.25, 0.26, 1.0, 1.0]])], bits=1)
        >>> found.codes.tolist(), found.values().round(decimals=2).unique().tolist()
        ([[0, 0, 0, 1, 1]], [0.17000000178813934, 1.0])
    """
    check_bits(bits)
    if scheme not in get_args(Scheme):
        raise InvalidArgumentError(f"scheme={scheme!r}: expected one of {', '.join(get_args(Scheme))}")
    for matrix in rows:
        if matrix.ndim != 2 or not matrix.numel() or not matrix.is_floating_point() or not matrix.isfinite().all():
            raise InvalidArgumentError(
                f"a {matrix.dtype} tensor of shape {tuple(matrix.shape)} cannot be quantized: expected a matrix of "
                "finite floating-point numbers"
            )
    found: dict[int, Quantized] = {}
    for n in {matrix.shape[1] for matrix in rows}:
        same = [i for i, matrix in enumerate(rows) if matrix.shape[1] == n]
        count = ceil(_TOGETHER / max(n, *(rows[i].numel() for i in same)))
        for batch in (same[start : start + count] for start in range(0, len(same), count)):
            found |= zip(batch, _quantize_together([rows[i].detach() for i in batch], bits, scheme), strict=True)
    return [found[i] for i in range(len(rows))]


def decode(codes: Tensor, codebooks: Tensor, exponent: int | Tensor) -> Tensor:
    """The values of codes (T, n) in codebooks (T, 2^b) * 2^exponent, in float32; one exponent, or (T, 1)."""
    # ldexp of the codebook, not of the values: 2^b numbers per row, and exact.
    table = torch.ldexp(codebooks.float(), torch.as_tensor(exponent, device=codebooks.device))
    return table.gather(1, codes.long())


def check_bits(bits: object) -> None:
    """InvalidArgumentError unless `bits` is a whole number from 1 to 8."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= MOST_BITS:
        raise InvalidArgumentError(f"bits={bits!r}: expected a whole number from 1 to {MOST_BITS}")


def normal_levels(bits: int) -> Tensor:
    """The 2^bits levels of NormalFloat for numbers of standard deviation 1, in float64.

    Quantiles of the normal distribution, 0 among them, one more above it than below; divided by their largest they are
    those of QLoRA (arXiv 2305.14314). With one bit there is no room for 0: the medians of the two halves.
    """
    if bits == 1:
        return torch.special.ndtri(torch.tensor([0.25, 0.75], dtype=torch.float64))
    k = 2**bits
    outermost = 1 - (1 / (k - 1) + 1 / k) / 4
    above, below = (
        torch.special.ndtri(torch.linspace(outermost, 0.5, count + 1, dtype=torch.float64)[:-1])
        for count in (k // 2, k // 2 - 1)
    )
    return torch.cat([-below, torch.zeros(1, dtype=torch.float64), above.flip(0)])


def _quantize_together(matrices: list[Tensor], bits: int, scheme: Scheme) -> list[Quantized]:
    together = torch.cat([matrix if matrix.dtype == torch.float64 else matrix.float() for matrix in matrices])
    if scheme in {"kmeans", "stretched"}:
        codebooks = kmeans_codebooks(together, 2**bits)
    elif scheme == "uniform":
        low, high = (end.double() for end in torch.aminmax(together, dim=1, keepdim=True))
        codebooks = low + (high - low) * torch.linspace(0, 1, 2**bits, dtype=torch.float64, device=together.device)
    else:
        codebooks = together.double().square().mean(1, keepdim=True).sqrt() * normal_levels(bits).to(together.device)
    sizes = [len(matrix) for matrix in matrices]
    coded = [_coded(rows, books) for rows, books in zip(together.split(sizes), codebooks.split(sizes), strict=True)]
    if scheme == "stretched":
        return [_stretched(rows, found) for rows, found in zip(together.split(sizes), coded, strict=True)]
    return coded


def _coded(rows_Tn: Tensor, codebooks: Tensor) -> Quantized:
    """Each number as the code of the nearest value that float16 leaves."""
    halves, exponent = _halves(codebooks)
    table = torch.ldexp(halves.to(rows_Tn.dtype), torch.tensor(exponent, device=codebooks.device))
    middles = table[:, :-1] + (table[:, 1:] - table[:, :-1]) / 2
    return Quantized(torch.searchsorted(middles.contiguous(), rows_Tn.contiguous()).to(torch.uint8), halves, exponent)


def _stretched(rows_Tn: Tensor, found: Quantized) -> Quantized:
    """The same codes, of values times ||x||^2 / <x, x'>; as they are where x' is at right angles to x."""
    exact = rows_Tn.double()
    squares, along = ((exact * other).sum(1, keepdim=True) for other in (exact, found.values().double()))
    codebooks = torch.ldexp(found.codebooks.double(), torch.tensor(found.exponent, device=exact.device))
    return Quantized(found.codes, *_halves(codebooks * torch.where(along > 0, squares / along, 1.0)))


def _halves(codebooks: Tensor) -> tuple[Tensor, int]:
    """Codebooks in float16, and the exponent that they are to be multiplied by."""
    exponent = min(127, max(-126, int(torch.frexp(codebooks.abs().max()).exponent)))
    return torch.ldexp(codebooks, torch.tensor(-exponent, device=codebooks.device)).half(), exponent
