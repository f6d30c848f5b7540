"""LoRA by its singular directions, the first in more bits than the rest: the idea of LoRAQuant (arXiv 2510.26690)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.compression.bits import packed_length
from wellposed.compression.quantizers import quantize


@dataclass(frozen=True)
class Split:
    """Factors with the product Q(B') Q(A'), and what it takes to hold them."""

    a: Tensor
    """(r, in), in float32."""
    b: Tensor
    """(out, r)."""
    nbytes: int
    """Of codes and codebooks."""


@torch.no_grad()
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
    (q_a, r_a), (q_b, r_b) = (torch.linalg.qr(factor.double()) for factor in (a.T, b))
    u, s, vh = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    rows_a, rows_b = s.sqrt()[:, None] * (vh @ q_a.T), s.sqrt()[:, None] * (q_b @ u).T
    first = round(share * len(s))
    quantized_a, quantized_b, nbytes = torch.zeros_like(a, dtype=torch.float32), b.new_zeros(b.T.shape).float(), 0
    for rows, into in ((rows_a, quantized_a), (rows_b, quantized_b)):
        for some, count in ((slice(0, first), bits[0]), (slice(first, len(s)), bits[1])):
            if len(rows[some]):
                (found,) = quantize([rows[some]], count)
                into[some] = found.values()
                nbytes += packed_length(found.codes.numel(), count) + found.codebooks.nbytes
    return Split(quantized_a, quantized_b.T.contiguous(), nbytes)
