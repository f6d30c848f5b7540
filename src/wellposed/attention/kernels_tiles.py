"""How the kernels of element-wise attention cut their work: in 16 bits, for heads of 64 and 128, the fastest on an H200
first. Those for heads of 32 and for float32 are chosen by counting and known to run, not tuned.

Fixed rather than found at run time, so that the order of every sum, and with it the last bits, is the same in each run.
`wellposed bench attention --tune` measures the candidates again.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

Kernel = Literal["forward", "queries", "keys"]


@dataclass(frozen=True)
class Tiles:
    """Sizes of one launch."""

    bm: int
    """Queries in a tile."""
    bn: int
    """Keys in a tile."""
    warps: int
    stages: int
    """Tiles on their way from memory at a time."""
    registers: int | None = None
    """The most that a thread may have, where fewer let another program run beside this one."""
    one_loop: bool = False
    """Under a causal mask: a branch in one loop, rather than a second loop along the diagonal that has to wait for its
    first keys. The keys kernel always does it so.
    """
    in_registers: bool = False
    """The queries' own block is kept in registers; shared memory may then have room for another program. Not with
    `one_loop`: across a branch the assembler (Triton 3.6's) puts other values into these registers.
    """

    def __post_init__(self) -> None:
        assert not (self.one_loop and self.in_registers)

    def __str__(self) -> str:
        capped = "" if self.registers is None else f", {self.registers} registers"
        looped = ", one loop" if self.one_loop else ""
        kept = ", in registers" if self.in_registers else ""
        return f"{self.bm} x {self.bn}, {self.warps} warps, {self.stages} stages{capped}{looped}{kept}"


INTERPRETED = Tiles(32, 16, 4, 1)
"""In Triton's interpreter, where small tiles make small inputs have several of them."""

_HALF: dict[tuple[Kernel, int], tuple[Tiles, ...]] = {
    ("forward", 32): (Tiles(128, 64, 4, 3), Tiles(128, 128, 8, 3), Tiles(64, 64, 4, 2)),
    ("forward", 64): (
        *(Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3), Tiles(128, 64, 4, 4), Tiles(64, 128, 4, 3)),
        *(Tiles(64, 128, 4, 2), Tiles(128, 64, 4, 3, 168), Tiles(128, 64, 8, 4), Tiles(128, 64, 4, 2)),
        *(Tiles(128, 32, 4, 3, 128), Tiles(64, 32, 4, 3), Tiles(128, 128, 8, 3), Tiles(64, 64, 4, 2)),
        *(Tiles(64, 64, 4, 3, one_loop=True), Tiles(64, 32, 4, 3, one_loop=True)),
        *(Tiles(64, 64, 4, 3, in_registers=True), Tiles(128, 64, 8, 3, in_registers=True)),
    ),
    ("forward", 128): (
        *(Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 4), Tiles(128, 128, 8, 2)),
        *(Tiles(64, 128, 4, 2), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)),
        Tiles(64, 64, 4, 3, in_registers=True),
    ),
    ("queries", 32): (Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2)),
    ("queries", 64): (
        *(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 4), Tiles(64, 64, 4, 3), Tiles(128, 64, 4, 3), Tiles(64, 128, 4, 2)),
        *(Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(64, 64, 4, 3, one_loop=True)),
        *(Tiles(64, 64, 4, 3, in_registers=True), Tiles(128, 64, 8, 3, in_registers=True)),
    ),
    ("queries", 128): (
        *(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 4), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2)),
        *(Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(128, 64, 8, 3, one_loop=True)),
        Tiles(64, 64, 4, 3, in_registers=True),
    ),
    ("keys", 32): (Tiles(64, 64, 4, 3), Tiles(64, 128, 8, 3), Tiles(64, 64, 4, 2)),
    ("keys", 64): (
        *(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3, 168), Tiles(64, 64, 4, 4), Tiles(32, 128, 4, 3)),
        *(Tiles(64, 128, 8, 3), Tiles(64, 128, 8, 4), Tiles(64, 64, 4, 2), Tiles(64, 128, 8, 2), Tiles(32, 64, 4, 2)),
    ),
    ("keys", 128): (
        *(Tiles(64, 128, 8, 3), Tiles(64, 128, 8, 4), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(32, 128, 8, 3)),
        *(Tiles(64, 128, 8, 2), Tiles(32, 64, 4, 2), Tiles(32, 32, 4, 2)),
    ),
}
Span = Literal["short", "middle", "long"]
"""Of a sequence: up to 256 tokens, or from 2048 on, or between."""
_FIRST: dict[tuple[Kernel, int, bool, Span], Tiles] = {
    ("forward", 64, False, "short"): Tiles(128, 32, 4, 3, 128),
    ("forward", 64, False, "middle"): Tiles(64, 64, 4, 3, in_registers=True),
    ("forward", 64, False, "long"): Tiles(128, 64, 8, 3, in_registers=True),
    ("keys", 64, False, "short"): Tiles(32, 128, 4, 3),
    ("forward", 64, True, "short"): Tiles(64, 32, 4, 3, one_loop=True),
    ("queries", 64, True, "short"): Tiles(64, 64, 4, 2),
    ("keys", 64, True, "short"): Tiles(32, 64, 4, 2),
    ("forward", 64, True, "middle"): Tiles(64, 64, 4, 3, in_registers=True),
    ("queries", 64, True, "middle"): Tiles(64, 64, 4, 3, one_loop=True),
    ("keys", 64, True, "middle"): Tiles(64, 64, 4, 3, 168),
    ("forward", 64, True, "long"): Tiles(64, 64, 4, 3, in_registers=True),
    ("queries", 64, True, "long"): Tiles(64, 64, 4, 3, in_registers=True),
    ("keys", 64, True, "long"): Tiles(64, 64, 4, 3),
    ("forward", 128, True, "middle"): Tiles(64, 64, 4, 3, in_registers=True),
    ("queries", 128, False, "long"): Tiles(64, 64, 4, 3, in_registers=True),
    ("queries", 128, True, "middle"): Tiles(64, 64, 4, 3, in_registers=True),
    ("keys", 128, True, "middle"): Tiles(64, 64, 4, 2),
}
"""The first among them with a causal mask or without, by span: small tiles waste less on the diagonal. Where a span has
none that of the middle is taken, and where that has none the first of all.
"""
_WITHOUT_REGISTERS: dict[tuple[Kernel, int, bool, Span], Tiles] = {
    ("forward", 64, True, "middle"): Tiles(64, 64, 4, 3, one_loop=True),
    ("forward", 64, True, "long"): Tiles(128, 64, 8, 3),
    ("queries", 64, True, "long"): Tiles(64, 64, 4, 3),
    ("queries", 128, True, "middle"): Tiles(128, 64, 8, 3, one_loop=True),
}
"""The first where those above may not be used."""
_SINGLE: dict[tuple[Kernel, int], Tiles] = {
    ("forward", 32): Tiles(64, 64, 4, 2),
    ("forward", 64): Tiles(64, 32, 4, 2),
    ("forward", 128): Tiles(64, 32, 8, 2),
    ("queries", 32): Tiles(64, 64, 4, 2),
    ("queries", 64): Tiles(64, 32, 4, 2),
    ("queries", 128): Tiles(64, 16, 4, 2),
    ("keys", 32): Tiles(32, 64, 4, 2),
    ("keys", 64): Tiles(32, 64, 8, 2),
    ("keys", 128): Tiles(16, 64, 4, 2),
}
"""For float32: three products of TF32 for one need the registers that larger tiles would. Eight warps on tiles of 16
rows or keys read beyond their memory (Triton 3.6 on an H200).
"""
_SMALLEST = Tiles(16, 16, 4, 1)
WIDTHS = (32, 64, 128)
"""Of heads, for which there are tiles; others are rounded up."""


