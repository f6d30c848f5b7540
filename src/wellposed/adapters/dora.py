"""The norms that DoRA divides by: those of the rows of V = W0 + s sin(omega B A)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from wellposed.lowrank.eager import sine_delta

_ENTRIES = 2**22
"""Of V that are worked on at a time: 16 MiB of float32."""


@torch.no_grad()
def row_norms(weight_OI: Tensor) -> Tensor:
    """||W|| of each row, (out,), in float32 at least."""
    return torch.cat([_norms(weight_OI[rows]) for rows in _rows(weight_OI)])


@torch.no_grad()
def adapted_row_norms(weight_OI: Tensor, a: Tensor, b: Tensor, omega: float, scale: float) -> Tensor:
    """||W0 + scale sin(omega B A)|| of each row, (out,), in float32 at least; V is never there as a whole.

    Args:
        weight_OI: W0.
        a: A, (r, in).
        b: B, (out, r).
        omega: the frequency.
        scale: s.
    """
    precise = torch.promote_types(weight_OI.dtype, torch.float32)
    return torch.cat(
        [_norms(weight_OI[rows] + sine_delta(a, b[rows], omega, scale, precise)) for rows in _rows(weight_OI)]
    )


def _norms(rows_OI: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows_OI.to(torch.promote_types(rows_OI.dtype, torch.float32)), dim=1)


def _rows(weight_OI: Tensor) -> Iterator[slice]:
    count = max(1, _ENTRIES // weight_OI.shape[1])
    return (slice(start, start + count) for start in range(0, weight_OI.shape[0], count))
