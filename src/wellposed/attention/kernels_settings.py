# mypy: disable-error-code="import-untyped"
"""Which attention the kernels compute, and the numbers and constants that follow from it.

Working them out takes the host a while, and a model asks for the same ones again and again: they are kept.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import e, log2, sqrt
from typing import Any

import torch
import triton
from torch import Tensor

from wellposed.attention.kernels_tiles import WIDTHS


@dataclass(frozen=True)
class Problem:
    """Which attention: everything but the tensors q, k and v."""

    phi: str
    """One of "power2", "power3", "relu" and "sigmoid"."""
    logit_scale: float
    """The factor of q k^T, above 0."""
    scale: float | None
    """The factor of all weights; by the rule, or by `head_scale`, if None."""
    head_scale: Tensor | None
    """A factor of the weights for each head, (H,)."""
    causal: bool
    counts: Tensor | None
    """How many keys each row sees, (B, N), float32, where the causal mask does not say it."""


@dataclass(frozen=True)
class Setting:
    """What the three kernels are given besides the tensors."""

    factor: float
    factor_slope: float
    factor_by_head: float
    pre: float
    slope: float
    bias: float
    width: int
    """Of a head, rounded up."""
    causal: bool
    constants: tuple[tuple[str, Any], ...]
    """Those a kernel is compiled for, by name, in the order of its arguments."""


def setting_of(q_BHNd: Tensor, k_BKMd: Tensor, problem: Problem) -> Setting:
    """That of a problem with these queries and keys."""
    _, heads, _, d = q_BHNd.shape
    _, kv_heads, keys, _ = k_BKMd.shape
    of_rows = (problem.head_scale is not None, problem.causal, problem.counts is not None)
    sizes = (heads // kv_heads, keys, d)
    return _setting(problem.phi, problem.logit_scale, problem.scale, *of_rows, *sizes, q_BHNd.dtype, _precision())


@lru_cache(maxsize=1024)
def _setting(
    phi: str,
    logit_scale: float,
    scale: float | None,
    per_head: bool,
    causal: bool,
    counted: bool,
    group: int,
    keys: int,
    d: int,
    dtype: torch.dtype,
    precision: str,
) -> Setting:
    ruled = scale is None and not per_head
    varies = (causal or counted) and (ruled or phi == "sigmoid")
    constant = (1.0 if scale is None else scale) * (_by_rule(phi, keys) if ruled and not varies else 1)
    pre = _in_reach(phi, logit_scale, keys) if dtype == torch.float16 else 1.0
    p = {"power2": 2, "power3": 3}.get(phi, 1)
    by_head = 1.0 if phi == "sigmoid" else logit_scale**p / pre ** (p - 1)
    width = next(width for width in WIDTHS if width >= d)
    return Setting(
        factor=constant if phi == "sigmoid" else constant * by_head / pre,
        factor_slope=constant * (logit_scale if phi == "sigmoid" else by_head * p),
        factor_by_head=by_head,
        pre=pre,
        slope=logit_scale * log2(e),
        bias=log2(keys),
        width=width,
        causal=causal,
        constants=(
            ("PHI", phi),
            ("CAUSAL", causal),
            ("COUNTED", counted),
            ("PER_ROW", varies),
            ("PER_HEAD", per_head),
            ("GROUP", group),
            ("PRESCALED", pre != 1.0),
            ("PRECISION", precision),
            ("D", width),
        ),
    )


def _by_rule(phi: str, keys: int) -> float:
    return {"relu": 1 / keys, "sigmoid": 1.0}.get(phi, 1 / sqrt(keys))


def _in_reach(phi: str, logit_scale: float, keys: int) -> float:
    """A factor of q k^T that brings the weights near the size they end with: float16 can hold them."""
    if phi == "sigmoid":
        return 1.0
    return logit_scale * keys ** {"power2": -1 / 4, "power3": -1 / 6}.get(phi, 0.0)


def _precision() -> str:
    """How float32 is multiplied: in one pass of TF32 where torch's matrix products are, otherwise in three."""
    if triton.knobs.runtime.interpret:
        return "interpreted"
    # Not torch.get_float32_matmul_precision, which raises once this has been set.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