def span_of(tokens: int) -> Span:
    """That of a sequence, the longer of queries and keys."""
    return "short" if tokens <= 256 else "long" if tokens >= 2048 else "middle"


def candidates(kernel: Kernel, width: int, *, single: bool, causal: bool, span: Span) -> tuple[Tiles, ...]:
    """What may be used for heads so wide, the best first; the last needs least of the device.

    Args:
        kernel: which of the three.
        width: one of WIDTHS.
        single: for float32; otherwise for bfloat16 and float16.
        causal: with a causal mask.
        span: how long the sequences are.
    """
    if single:
        return _SINGLE[kernel, width], _SMALLEST
    all_tiles = [
        tiles
        for tiles in _HALF[kernel, width]
        if (causal or not tiles.one_loop) and (registers_are_safe() or not tiles.in_registers)
    ]
    firsts = (
        table.get((kernel, width, causal, each)) for each in (span, "middle") for table in (_FIRST, _WITHOUT_REGISTERS)
    )
    best = next((tiles for tiles in firsts if tiles in all_tiles), all_tiles[0])
    return (best, *(tiles for tiles in all_tiles if tiles != best), _SMALLEST)


@cache
def registers_are_safe() -> bool:
    """Whether this is what tiles in registers were seen to be right with: Triton 3.6 on a Hopper GPU."""
    try:
        from triton import __version__  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return False
    if torch.cuda.is_available() and (torch.version.hip or torch.cuda.get_device_capability()[0] != 9):
        return False
    return bool(__version__.startswith("3.6."))
