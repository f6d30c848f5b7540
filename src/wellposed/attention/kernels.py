# mypy: disable-error-code="import-untyped"
"""Element-wise attention by Triton kernels: what they are given, and how they are launched.

Memory is read through tensor descriptors, TMA on a GPU that has it, which fill with zeros past the end: any number of
queries, keys and columns will do. Everything constant in a row is folded into a factor outside the loops.

Shapes: B inputs, H heads of queries, K of keys and values, N queries, M keys, heads d wide.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import e, log2, sqrt
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from wellposed.attention.kernels_backward import keys_kernel, queries_kernel
from wellposed.attention.kernels_forward import forward_kernel
from wellposed.attention.kernels_tiles import INTERPRETED, WIDTHS, Kernel, Tiles, candidates

_fitting: dict[tuple[Any, ...], Tiles] = {}
"""The tiles in use, by what they depend on."""
_chosen: dict[Kernel, Tiles] = {}
"""Tiles to be used whatever the device has room for, by `with_tiles`."""


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


def forward(o_BHNd: Tensor, q_BHNd: Tensor, k_BKMd: Tensor, v_BKMd: Tensor, problem: Problem) -> None:
    """Write the attention of q, k and v into `o_BHNd`. All tensors here and below are `aligned`."""
    b, h, n, _ = q_BHNd.shape
    setting = _Setting(q_BHNd, k_BKMd, problem)

    def launch(tiles: Tiles) -> None:
        rows, keys = partial(setting.descriptor, rows=tiles.bm), partial(setting.descriptor, rows=tiles.bn)
        forward_kernel[(b * h * -(-n // tiles.bm),)](
            *(rows(q_BHNd), keys(k_BKMd), keys(v_BKMd), rows(o_BHNd), setting.counts, setting.head_scale),
            *(h, n, k_BKMd.shape[2], setting.factor, setting.pre, setting.slope, setting.bias),
            **setting.constants,
            **_sizes(tiles),
        )

    setting.run("forward", launch)


def backward_queries(
    dq_BHNd: Tensor, do_BHNd: Tensor, q_BHNd: Tensor, k_BKMd: Tensor, v_BKMd: Tensor, problem: Problem
) -> Tensor:
    """Write the gradient of q into `dq_BHNd`, and return that of `head_scale`, (H,), float32, where there is one."""
    b, h, n, _ = q_BHNd.shape
    setting = _Setting(q_BHNd, k_BKMd, problem)
    by_factor_BHN = setting.head_scale
    if problem.head_scale is not None:
        by_factor_BHN = torch.empty(b, h, n, dtype=torch.float32, device=q_BHNd.device)

    def launch(tiles: Tiles) -> None:
        rows, keys = partial(setting.descriptor, rows=tiles.bm), partial(setting.descriptor, rows=tiles.bn)
        queries_kernel[(b * h * -(-n // tiles.bm),)](
            *(rows(q_BHNd), keys(k_BKMd), keys(v_BKMd), rows(do_BHNd), rows(dq_BHNd), by_factor_BHN, setting.counts),
            *(setting.head_scale, h, n, k_BKMd.shape[2], setting.factor_by_head, setting.factor_slope),
            *(setting.pre, setting.slope, setting.bias),
            **setting.constants,
            **_sizes(tiles),
        )

    setting.run("queries", launch)
    return by_factor_BHN if problem.head_scale is None else by_factor_BHN.sum((0, 2))


def backward_keys(
    dk_BKMd: Tensor,
    dv_BKMd: Tensor,
    do_BHNd: Tensor,
    q_BHNd: Tensor,
    k_BKMd: Tensor,
    v_BKMd: Tensor,
    problem: Problem,
) -> None:
    """Write the gradients of k and v into `dk_BKMd` and `dv_BKMd`."""
    b, kv_heads, m, _ = k_BKMd.shape
    setting = _Setting(q_BHNd, k_BKMd, problem)

    def launch(tiles: Tiles) -> None:
        rows, keys = partial(setting.descriptor, rows=tiles.bm), partial(setting.descriptor, rows=tiles.bn)
        keys_kernel[(b * kv_heads * -(-m // tiles.bn),)](
            *(rows(q_BHNd), keys(k_BKMd), keys(v_BKMd), rows(do_BHNd), keys(dk_BKMd), keys(dv_BKMd), setting.counts),
            *(setting.head_scale, kv_heads, q_BHNd.shape[2], m, setting.factor, setting.factor_slope),
            *(setting.pre, setting.slope, setting.bias),
            **setting.constants,
            **_sizes(tiles),
        )

    setting.run("keys", launch)


class _Setting:
    """What the three kernels are given besides the tensors, worked out from the problem."""

    def __init__(self, q_BHNd: Tensor, k_BKMd: Tensor, problem: Problem) -> None:
        self.device, self.dtype = q_BHNd.device, q_BHNd.dtype
        heads, _, d = q_BHNd.shape[1:]
        keys = k_BKMd.shape[2]
        counts, phi, logit_scale = problem.counts, problem.phi, problem.logit_scale
        nothing = q_BHNd.new_empty(1, dtype=torch.float32)
        ruled = problem.scale is None and problem.head_scale is None
        varies = (problem.causal or counts is not None) and (ruled or phi == "sigmoid")
        constant = (1.0 if problem.scale is None else problem.scale) * (
            _by_rule(phi, keys) if ruled and not varies else 1
        )
        self.counts = nothing if counts is None else counts.contiguous()
        self.head_scale = nothing if problem.head_scale is None else problem.head_scale.float().contiguous()
        self.slope, self.bias = logit_scale * log2(e), log2(keys)
        self.pre = _in_reach(phi, logit_scale, keys) if self.dtype == torch.float16 else 1.0
        p = {"power2": 2, "power3": 3}.get(phi, 1)
        if phi == "sigmoid":
            self.factor, self.factor_slope, self.factor_by_head = constant, constant * logit_scale, 1.0
        else:
            self.factor_by_head = logit_scale**p / self.pre ** (p - 1)
            self.factor = constant * self.factor_by_head / self.pre
            self.factor_slope = constant * self.factor_by_head * p
        self.width = next(width for width in WIDTHS if width >= d)
        self.constants = {
            "PHI": phi,
            "CAUSAL": problem.causal,
            "COUNTED": counts is not None,
            "PER_ROW": varies,
            "PER_HEAD": problem.head_scale is not None,
            "GROUP": heads // k_BKMd.shape[1],
            "PRESCALED": self.pre != 1.0,
            "PRECISION": _precision(),
            "D": self.width,
        }

    def descriptor(self, x: Tensor, *, rows: int) -> TensorDescriptor:
        """Blocks of so many rows of one head of `x`, (B, H or K, N or M, d)."""
        sizes = list(x.shape)
        # A dimension of size 1 is never stepped along, and its stride may be anything.
        strides = [stride if size > 1 else sizes[-1] for size, stride in zip(sizes, x.stride(), strict=True)]
        return TensorDescriptor(x, sizes, [*strides[:-1], 1], [1, 1, rows, self.width])

    def run(self, kernel: Kernel, launch: Any) -> None:
        """Launch with the first tiles that the device has room for."""
        if triton.knobs.runtime.interpret:
            launch(INTERPRETED)
            return
        if kernel in _chosen:
            with _on(self.device):
                launch(_chosen[kernel])
            return
        single = self.dtype == torch.float32
        key = (kernel, self.width, single, self.device, *self.constants.values())
        with _on(self.device):
            if key in _fitting:
                launch(_fitting[key])
                return
            for tiles in candidates(kernel, self.width, single=single, causal=bool(self.constants["CAUSAL"])):
                try:
                    launch(tiles)
                except OutOfResources:
                    continue
                _fitting[key] = tiles
                return
        raise RuntimeError(f"{self.device} has no room for the smallest tiles of the {kernel} kernel")


@contextmanager
def with_tiles(kernel: Kernel, tiles: Tiles) -> Iterator[None]:
    """Launch one of the kernels with these tiles, to find out how fast they are."""
    _chosen[kernel] = tiles
    try:
        yield
    finally:
        del _chosen[kernel]


def try_on(device: torch.device) -> None:
    """Raise what stands in the way of the kernels on `device`, if anything does."""
    if triton.knobs.runtime.interpret:
        return
    x = torch.ones(1, 1, 16, 32, dtype=torch.float16, device=device)
    o = torch.empty_like(x)
    forward(o, x, x, x, Problem("power2", 1 / 32, 1.0, None, False, None))
    if not torch.allclose(o, 16 * x):
        raise RuntimeError("they compute something else here")


def aligned(x: Tensor) -> Tensor:
    """`x`, or a copy of it, that a descriptor can read: columns one after the other, rows on borders of 16 bytes."""
    step = 16 // x.element_size()
    outer = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    good = x.stride(-1) == 1 and all(stride > 0 and stride % step == 0 for stride in outer) and x.data_ptr() % 16 == 0
    return x if good else x.clone(memory_format=torch.contiguous_format)


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


def _sizes(tiles: Tiles) -> dict[str, int]:
    sizes = {"BM": tiles.bm, "BN": tiles.bn, "num_warps": tiles.warps, "num_stages": tiles.stages}
    capped = {} if tiles.registers is None else {"maxnreg": tiles.registers}
    return {**sizes, **capped, "enable_fp_fusion": True}


def _on(device: torch.device) -> AbstractContextManager[Any]:
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(device)
