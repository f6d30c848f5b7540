"""LoRA by its singular directions, the first in more bits than the rest: the idea of LoRAQuant (arXiv 2510.26690)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from wellposed.compression.bits import packed_length
from wellposed.compression.quantizers import Quantized, quantize


@dataclass(frozen=True)
class Split:
    """Factors with the product Q(B') Q(A'), and what it takes to hold them."""

    a: Tensor
    """(r, in), in float32."""
    b: Tensor
    """(out, r)."""
    nbytes: int
    """Of codes and codebooks."""


def split_by_direction(a: Tensor, b: Tensor, share: float = 0.6, bits: tuple[int, int] = (2, 1)) -> Split:
    """B A = U S V^T as B' = U sqrt(S) and A' = sqrt(S) V^T, quantized one direction at a time.

    Every row of A' and column of B' has a k-means codebook of its own. LoRAQuant rounds to a grid and then trains the
    factors against the error of B A; neither is done here.

    Args:
        a: A, (r, in).
        b: B, (out, r).
        share: of the directions, rounded, that are quantized to the first number of bits.
        bits: of the directions of large singular values, and of the others.

    Example:
        >>> a, b = torch.eye(2, 8), torch.tensor([[1.0, 0.0], [0.0, 0.5]])
        >>> split = split_by_direction(a, b)
        >>> (split.b @ split.a - b @ a).abs().max() < 1e-3, split.nbytes
        (tensor(True), 29)
    """
    (split,) = split_all([(a, b)], share, bits)
    return split


@torch.no_grad()
def split_all(
    pairs: Sequence[tuple[Tensor, Tensor]], share: float = 0.6, bits: tuple[int, int] = (2, 1)
) -> list[Split]:
    """`split_by_direction` of each A and B, with the rows of all of them quantized together."""
    rows = [each for pair in pairs for each in _directions(*pair)]
    found: list[list[Quantized]] = [[] for _ in rows]
    for half, count in enumerate(bits):
        halves = [each.tensor_split([round(share * len(each))])[half] for each in rows]
        there = [i for i, each in enumerate(halves) if len(each)]
        for i, quantized in zip(there, quantize([halves[i] for i in there], count), strict=True):
            found[i].append(quantized)
    return [
        Split(_filled(a, of_a), _filled(b.T, of_b).T.contiguous(), sum(_nbytes(part) for part in (*of_a, *of_b)))
        for (a, b), of_a, of_b in zip(pairs, found[::2], found[1::2], strict=True)
    ]


def _directions(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of A' and the columns of B', those of large singular values first."""
    (q_a, r_a), (q_b, r_b) = (torch.linalg.qr(factor.double()) for factor in (a.T, b))
    u, s, vh = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    return s.sqrt()[:, None] * (vh @ q_a.T), s.sqrt()[:, None] * (q_b @ u).T


def _filled(like: Tensor, parts: list[Quantized]) -> Tensor:
    """The values of the parts one below the other, then zeros, in the shape of `like`."""
    values = torch.cat([part.values() for part in parts])
    return pad(values, (0, 0, 0, len(like) - len(values)))


def _nbytes(part: Quantized) -> int:
    return packed_length(part.codes.numel(), part.bits) + part.codebooks.nbytes
