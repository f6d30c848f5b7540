"""The passes over an out x in matrix as Triton kernels, of which `wellposed.lowrank.passes` is the meaning.

`sine_weight` reads W0 once and writes W0 + s sin(omega B A) once; `factor_gradients` reads dy^T x once, or twice for
ranks above 32, and writes nothing of that size. Rank product, sine and cosine stay in registers.

An argument z is turned into half turns, z = pi (n + f) with |f| <= 1/2, and sin(pi f) or cos(pi f) taken from a
polynomial: off by 2e-7, and by the 3e-7 |z| that float32 leaves unknown of z. From |z| = 1.3e7 on, where that is all
of it, the sine is 0.

In bfloat16 and float16 an update of less than 16 of the sum's last bits is rounded up or down by a hash of the entry's
place, up with a probability that is the part of a step that rounding would cut off. So an update of a hundredth of the
last bit moves one entry in a hundred by one bit: the product with any x is right on average, its error 1.4 times that
of rounding y itself, and none where the update is 0. Larger updates are rounded to the nearest, which errs as much as
rounding y does. The hash depends on nothing else: forward and backward pass see the same matrix, as does any other run.

Shapes: O out, I in, r rank.
"""

# A kernel's arguments have no Python types.
# mypy: disable-error-code="import-untyped, no-untyped-def"

from functools import lru_cache
from math import pi

import torch
import triton
import triton.language as tl
from torch import Tensor

from wellposed.spectrum.launch import Launch, on

