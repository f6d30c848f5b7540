"""Many packed adapters in memory, one of them in use: what a server holds."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.compression.bits import unpack
from wellposed.compression.files import read_packed
from wellposed.compression.packed import PackedAdapter, PackedTensor
from wellposed.compression.quantizers import decode
from wellposed.compression.weights import working_kernels
from wellposed.errors import InvalidArgumentError, UnsuitableModelError

_MAY_DIFFER = (
    *("base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version", "auto_mapping"),
    *("init_lora_weights", "lora_dropout"),
)
_TOGETHER = 2**24
"""Numbers that are unpacked at a time."""


@dataclass(frozen=True)
class _Stack:
    """Packed tensors of one shape and number of bits, unpacked together: on a GPU, that is what their number costs."""

    keys: list[str]
    like: PackedTensor
    codes: Tensor
    codebooks: Tensor
    """Of one tensor after the other."""
    exponents: Tensor
    """One for each codebook."""
    own_exponents: list[int]
    """One for each tensor."""

    def values(self) -> Sequence[Tensor]:
        """Of each tensor, a view of them all where no codebooks go by columns."""
        count, shape, dtype = len(self.keys), self.like.shape, self.like.dtype
        each = count * prod(shape) // len(self.codebooks)
        kernels = working_kernels(self.codes.device) if dtype != torch.float64 else None
        if kernels is not None:
            values = kernels.unpacked(self.codes, self.codebooks, self.exponents, self.like.bits, each, dtype)
        else:
            codes = unpack(self.codes, count * prod(shape), self.like.bits).view(-1, each)
            values = decode(codes, self.codebooks, self.exponents.int()).to(dtype)
        values = values.view(count, -1, each)
        return (values.mT if self.like.by_column else values).reshape(count, *shape).unbind()

    @cached_property
    def packed(self) -> dict[str, PackedTensor]:
        """Each tensor as it is packed, views of the stack."""
        parts = zip(self.codes.chunk(len(self.keys)), self.codebooks.chunk(len(self.keys)), strict=True)
        own = zip(self.keys, self.own_exponents, parts, strict=True)
        return {
            key: replace(self.like, exponent=exponent, codes=codes, codebooks=codebooks)
            for key, exponent, (codes, codebooks) in own
        }


@dataclass(frozen=True)
class _Held:
    """An adapter as a shelf holds it."""

    stacks: list[_Stack]
    others: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        tensors = [each for stack in self.stacks for each in (stack.codes, stack.codebooks, stack.exponents)]
        return sum(tensor.nbytes for tensor in (*tensors, *self.others.values()))


def _held(packed: PackedAdapter) -> _Held:
    """The adapter with all tensors of a kind in stacks; those whose codes do not end with a byte stay alone."""
    kinds: dict[Any, list[str]] = {}
    for key, each in packed.factors.items():
        alone = key if prod(each.shape) % 8 else None
        kinds.setdefault((each.shape, each.dtype, each.bits, each.by_column, len(each.codebooks), alone), []).append(
            key
        )
    stacks = []
    for keys in kinds.values():
        together = max(1, _TOGETHER // prod(packed.factors[keys[0]].shape))
        stacks += [_stack(packed, keys[start : start + together]) for start in range(0, len(keys), together)]
    return _Held(stacks, packed.others)


def _stack(packed: PackedAdapter, keys: list[str]) -> _Stack:
    tensors = [packed.factors[key] for key in keys]
    exponents = [[each.exponent] for each in tensors for _ in each.codebooks]
    return _Stack(
        keys=keys,
        like=replace(tensors[0], codes=torch.empty(0), codebooks=torch.empty(0)),
        codes=torch.cat([each.codes for each in tensors]),
        codebooks=torch.cat([each.codebooks for each in tensors]),
        exponents=torch.tensor(exponents, dtype=torch.int8, device=tensors[0].codes.device),
        own_exponents=[each.exponent for each in tensors],
    )


class AdapterShelf:
    """Packed adapters of one configuration that take turns in one adapter of a PEFT model, on its device.

    An adapter on the shelf takes its bits; `use` writes what they stand for over the factors that the model has, in
    place, so that optimizers, hooks and compiled graphs keep what they hold.

    Example:
        shelf = AdapterShelf(wp.load_adapter(model, "one-3bit/"))
        shelf.add("one", "one-3bit/")
        shelf.add("other", "other-3bit/")
        shelf.use("other")
    """

    def __init__(self, model: nn.Module, adapter_name: str = "default") -> None:
        import peft

        configs: dict[str, Any] = getattr(model, "peft_config", {})
        if adapter_name not in configs:
            known = ", ".join(configs) or "none"
            raise InvalidArgumentError(f"adapter_name={adapter_name!r}: {type(model).__name__} has {known}")
        self.config = _comparable(configs[adapter_name].to_dict())
        self.places: dict[str, Tensor] = peft.get_peft_model_state_dict(
            model, adapter_name=adapter_name, save_embedding_layers=False
        )
        self.packed: dict[str, _Held] = {}
        strange = [name for name, place in self.places.items() if place.is_meta or hasattr(place, "full_tensor")]
        if strange:
            raise UnsuitableModelError(f"{strange[0]} is offloaded or sharded: expected factors in memory as a whole")

    def add(self, name: str, adapter: PackedAdapter | str | os.PathLike[str]) -> None:
        """Put an adapter, or the one in a folder, on the shelf under a name; one of that name is replaced."""
        packed = adapter if isinstance(adapter, PackedAdapter) else read_packed(Path(adapter))
        other = _comparable(packed.config)
        differing = [key for key in self.config if key in other and other[key] != self.config[key]]
        if differing:
            key = differing[0]
            raise InvalidArgumentError(
                f"{name} has {key}={str(other[key])[:80]}, the model's adapter {str(self.config[key])[:80]}: adapters "
                "that take turns have one configuration. Load this one beside it with wellposed.load_adapter."
            )
        shapes = {key: tuple(each.shape) for key, each in (packed.factors | packed.others).items()}
        places = {key: tuple(place.shape) for key, place in self.places.items()}
        if shapes != places:
            key = next(key for key in shapes | places if shapes.get(key) != places.get(key))
            raise InvalidArgumentError(f"{name} has {key} of shape {shapes.get(key)}, the model of {places.get(key)}")
        self.packed[name] = _held(packed.to(next(iter(self.places.values())).device))

    @torch.no_grad()
    def use(self, name: str) -> None:
        """Give the model the adapter of this name."""
        held = self._held(name)
        for stack in held.stacks:
            self._write(dict(zip(stack.keys, stack.values(), strict=True)))
        self._write(held.others)

    def _held(self, name: str) -> _Held:
        if name not in self.packed:
            raise InvalidArgumentError(f"name={name!r}: expected one of {', '.join(self.packed) or 'none yet'}")
        return self.packed[name]

    def _write(self, tensors: dict[str, Tensor]) -> None:
        """Give the model's tensors these values, all in a few launches."""
        if tensors:
            torch._foreach_copy_([self.places[key] for key in tensors], list(tensors.values()))

    @property
    def nbytes(self) -> int:
        """Of all adapters on the shelf."""
        return sum(held.nbytes for held in self.packed.values())


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that decide what factors mean, sets and lists in one order."""
    return {
        key: sorted(value) if isinstance(value, set | list) and all(isinstance(each, str) for each in value) else value
        for key, value in config.items()
        if key not in _MAY_DIFFER and value not in (None, {}, [], False)
    }
