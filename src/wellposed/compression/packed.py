"""An adapter in packed form: codes and codebooks of its factors, and the rest of its tensors as they are."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from wellposed.compression.bits import pack, unpack
from wellposed.compression.quantizers import Quantized, decode


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as codes without gaps and codebooks: one codebook, or one for each of its rows or columns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int
    exponent: int
    by_column: bool
    """Whether the codebooks, and with them the codes, go by columns."""
    codes: Tensor
    """Bytes."""
    codebooks: Tensor
    """(codebooks, 2^bits) of float16, to be multiplied by 2^exponent."""

    def values(self) -> Tensor:
        """The tensor, on the device of its codes."""
        count = len(self.codebooks)
        codes = unpack(self.codes, prod(self.shape), self.bits).view(count, -1)
        values = decode(codes, self.codebooks, self.exponent).to(self.dtype)
        return (values.T if self.by_column else values).reshape(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def device(self) -> torch.device:
        """That of the codes."""
        return self.codes.device

    def to(self, device: torch.device | str) -> "PackedTensor":
        """A copy on a device."""
        return replace(self, codes=self.codes.to(device), codebooks=self.codebooks.to(device))

    @property
    def nbytes(self) -> int:
        """Of codes and codebooks."""
        return self.codes.nbytes + self.codebooks.nbytes


@dataclass(frozen=True)
class PackedAdapter:
    """A whole adapter, as `wellposed.compression.read_packed` finds it in a file."""

    config: dict[str, Any]
    """PEFT's adapter_config.json."""
    scheme: str
    factors: dict[str, PackedTensor]
    others: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors under the names that PEFT saves them by."""
        return {name: packed.values() for name, packed in self.factors.items()} | self.others

    def to(self, device: torch.device | str) -> "PackedAdapter":
        """A copy on a device, still packed."""
        return replace(
            self,
            factors={name: packed.to(device) for name, packed in self.factors.items()},
            others={name: tensor.to(device) for name, tensor in self.others.items()},
        )

    @property
    def nbytes(self) -> int:
        """What it takes to hold it."""
        return sum(packed.nbytes for packed in self.factors.values()) + sum(
            each.nbytes for each in self.others.values()
        )


def rows_of(tensor: Tensor, by_column: bool, per_row: bool) -> Tensor:
    """The numbers of a factor as rows that have a codebook each: one row, or one for every rank."""
    if not per_row:
        return tensor.reshape(1, -1)
    matrix = tensor.flatten(1)
    return matrix.T.contiguous() if by_column else matrix


def packed_tensor(tensor: Tensor, quantized: Quantized, by_column: bool) -> PackedTensor:
    """`tensor`, of which `quantized` are the rows that `rows_of` makes of it."""
    return PackedTensor(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        bits=quantized.bits,
        exponent=quantized.exponent,
        by_column=by_column and len(quantized.codebooks) > 1,
        codes=pack(quantized.codes, quantized.bits),
        codebooks=quantized.codebooks,
    )