_CUT_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""The bits that float32 has more in its fraction."""
_ONE_READ = 32
"""The largest rank for which the partial sums of a second gradient are less to write than dy^T x is to read again."""
_HIGH, _WIDE, _NARROW = 128, 64, 32
"""Rows of a block, columns of a block of the weight, and of one of dy^T x, of which more has to fit into registers."""
_AT_A_TIME = 264
"""Programs that run side by side on a large GPU: two on each of 132 multiprocessors."""


def sine_weight(weight0: Tensor | None, a: Tensor, b: Tensor, omega: float, scale: float, dtype: torch.dtype) -> Tensor:
    """W0 + scale sin(omega B A), (out, in), of `dtype`: bfloat16, float16 or float32; without W0 if that is None.

    W0, (out, in), is rounded to `dtype` before; of A, (r, in), and B, (out, r), nothing is.
    """
    (r, cols), rows = a.shape, b.shape[0]
    weight_OI = torch.empty((rows, cols), dtype=dtype, device=a.device)
    if weight_OI.numel() == 0:
        return weight_OI
    base = weight_OI if weight0 is None else weight0
    launch = _weight_launch(
        a.device, weight0 is not None, base.dtype, a.dtype, b.dtype, dtype,
        rows, cols, r, *base.stride(), *a.stride(), *b.stride(),
    )  # fmt: skip
    with on(a.device):
        launch((base, a, b, weight_OI), omega / pi, float(scale))
    return weight_OI


def factor_gradients(p_OI: Tensor, a: Tensor, b: Tensor, omega: float, scale: float) -> tuple[Tensor, Tensor]:
    """The gradients dA = B^T G, (r, in), and dB = G A^T, (out, r), with G = P * cos(omega B A) * omega scale.

    P is dy^T x, (out, in). The same bits every time: sums over programs are formed afterwards, in one order.
    """
    if p_OI.numel() == 0:
        return a.new_zeros(a.shape), b.new_zeros(b.shape)
    if a.shape[0] <= _ONE_READ:
        db_Or, da_rI = _gradients(p_OI, b, a, omega, scale, both=True)
    else:
        db_Or, _ = _gradients(p_OI, b, a, omega, scale)
        da_rI, _ = _gradients(p_OI.T, a.T, b.T, omega, scale, turned=True)
    return da_rI.to(a.dtype), db_Or.to(b.dtype)


def try_on(device: torch.device) -> None:
    """Run every kernel on very little, so that what does not work here shows, then the same as `Launch` has kept it."""
    a, b = torch.zeros(1, 16, device=device), torch.zeros(16, 1, device=device)
    for _ in range(2):
        sine_weight(torch.zeros(16, 16, dtype=torch.bfloat16, device=device), a, b, 1.0, 1.0, torch.bfloat16)
        factor_gradients(torch.zeros(16, 16, device=device), a, b, 1.0, 1.0)


def _gradients(
    p: Tensor, left: Tensor, right: Tensor, omega: float, scale: float, both: bool = False, turned: bool = False
) -> tuple[Tensor, Tensor]:
    """G `right`^T, (rows, r) or if `turned` (r, rows), and if `both` `left`^T G, (r, columns), in float32.

    G is as above, (rows, columns), `left` (rows, r) and `right` (r, columns). Each program adds up over some of the
    columns of its rows; for the second it writes the sum over its rows.
    """
    (rows, cols), r, device = p.shape, left.shape[1], p.device
    launch = _gradient_launch(
        device, both, turned, p.dtype, left.dtype, right.dtype,
        rows, cols, r, *p.stride(), *left.stride(), *right.stride(),
    )  # fmt: skip
    blocks, splits, _ = launch.grid
    lefts = torch.empty((splits, r, rows) if turned else (splits, rows, r), dtype=torch.float32, device=device)
    rights = torch.empty((blocks, r, cols), dtype=torch.float32, device=device) if both else lefts
    with on(device):
        launch((p, left, right, lefts, rights), omega / pi, float(omega * scale))
    return lefts.sum(0), rights.sum(0) if both else rights


@lru_cache(maxsize=1024)
def _weight_launch(
    device: torch.device, add: bool, of_base: torch.dtype, of_a: torch.dtype, of_b: torch.dtype, dtype: torch.dtype,
    rows: int, cols: int, r: int, *strides: int,
) -> Launch:  # fmt: skip
    """The launch of `_weight_kernel` for tensors of these types and sizes."""
    chunk = _chunk(r)
    return Launch(
        _weight_kernel, (_cdiv(rows, _HIGH), _cdiv(cols, _WIDE), 1), (rows, cols, r, *strides),
        {
            "ADD": add, "CUT_BITS": _CUT_BITS.get(dtype, 0) if add else 0, "R": chunk, "CHUNKS": _cdiv(r, chunk),
            "HIGH": _HIGH, "WIDE": _WIDE, "PRECISION": _precision(of_a, of_b),
        },
        num_warps=8, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _gradient_launch(
    device: torch.device, both: bool, turned: bool, of_p: torch.dtype, of_left: torch.dtype, of_right: torch.dtype,
    rows: int, cols: int, r: int, *strides: int,
) -> Launch:  # fmt: skip
    """The launch of `_gradient_kernel` for tensors of these types and sizes."""
    chunk, light = _chunk(r), r <= _ONE_READ and of_p != torch.float32
    blocks, tiles = _cdiv(rows, _HIGH), _cdiv(cols, _NARROW)
    each = _tiles_each(blocks, tiles)
    return Launch(
        _gradient_kernel, (blocks, _cdiv(tiles, each), _cdiv(r, chunk)), (rows, cols, r, *strides, each),
        {
            "BOTH": both, "TURNED": turned, "R": chunk, "CHUNKS": _cdiv(r, chunk), "HIGH": _HIGH, "WIDE": _NARROW,
            "PRECISION": _precision(of_left, of_right), "SUMS": "tf32x3" if of_p == torch.float32 else "tf32",
        },
        num_warps=8, num_stages=2 if light else 1, maxnreg=128 if light else None, enable_fp_fusion=True,
    )  # fmt: skip


def _tiles_each(blocks: int, tiles: int) -> int:
    """Tiles of columns for a program, with `tiles` of them in each block of rows: such that all programs end at about
    the same time, and of those the most, which leaves the fewest partial sums.
    """
    most = min(tiles, max(1, 4 * _AT_A_TIME // blocks))
    choices = {_cdiv(tiles, splits) for splits in range(1, most + 1)}
    return min(choices, key=lambda each: (_cdiv(blocks * _cdiv(tiles, each), _AT_A_TIME) * each, -each))


def _chunk(r: int) -> int:
    """How many of the rank's components are worked on at a time: a power of 2 from 16, below which tensor cores do
    not go, to 64, above which registers run out.
    """
    return min(64, max(16, 1 << (r - 1).bit_length()))


def _precision(*factors: torch.dtype) -> str:
    """The cheapest product of such factors that is exact to float32: 16-bit numbers are TF32 numbers already."""
    return "tf32x3" if torch.float32 in factors else "tf32"


def _cdiv(a: int, b: int) -> int:
    """The quotient a / b, rounded up; Triton's own is made for kernels and slow on the host."""
    return -(-a // b)


@triton.jit
def _weight_kernel(
    base, a, b, out, half_turns, scale,
    rows, cols, r, base_row, base_col, a_rank, a_col, b_row, b_rank,
    ADD: tl.constexpr, CUT_BITS: tl.constexpr, R: tl.constexpr, CHUNKS: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of W0 + scale sin(omega B A); `half_turns` is omega / pi."""
    o = tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    i = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    z = tl.zeros((HIGH, WIDE), tl.float32)
    for part in range(CHUNKS):
        k = part * R + tl.arange(0, R)
        b_part = _tile(b, o, k, b_row, b_rank, rows, r)
        z = tl.dot(b_part, _tile(a, k, i, a_rank, a_col, r, cols), z, input_precision=PRECISION)
    update = scale * _wave(z * half_turns, False)
    _put(out, base, update, o, i, rows, cols, base_row, base_col, ADD, CUT_BITS)


@triton.jit
def _gradient_kernel(
    p, left, right, lefts, rights, half_turns, gain,
    rows, cols, r, p_row, p_col, left_row, left_rank, right_rank, right_col, each,
    BOTH: tl.constexpr, TURNED: tl.constexpr, R: tl.constexpr, CHUNKS: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """For a block of rows the sum over `each` tiles of columns of G right^T, and if BOTH a tile's left^T G at a time.

    `gain` is omega scale. The third axis of the grid is the chunk of the rank whose gradients are formed. The first sum
    is written as (rows, r), if TURNED as (r, rows), the second as (r, columns).
    """
    block, split = tl.program_id(0), tl.program_id(1)
    row = block * HIGH + tl.arange(0, HIGH)
    own = tl.program_id(2) * R + tl.arange(0, R)
    own_left = _tile(left, row, own, left_row, left_rank, rows, r)
    total = tl.zeros((HIGH, R), tl.float32)
    for tile in range(split * each, min((split + 1) * each, tl.cdiv(cols, WIDE))):
        col = tile * WIDE + tl.arange(0, WIDE)
        own_right = _tile(right, col, own, right_col, right_rank, cols, r)
        z = tl.zeros((HIGH, WIDE), tl.float32)
        if CHUNKS == 1:
            z = tl.dot(own_left, tl.trans(own_right), z, input_precision=PRECISION)
        else:
            for part in range(CHUNKS):
                k = part * R + tl.arange(0, R)
                left_part = _tile(left, row, k, left_row, left_rank, rows, r)
                right_part = _tile(right, k, col, right_rank, right_col, r, cols)
                z = tl.dot(left_part, right_part, z, input_precision=PRECISION)
        here = (row < rows)[:, None] & (col < cols)[None, :]
        place = row.to(tl.int64)[:, None] * p_row + col.to(tl.int64)[None, :] * p_col
        g = tl.load(p + place, here, other=0.0).to(tl.float32) * _wave(z * half_turns, True)
        total = tl.dot(g, own_right, total, input_precision=SUMS)
        if BOTH:
            sums = gain * tl.dot(tl.trans(g), own_left, input_precision=SUMS)
            start = rights + block.to(tl.int64) * cols * r
            tl.store(start + col[:, None] + own[None, :] * cols, sums, (col < cols)[:, None] & (own < r)[None, :])
    start = lefts + split.to(tl.int64) * rows * r
    if TURNED:
        start += row[:, None] + own[None, :] * rows
    else:
        start += row[:, None] * r + own[None, :]
    tl.store(start, gain * total, (row < rows)[:, None] & (own < r)[None, :])


@triton.jit
def _put(out, base, update, o, i, rows, cols, base_row, base_col, ADD: tl.constexpr, CUT_BITS: tl.constexpr):
    """Write the update, if ADD with W0 from `base` added, to rows `o` and columns `i` of `out`."""
    here = (o < rows)[:, None] & (i < cols)[None, :]
    value = update
    if ADD:
        place = o.to(tl.int64)[:, None] * base_row + i.to(tl.int64)[None, :] * base_col
        weight0 = tl.load(base + place, here, other=0.0)
        value = update + weight0.to(out.dtype.element_ty).to(tl.float32)
    if CUT_BITS > 0:
        value = _cut(value, update, o, i, CUT_BITS)
    tl.store(out + o.to(tl.int64)[:, None] * cols + i[None, :], value.to(out.dtype.element_ty), here)


@triton.jit
def _tile(start, i, j, i_stride, j_stride, i_end, j_end):
    """The entries at places `i`, `j` of a factor in float32, 0 beyond its edges."""
    here = (i < i_end)[:, None] & (j < j_end)[None, :]
    return tl.load(start + i[:, None] * i_stride + j[None, :] * j_stride, here, other=0.0).to(tl.float32)


@triton.jit
def _wave(h, COSINE: tl.constexpr):
    """sin(pi h), or cos(pi h).

    Added to 1.5 * 2**23, h is rounded to a whole number, whose last bit says whether that many half turns are a
    change of sign.
    """
    shifted = h + 12582912.0
    f = tl.where(tl.abs(h) < 4194304.0, h - (shifted - 12582912.0), h - h)
    q = f * f
    if COSINE:
        wave = 0.23493756353855133 + q * -0.024396715685725212
        wave = 1.0 + q * (-4.934802055358887 + q * (4.058709144592285 + q * (-1.3352121114730835 + q * wave)))
    else:
        wave = -0.5980464220046997 + q * 0.07722225040197372
        wave = f * (3.141592502593994 + q * (-5.1677069664001465 + q * (2.5500316619873047 + q * wave)))
    sign = shifted.to(tl.uint32, bitcast=True) << 31
    return (wave.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def _cut(value, update, o, i, BITS: tl.constexpr):
    """Each number without the last BITS bits of its fraction, cut off after adding half of what they can be, or, where
    the update is less than 16 steps, bits made from the number's place.
    """
    chance = _mixed(o)[:, None] + _mixed(i ^ 0x5BD1E995)[None, :]
    chance = ((chance ^ (chance >> 16)) * 0x7FEB352D) >> (32 - BITS)
    large = tl.abs(update) * (1 << (19 - BITS)) >= tl.abs(value)
    bits = value.to(tl.uint32, bitcast=True) + tl.where(large, 1 << (BITS - 1), chance)
    cut = (bits & (0x100000000 - (1 << BITS))).to(tl.float32, bitcast=True)
    return tl.where(value == value, cut, value)  # noqa: PLR0124  a NaN's bits could become those of a number


@triton.jit
def _mixed(i):
    """A 32-bit hash of each number: xor-shifts and products with odd constants."""
    x = i.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
