"""Codes of b bits without gaps: eight of them are b bytes, the first code in the lowest bits of the first byte."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def packed_length(count: int, bits: int) -> int:
    """Bytes of `count` codes.

    Example:
        >>> packed_length(9, bits=3)
        4
    """
    return (count * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes below 2^bits, uint8 of any shape, as bytes, on the same device.

    Example:
        >>> pack(torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 1], dtype=torch.uint8), bits=1)
        tensor([13,  1], dtype=torch.uint8)
    """
    codes = codes.flatten()
    eights = pad(codes, (0, -len(codes) % 8)).view(-1, 8).long()
    words = (eights << _shifts(bits, 8, codes)).sum(1)
    return (
        (words[:, None] >> _shifts(8, bits, codes) & 255).to(torch.uint8).flatten()[: packed_length(len(codes), bits)]
    )


def unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """The `count` codes that `pack` made bytes of, uint8."""
    parts = pad(packed, (0, -len(packed) % bits)).view(-1, bits).long()
    words = (parts << _shifts(8, bits, packed)).sum(1)
    return (words[:, None] >> _shifts(bits, 8, packed) & (2**bits - 1)).to(torch.uint8).flatten()[:count]


def _shifts(step: int, count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device) * step
