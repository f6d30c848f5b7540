"""Trained adapters in few bits, as data: the adapters of another study x schemes x bits.

wellposed study --ablation adapters --methods lora sine dora sine-dora --ranks 2 4 8 16 ... --out runs/adapters
wellposed study --ablation compression --adapters runs/adapters --out runs/compression
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wellposed.errors import InvalidArgumentError

HALF, SPLIT = "half", "split"
"""An adapter in float16, and LoRA by its singular directions in 2 bits and 1."""


@dataclass(frozen=True)
class Copy:
    """One way to hold an adapter: a scheme, and its bits where it has a choice."""

    scheme: str
    bits: int

    def __str__(self) -> str:
        return f"{self.scheme}-{self.bits}"


@dataclass(frozen=True, kw_only=True)
class CompressionStudy:
    """Quantize the adapters that a study of adapters has trained, and test every copy as they were tested."""

    ablation: Literal["compression"] = "compression"
    adapters: Path = Path("runs/adapters")
    """Folder of a study that wellposed study --ablation adapters has finished."""
    bits: tuple[int, ...] = (1, 2, 3, 4, 5, 8)
    schemes: tuple[Literal["kmeans", "uniform", "normal", "stretched"], ...] = ("kmeans", "uniform")
    """How the values of the codebooks are chosen; the first one is compared between methods."""
    per: Literal["tensor", "row"] = "tensor"
    """A codebook for each factor, or for each of the r rows of A and columns of B."""
    split: bool = True
    """Of LoRA also the idea of LoRAQuant: its singular directions, 60 % of them in 2 bits and the others in 1."""
    out: Path = Path("runs/compression")
    """Folder of the study; type the same command again to go on with one that was interrupted."""
    jobs: int = 2
    """Adapters side by side, in processes of their own."""
    device: str = "auto"

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        for name, given in (("bits", self.bits), ("schemes", self.schemes)):
            if not given or len(set(given)) != len(given):
                raise InvalidArgumentError(f"{name}={given}: expected at least one, each once")
        if min(self.bits) < 1 or max(self.bits) > 8:
            raise InvalidArgumentError(f"bits={self.bits}: expected whole numbers from 1 to 8")
        if self.jobs < 1:
            raise InvalidArgumentError(f"jobs={self.jobs}: expected at least 1")

    def copies(self, method: str) -> Iterator[Copy]:
        """Every copy of an adapter of a method, the one in float16 first."""
        yield Copy(HALF, 16)
        for scheme in self.schemes:
            for bits in self.bits:
                yield Copy(scheme, bits)
        if self.split and method == "lora":
            yield Copy(SPLIT, 2)
