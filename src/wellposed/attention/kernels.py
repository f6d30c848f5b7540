# mypy: disable-error-code="import-untyped"
"""Element-wise attention by Triton kernels: what they are given, and how they are launched.

Memory is read through tensor descriptors, TMA on a GPU that has it, which fill with zeros past the end: any number of
queries, keys and columns will do. Everything constant in a row is folded into a factor outside the loops.

Shapes: B inputs, H heads of queries, K of keys and values, N queries, M keys, heads d wide.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from wellposed.attention.kernels_backward import keys_kernel, queries_kernel
from wellposed.attention.kernels_forward import forward_kernel
from wellposed.attention.kernels_settings import Problem, Setting, setting_of
from wellposed.attention.kernels_tiles import INTERPRETED, Kernel, Tiles, candidates, span_of
from wellposed.spectrum.launch import Launch, on

_KERNELS: dict[Kernel, Any] = {"forward": forward_kernel, "queries": queries_kernel, "keys": keys_kernel}
_described: dict[tuple[Any, ...], TensorDescriptor] = {}
"""Descriptors without a tensor, by the layout of those they describe."""
_fitting: dict[tuple[Any, ...], Tiles] = {}
"""The tiles in use, by what they depend on."""
_chosen: dict[Kernel, Tiles] = {}
"""Tiles to be used whatever the device has room for, by `with_tiles`."""


def forward(o_BHNd: Tensor, q_BHNd: Tensor, k_BKMd: Tensor, v_BKMd: Tensor, problem: Problem) -> None:
    """Write the attention of q, k and v into `o_BHNd`. All tensors here and below are `aligned`."""
    setting = setting_of(q_BHNd, k_BKMd, problem)
    factors = (setting.factor, setting.pre, setting.slope, setting.bias)
    _run("forward", setting, (q_BHNd, k_BKMd, v_BKMd), (o_BHNd,), _read_by_row(problem, q_BHNd), factors)


def backward_queries(
    dq_BHNd: Tensor, do_BHNd: Tensor, q_BHNd: Tensor, k_BKMd: Tensor, v_BKMd: Tensor, problem: Problem
) -> Tensor:
    """Write the gradient of q into `dq_BHNd`, and return that of `head_scale`, (H,), float32, where there is one."""
    setting = setting_of(q_BHNd, k_BKMd, problem)
    counts, head_scale = _read_by_row(problem, q_BHNd)
    by_factor_BHN = head_scale
    if problem.head_scale is not None:
        by_factor_BHN = torch.empty(q_BHNd.shape[:3], dtype=torch.float32, device=q_BHNd.device)
    factors = (setting.factor_by_head, setting.factor_slope, setting.pre, setting.slope, setting.bias)
    of_rows = (by_factor_BHN, counts, head_scale)
    _run("queries", setting, (q_BHNd, k_BKMd, v_BKMd), (do_BHNd, dq_BHNd), of_rows, factors)
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
    setting = setting_of(q_BHNd, k_BKMd, problem)
    factors = (setting.factor, setting.factor_slope, setting.pre, setting.slope, setting.bias)
    of_rows = _read_by_row(problem, q_BHNd)
    _run("keys", setting, (q_BHNd, k_BKMd, v_BKMd), (do_BHNd,), of_rows, factors, (dk_BKMd, dv_BKMd))


def _read_by_row(problem: Problem, instead: Tensor) -> tuple[Tensor, Tensor]:
    """The counts and scales that the kernels read, and something to point at `instead` where they read none."""
    counts, head_scale = problem.counts, problem.head_scale
    return (
        instead if counts is None else counts.contiguous(),
        instead if head_scale is None else head_scale.float().contiguous(),
    )


def _descriptor(x: Tensor, *, width: int, rows: int) -> TensorDescriptor:
    """Blocks of so many rows of one head of `x`, (B, H or K, N or M, d)."""
    layout = (x.shape, x.stride(), x.dtype, width, rows)
    known = _described.get(layout)
    if known is None:
        if len(_described) >= 4096:
            _described.clear()
        sizes = list(x.shape)
        # A dimension of size 1 is never stepped along, and its stride may be anything.
        strides = [stride if size > 1 else sizes[-1] for size, stride in zip(sizes, x.stride(), strict=True)]
        known = TensorDescriptor(x, sizes, [*strides[:-1], 1], [1, 1, rows, width])
        known.base = None
        _described[layout] = known
    # Triton checks the layout of each new one, which takes the host longer than to fill in another.
    described = TensorDescriptor.__new__(TensorDescriptor)
    described.__dict__.update(known.__dict__, base=x)
    return described


def _run(
    kernel: Kernel,
    setting: Setting,
    qkv: tuple[Tensor, Tensor, Tensor],
    like_q: tuple[Tensor, ...],
    read_by_row: tuple[Tensor, ...],
    factors: tuple[float, ...],
    like_k: tuple[Tensor, ...] = (),
) -> None:
    """Launch with the first tiles that the device has room for."""
    q, k, v = qkv
    (b, h, n, _), (kv_heads, m), device, dtype = q.shape, k.shape[1:3], q.device, q.dtype

    def launch(tiles: Tiles) -> None:
        heads, blocks = (kv_heads, -(-m // tiles.bn)) if kernel == "keys" else (h, -(-n // tiles.bm))
        of_queries, of_keys = (partial(_descriptor, width=setting.width, rows=rows) for rows in (tiles.bm, tiles.bn))
        described = (of_queries(q), of_keys(k), of_keys(v), *map(of_queries, like_q), *map(of_keys, like_k))
        kept = _kept(kernel, tiles, setting.constants, b * heads * blocks, (heads, n, m), dtype, device)
        kept(read_by_row, *factors, described=described)

    if triton.knobs.runtime.interpret:
        launch(_chosen.get(kernel, INTERPRETED))
        return
    with on(device):
        if kernel in _chosen:
            launch(_chosen[kernel])
            return
        single, span = dtype == torch.float32, span_of(max(n, m))
        key = (kernel, single, span, device, setting.constants)
        if key in _fitting:
            launch(_fitting[key])
            return
        for tiles in candidates(kernel, setting.width, single=single, causal=setting.causal, span=span):
            try:
                launch(tiles)
            except OutOfResources:
                continue
            _fitting[key] = tiles
            return
    raise RuntimeError(f"{device} has no room for the smallest tiles of the {kernel} kernel")


@lru_cache(maxsize=4096)
def _kept(
    kernel: Kernel,
    tiles: Tiles,
    constants: tuple[tuple[str, Any], ...],
    programs: int,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Launch:
    capped = {} if tiles.registers is None else {"maxnreg": tiles.registers}
    of_tiles: dict[str, Any] = {"BM": tiles.bm, "BN": tiles.bn}
    if kernel != "keys":
        of_tiles["ONE_LOOP"] = tiles.one_loop and dict(constants)["CAUSAL"]
        of_tiles["IN_REGISTERS"] = tiles.in_registers
    return Launch(
        _KERNELS[kernel],
        (programs, 1, 1),
        sizes,
        {**dict(constants), **of_tiles},
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        enable_fp_fusion=True,
        **capped,
    )


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
    for _ in range(2):  # as Triton launches it, then as `Launch` has kept it
        o = torch.empty_like(x)
        forward(o, x, x, x, Problem("power2", 1 / 32, 1.0, None, False, None))
        if not torch.allclose(o, 16 * x):
            raise RuntimeError("they compute something else here")


def aligned(x: Tensor) -> Tensor:
    """`x`, or a copy of it, that a descriptor can read: columns one after the other, rows on borders of 16 bytes."""
    good = _steps_fit(x.shape, x.stride(), 16 // x.element_size()) and x.data_ptr() % 16 == 0
    return x if good else x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=4096)
def _steps_fit(sizes: tuple[int, ...], strides: tuple[int, ...], step: int) -> bool:
    outer = [stride for size, stride in zip(sizes[:-1], strides[:-1], strict=True) if size > 1]
    return strides[-1] == 1 and all(stride > 0 and stride % step == 0 for stride in outer)
