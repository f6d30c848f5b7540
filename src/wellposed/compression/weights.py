"""The weight of a layer from W0 and packed factors, as torch's operations and on a GPU in one pass."""

from functools import cache
from logging import getLogger
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from wellposed.compression.packed import PackedTensor
from wellposed.compression.updates import as_matrix
from wellposed.errors import InvalidArgumentError
from wellposed.lowrank import sine_delta
from wellposed.lowrank.eager import rank_product
from wellposed.lowrank.passes import kernels_for

_MOST_CODES = 2**27
"""Of a factor: with 8 bits each, their bits can still be counted in 32."""


@torch.no_grad()
def packed_weight(
    weight0: Tensor | None,
    a: PackedTensor,
    b: PackedTensor,
    omega: float | None,
    scale: float,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """W0 + scale sin(omega Q(B) Q(A)), (out, in), from packed factors (r, in) and (out, r) on the device of W0.

    The sum is formed in float32 at least. On a GPU codes are looked up while the weight is written, so that an adapter
    takes no more memory than its bits; an update below the last bit of a 16-bit W0 is then right on average
    (`wellposed.lowrank.kernels`), where torch's operations round to the nearest.

    Args:
        weight0: W0; no such term if None.
        a: packed A.
        b: packed B.
        omega: the frequency; None for LoRA, W0 + scale Q(B) Q(A).
        scale: s.
        dtype: of the result; if None, and with no `out`, that of W0, or of A.
        out: where the result goes, such as the weight that a layer has now; a new tensor if None.

    Raises:
        InvalidArgumentError: shapes or types that do not belong together.
    """
    dtype = out.dtype if out is not None else dtype or (a if weight0 is None else weight0).dtype
    rows, cols = b.shape[0], prod(a.shape[1:])
    for name, given in (("weight0", weight0), ("out", out)):
        if given is not None and given.shape != (rows, cols):
            raise InvalidArgumentError(f"{name} {tuple(given.shape)}: expected (out, in) = ({rows}, {cols})")
    if a.shape[0] != prod(b.shape[1:]):
        raise InvalidArgumentError(f"a {a.shape}, b {b.shape}: expected (r, in) and (out, r)")
    if out is not None and not out.is_contiguous():
        raise InvalidArgumentError("out is not contiguous: expected a whole tensor of its own")
    kernels = _kernels_for(a, b, dtype)
    if kernels is not None:
        whole = torch.empty(rows, cols, dtype=dtype, device=a.device) if out is None else out
        return kernels.packed_weight(weight0, a, b, omega, scale, whole)
    q_a, q_b = as_matrix(a.values()), as_matrix(b.values())
    update = rank_product(q_a, q_b).mul_(scale) if omega is None else sine_delta(q_a, q_b, omega, scale)
    weight = update if weight0 is None else update + weight0.to(dtype)
    return weight.to(dtype) if out is None else out.copy_(weight)


@cache
def working_kernels(device: torch.device) -> ModuleType | None:
    """`wellposed.compression.kernels`, if they run on `device` at all; if not, one line in the log says why."""
    if device.type != "cuda":
        return None
    try:
        from wellposed.compression import kernels

        kernels.try_on(device)
    except Exception as error:
        getLogger(__name__).warning("packed adapters on %s go without their Triton kernels: %s", device, error)
        return None
    return kernels


def _kernels_for(a: PackedTensor, b: PackedTensor, dtype: torch.dtype) -> ModuleType | None:
    """The kernels where those for plain factors of this size and type would be used as well."""
    like_a: Any = a  # of which no more is asked than of a tensor: its shape, type and device
    like_b: Any = b
    if kernels_for(like_a, like_b, dtype) is None or max(prod(a.shape), prod(b.shape)) > _MOST_CODES:
        return None
    return working_kernels(a.device)
