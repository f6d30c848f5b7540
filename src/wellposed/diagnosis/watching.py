"""Seeing what passes through the blocks of a model while it runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import UnsuitableModelError
from wellposed.families import Block, blocks

Call = tuple[Callable[[Tensor], Tensor], Tensor]
"""A part of a block as a function of what it sees, and what it saw."""


@contextmanager
def tokens_seen(model: nn.Module) -> Iterator[list[dict[str, Tensor]]]:
    """For each block, its "input", its "output" and the stages of its family, as (B, N, d), once `model` has run."""
    found = blocks(model)
    seen: list[dict[str, Tensor]] = [{} for _ in found]
    with ExitStack() as hooks:
        for block, stages in zip(found, seen, strict=True):
            places = {"input": ("", "input"), "output": ("", "output"), **block.family.stages}
            for stage, (name, end) in places.items():
                hook = _keep(block.name, stages, stage, end)
                layer = block.module.get_submodule(name)
                hooks.callback(layer.register_forward_hook(hook, with_kwargs=True).remove)
        yield seen
    _check_that_all_ran(found, seen)


@contextmanager
def attention_seen(
    model: nn.Module, reduced: Callable[[Tensor], Any] = lambda matrices: matrices
) -> Iterator[list[Any]]:
    """For each block its attention matrices (B, H, N, N), `reduced`, once `model` has run; None if it has none."""
    found = blocks(model)
    seen: list[Any] = [None] * len(found)
    with ExitStack() as hooks:
        for i, block in enumerate(found):
            attention = block.family.attention
            layer = block.module.get_submodule(attention.name) if attention else None
            if attention is None or not attention.is_known(layer):
                continue
            hooks.enter_context(attention.exposed(layer))

            def look(
                layer: nn.Module, arguments: Any, options: Any, output: Any, i: int = i, of: Any = attention
            ) -> None:
                with torch.no_grad():
                    seen[i] = reduced(of.matrices(layer, arguments, options, output))

            assert layer is not None
            hooks.callback(layer.register_forward_hook(look, with_kwargs=True).remove)
        yield seen


@contextmanager
def calls_seen(found: Sequence[Block], part: str) -> Iterator[list[Call]]:
    """For each block its "attention" or "mlp" as it was called when the model ran."""
    seen: list[dict[str, Call]] = [{} for _ in found]
    calls: list[Call] = []
    with ExitStack() as hooks:
        for block, its_own in zip(found, seen, strict=True):
            first = block.module.get_submodule(block.family.stages[f"{part} input"][0])
            last = block.module.get_submodule(block.family.stages[part][0])

            def keep(
                layer: nn.Module, arguments: Any, options: Any, output: Any, last: Any = last, its_own: Any = its_own
            ) -> None:
                its_own[part] = (_replay(layer, last, arguments, options), _first_tensor(arguments, options).detach())

            hooks.callback(first.register_forward_hook(keep, with_kwargs=True).remove)
        yield calls
    _check_that_all_ran(found, seen)
    calls.extend(its_own[part] for its_own in seen)


def as_tokens(output: Tensor) -> Tensor:
    """A block's output as (B, N, d); a convolutional one is (B, d, height, width)."""
    return output.flatten(2).mT if output.ndim == 4 else output


def _check_that_all_ran(found: Sequence[Block], seen: Sequence[dict[str, Any]]) -> None:
    for block, its_own in zip(found, seen, strict=True):
        if not its_own:
            raise UnsuitableModelError(f"{block.name} did not run: expected a model that runs all of its blocks, once")


def _keep(name: str, stages: dict[str, Tensor], stage: str, end: str) -> Callable[..., None]:
    def hook(layer: nn.Module, arguments: Any, options: Any, output: Any) -> None:
        if stage in stages:
            raise UnsuitableModelError(f"{name} ran twice: expected a model that runs all of its blocks, once")
        stages[stage] = as_tokens(
            (_first_tensor(arguments, options) if end == "input" else _first_output(output)).detach()
        )

    return hook


def _replay(
    first: nn.Module, last: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    """The layers from `first` to `last`, called again with another input and otherwise the same arguments."""
    options = {name: None if name == "past_key_values" else value for name, value in options.items()}  # it would grow

    def function(x: Tensor) -> Tensor:
        output = first(x, *arguments[1:], **options) if arguments else first(**{**options, next(iter(options)): x})
        return _first_output(output) if last is first else _first_output(last(_first_output(output)))

    return function


def _first_tensor(arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    tensor: Tensor = arguments[0] if arguments else next(iter(options.values()))
    return tensor


def _first_output(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor
