"""What a family of models is: where its skips are, how its block runs, and where its weights lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellposed.families.surgery import SitedModule, library_class


@dataclass(frozen=True)
class Matrix:
    """One weight matrix in torch's (out, in) layout, a view into the parameter its library keeps it in."""

    module: Any
    """The library's linear layer."""
    part: int = 0
    parts: int = 1
    """The matrix is part `part` of `parts` that the library stacks along the output dimension."""

    def view(self) -> Tensor:
        """The (out, in) matrix; writing into it writes into the model."""
        weight: Tensor = self.module.weight.detach()
        if type(self.module).__name__ == "Conv1D":  # GPT-2 stores (in, out)
            weight = weight.T
        return weight.chunk(self.parts)[self.part]

    def split(self, parts: int) -> tuple[Matrix, ...]:
        """The matrices stacked in this one."""
        return tuple(Matrix(self.module, part, parts) for part in range(parts))


@dataclass(frozen=True)
class BlockWeights:
    """The weight matrices of one transformer block.

    A grouped-query block has fewer rows in `key` and `value` than in `query`; query head j reads from key head
    j // (query heads / key heads).
    """

    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    mlp: tuple[Matrix, ...]
    head_dim: int


@dataclass(frozen=True)
class AttentionLayer:
    """A block's attention layer, and how to see what it attends to."""

    name: str
    matrices: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Tensor]
    """Its matrices (B, heads, N, N), from the layer, the arguments it was called with and what it returned."""
    exposed: Callable[[Any], AbstractContextManager[None]] = lambda layer: nullcontext()
    """A context in which the layer returns what `matrices` asks for."""
    is_known: Callable[[Any], bool] = lambda layer: True
    """Whether the layer in this block is the one that `matrices` is about."""


@dataclass(frozen=True)
class Family:
    """The blocks of one architecture in one library."""

    name: str
    block: str
    """Path of the class whose forward makes a module a block of this family."""
    skips: Mapping[str, tuple[str, type[SitedModule]]]
    """For each skip ("attention", "mlp"): the submodule that adds it ("" is the block itself) and its sited forward."""
    weights: Callable[[nn.Module], BlockWeights]
    """The block's matrices; raises UnsuitableModelError with the reason where there are none to speak of."""
    homes: tuple[str, ...]
    """The modules whose classes may stand around a block; any other is an architecture with more to it."""
    stages: Mapping[str, tuple[str, Literal["input", "output"]]]
    """Where tokens can be seen on their way through the block, as the input or output of one of its layers.

    "attention input" and "mlp input" are what these see, "attention" and "mlp" what they give before it meets the
    skip, "after attention" is the sum that the MLP's part of the block begins with. Where a convolution takes the place
    of attention, "convolution" is what it gives before its activation and norm.
    """
    attention: AttentionLayer | None = None
    objection: Callable[[nn.Module], str | None] = lambda block: None
    """Why this particular block is not supported after all, or None."""


def class_path(module: nn.Module) -> str:
    """Path of the class that supplies `module`'s forward, whatever surgery was done on it."""
    owner = next(c for c in library_class(module).__mro__ if "forward" in vars(c))
    return f"{owner.__module__}.{owner.__qualname__}"


def matrices(module: nn.Module, *names: str) -> tuple[Matrix, ...]:
    """The weights of the layers `names` of `module`."""
    return tuple(Matrix(module.get_submodule(name)) for name in names)


def mask_and_bias(given: Tensor | None) -> dict[str, Any]:
    """What can be seen, "mask", and what is added to the logits, "bias", of a mask for torch's fused attention.

    Numbers below half of the lowest that the type has are a library's way to say that something cannot be seen.
    """
    if given is None:
        return {"mask": None, "bias": None}
    given = given[(None,) * (4 - given.ndim)]
    if given.dtype == torch.bool:
        return {"mask": given, "bias": None}
    visible = given > torch.finfo(given.dtype).min / 2
    return {"mask": visible, "bias": given.masked_fill(~visible, 0.0)}
