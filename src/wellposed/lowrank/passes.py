"""The two passes over an out x in matrix that a sine layer makes: W0 + s sin(omega B A), and from dy^T x the gradients.

Both as torch's operations, on some rows at a time, and on a GPU as the kernels of `wellposed.lowrank.kernels`. Neither
leaves an out x in matrix behind, other than what it returns; both are called where no gradients are recorded.

Shapes: T tokens, I in, O out, r rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from logging import getLogger
from types import ModuleType

import torch
from torch import Tensor

from wellposed.lowrank.eager import rank_product

HALVES = (torch.bfloat16, torch.float16)
_KNOWN = (*HALVES, torch.float32)
"""The types that the kernels know."""
_ROWS_OF = 2**22
"""Entries that torch's operations work on at a time: 16 MiB of float32."""
_WORTH = 2**18
"""Entries of a weight from which on a kernel's launch is worth it."""
_LARGEST_RANK = 256

_allowed = True


@contextmanager
def kernels_allowed(allowed: bool) -> Iterator[None]:
    """Whether the kernels may be used, in all threads."""
    global _allowed  # noqa: PLW0603  the backward pass runs in another thread, where a context variable is not set
    before, _allowed = _allowed, allowed
    try:
        yield
    finally:
        _allowed = before


def sine_weights(
    weight0: Tensor | None, a: Tensor, b: Tensor, omega: float, scale: float, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """One or two matrices (out, in) of `dtype` that add up to W0 + scale sin(omega B A).

    In bfloat16 and float16 the sum would lose every update below the last bit of W0. torch's operations therefore keep
    the update and W0 apart, at the price of a product more each way. The update comes first: its product is rounded by
    itself, and W0's added to it in float32. The kernel adds the two matrices in float32 and rounds up or down, where
    the update is small, with the probability that makes the rounding right on average: `wellposed.lowrank.kernels`.
    """
    kernels = kernels_for(a, b, dtype)
    if kernels is not None:
        return (kernels.sine_weight(weight0, a, b, omega, scale, dtype),)
    apart = weight0 is not None and dtype in HALVES
    weight_OI = torch.empty(b.shape[0], a.shape[1], dtype=dtype, device=a.device)
    for rows in _rows(weight_OI):
        delta = rank_product(a, b[rows]).mul_(omega).sin_().mul_(scale)
        weight_OI[rows] = delta if weight0 is None or apart else delta.add_(weight0[rows])
    return (weight_OI, weight0.to(dtype)) if weight0 is not None and apart else (weight_OI,)


def factor_gradients(
    dy_TO: Tensor, x_TI: Tensor, a: Tensor, b: Tensor, omega: float, scale: float
) -> tuple[Tensor, Tensor]:
    """The gradients dA = B^T G, (r, in), and dB = G A^T, (out, r), with G = (dy^T x) * cos(omega B A) * omega scale."""
    kernels = kernels_for(a, b, x_TI.dtype)
    if kernels is not None:
        whole = torch.float32 if x_TI.dtype == torch.float16 else x_TI.dtype
        return kernels.factor_gradients(_outer(dy_TO, x_TI, whole), a, b, omega, scale)
    precise = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a_rI, b_Or = a.to(precise), b.to(precise)
    da_rI, db_Or = a_rI.new_zeros(a_rI.shape), b_Or.new_empty(b_Or.shape)
    for rows in _rows(torch.empty(b.shape[0], a.shape[1], device="meta")):
        g = rank_product(a, b[rows]).mul_(omega).cos_().mul_(omega * scale)
        g *= _outer(dy_TO[:, rows], x_TI, torch.promote_types(x_TI.dtype, torch.float32))
        db_Or[rows] = g @ a_rI.T
        da_rI += b_Or[rows].T @ g
    return da_rI.to(a.dtype), db_Or.to(b.dtype)


def _outer(dy_TO: Tensor, x_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """dy^T x, (out, in), not rounded to less than `dtype`."""
    if dtype == x_TI.dtype:
        return dy_TO.T @ x_TI
    if x_TI.device.type == "cuda":
        return torch.mm(dy_TO.T, x_TI, out_dtype=dtype)
    return dy_TO.T.to(dtype) @ x_TI.to(dtype)


def _rows(like_OI: Tensor) -> Iterator[slice]:
    """Slices of rows that together are all of them, each of as many as may be worked on at a time."""
    count = max(1, _ROWS_OF // max(1, like_OI.shape[1]))
    return (slice(start, start + count) for start in range(0, len(like_OI), count))


def kernels_for(a: Tensor, b: Tensor, dtype: torch.dtype) -> ModuleType | None:
    """`wellposed.lowrank.kernels` where it wins: on a GPU, for a large enough weight of `dtype`."""
    device = a.device
    if not _allowed or device.type != "cuda" or b.shape[0] * a.shape[1] < _WORTH:
        return None
    known = dtype in _KNOWN and a.dtype in _KNOWN and b.dtype in _KNOWN
    return _working_kernels(device) if known and 1 <= a.shape[0] <= _LARGEST_RANK else None


@cache
def _working_kernels(device: torch.device) -> ModuleType | None:
    """The kernels, if they run on `device` at all; if not, one line in the log says why."""
    try:
        from wellposed.lowrank import kernels

        kernels.try_on(device)
    except Exception as error:
        getLogger(__name__).warning("sine layers on %s go without their Triton kernels: %s", device, error)
        return None
    return kernels
