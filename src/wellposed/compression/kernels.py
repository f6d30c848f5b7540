"""Packed factors as Triton kernels, of which `wellposed.compression.weights` is the meaning.

`packed_weight` reads W0 once and writes W0 + s sin(omega Q(B) Q(A)), or W0 + s Q(B) Q(A), once. Its programs take the
codes apart themselves. Counted for q_proj of Llama-3-8B, 4096 x 4096 in 16 bits, r = 32, 3 bits:

    W0 and W                            67.1 MB, 14 us at 4.8 TB/s: the floor
    codes and codebooks                  0.1 MB
    factors unpacked before, in float32  1.0 MB to write and to read again, and two launches of about 2 us

The bytes of unpacked factors would be nothing, their launches would not, nor their memory, which is held by every
adapter that is switched to. Within the pass a program of 128 x 64 entries looks up 192 r codes, 0.75 for each entry at
r = 32: two bytes and a codebook's value each, which all programs of a multiprocessor find in its first cache. These
4 M warps' loads of a whole q_proj are about 5 us on 132 multiprocessors, beneath the 14 us that W0 and W take. And what
a codebook holds has 11 bits, so that one product in TF32 is exact, where float32 factors take three.

`unpacked` writes the values of many tensors in one launch: for layers that keep their factors.

Shapes: O out, I in, r rank.
"""

# A kernel's arguments have no Python types.
# mypy: disable-error-code="import-untyped, no-untyped-def"

from math import pi

import torch
import triton
import triton.language as tl
from torch import Tensor

from wellposed.compression.packed import PackedTensor
from wellposed.lowrank.kernels import _CUT_BITS, _HIGH, _WIDE, _cdiv, _chunk, _put, _wave
from wellposed.spectrum.launch import on

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_BLOCK = 1024
"""Numbers that a program unpacks."""


def packed_weight(
    weight0: Tensor | None, a: PackedTensor, b: PackedTensor, omega: float | None, scale: float, out: Tensor
) -> Tensor:
    """W0 + scale sin(omega Q(B) Q(A)), or of omega None W0 + scale Q(B) Q(A), written to `out`, (out, in) and whole.

    Rounded as by `wellposed.lowrank.kernels.sine_weight`.
    """
    rows, cols = out.shape
    r = a.shape[0]
    if out.numel() == 0:
        return out
    chunk = _chunk(r)
    base = out if weight0 is None else weight0
    b_places = (1, rows) if b.by_column else (r, 1)
    with on(out.device):
        _packed_weight_kernel[(_cdiv(rows, _HIGH), _cdiv(cols, _WIDE))](
            base, a.codes, a.codebooks, b.codes, b.codebooks, out,
            rows, cols, r, *base.stride(), *b_places, len(a.codes), len(b.codes), _book_step(a), _book_step(b),
            2.0**a.exponent, 2.0**b.exponent, 0.0 if omega is None else omega / pi, scale,
            ADD=weight0 is not None, SINE=omega is not None,
            CUT_BITS=0 if weight0 is None else _CUT_BITS.get(out.dtype, 0),
            A_BITS=a.bits, B_BITS=b.bits, A_TYPE=_TYPES[a.dtype], B_TYPE=_TYPES[b.dtype],
            R=chunk, CHUNKS=_cdiv(r, chunk), HIGH=_HIGH, WIDE=_WIDE,
            num_warps=8, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def unpacked(codes: Tensor, codebooks: Tensor, exponents: Tensor, bits: int, each: int, dtype: torch.dtype) -> Tensor:
    """The values, (codebooks, each), of codes that follow one another, `each` of them to a codebook * 2^exponent."""
    values = torch.empty(len(codebooks), each, dtype=dtype, device=codes.device)
    with on(codes.device):
        _unpack_kernel[(_cdiv(values.numel(), _BLOCK),)](
            codes, codebooks, exponents, values, values.numel(), each, len(codes),
            BITS=bits, TYPE=_TYPES[dtype], BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return values


def try_on(device: torch.device) -> None:
    """Run every kernel once on very little, so that what does not work here shows."""
    codes, codebook = (torch.zeros(*shape, device=device) for shape in ((6,), (1, 8)))
    a, b = (
        PackedTensor(shape, torch.float32, 3, 0, False, codes.to(torch.uint8), codebook.half())
        for shape in ((1, 16), (16, 1))
    )
    packed_weight(None, a, b, 1.0, 1.0, torch.empty(16, 16, device=device))
    unpacked(a.codes, a.codebooks, torch.zeros(1, 1, dtype=torch.int8, device=device), 3, 16, torch.float32)


def _book_step(packed: PackedTensor) -> int:
    """From the codebook of one component of the rank to the next: none where all have the same."""
    return 0 if len(packed.codebooks) == 1 else packed.codebooks.shape[1]


@triton.jit
def _packed_weight_kernel(
    base, a_codes, a_books, b_codes, b_books, out,
    rows, cols, r, base_row, base_col, b_row, b_rank, a_end, b_end, a_step, b_step, a_gain, b_gain, half_turns, scale,
    ADD: tl.constexpr, SINE: tl.constexpr, CUT_BITS: tl.constexpr, A_BITS: tl.constexpr, B_BITS: tl.constexpr,
    A_TYPE: tl.constexpr, B_TYPE: tl.constexpr,
    R: tl.constexpr, CHUNKS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One block of the weight; `half_turns` is omega / pi, and a `gain` a codebook's power of two."""
    o = tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    i = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    z = tl.zeros((HIGH, WIDE), tl.float32)
    for part in range(CHUNKS):
        k = part * R + tl.arange(0, R)
        b_here, a_here = (o < rows)[:, None] & (k < r)[None, :], (k < r)[:, None] & (i < cols)[None, :]
        b_place, a_place = o[:, None] * b_row + k[None, :] * b_rank, k[:, None] * cols + i[None, :]
        b_part = _decoded(b_codes, b_books + k[None, :] * b_step, b_place, b_gain, b_here, b_end, B_BITS, B_TYPE)
        a_part = _decoded(a_codes, a_books + k[:, None] * a_step, a_place, a_gain, a_here, a_end, A_BITS, A_TYPE)
        z = tl.dot(b_part, a_part, z, input_precision="tf32")
    update = scale * z
    if SINE:
        update = scale * _wave(z * half_turns, False)
    _put(out, base, update, o, i, rows, cols, base_row, base_col, ADD, CUT_BITS)


@triton.jit
def _unpack_kernel(
    codes, books, exponents, values, count, each, end, BITS: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """A block of the values."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = n < count
    row = n // each
    exponent = tl.load(exponents + row, here, other=0).to(tl.int32)
    gain = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    value = _decoded(codes, books + (row << BITS), n, gain, here, end, BITS, TYPE)
    tl.store(values + n, value.to(TYPE), here)


@triton.jit
def _decoded(codes, book, place, gain, here, end, BITS: tl.constexpr, TYPE: tl.constexpr):
    """What the codes number `place` stand for in their codebooks times `gain`, as TYPE holds it, in float32.

    A code lies within one byte of all `end` where BITS divides 8, else within two.
    """
    first = place * BITS
    byte = first >> 3
    found = tl.load(codes + byte, here, other=0).to(tl.int32)
    if 8 % BITS != 0:
        found |= tl.load(codes + byte + 1, here & (byte + 1 < end), other=0).to(tl.int32) << 8
    code = (found >> (first & 7)) & ((1 << BITS) - 1)
    return (tl.load(book + code, here, other=0.0).to(tl.float32) * gain).to(TYPE).to(tl.float32)
