"""Seeing what passes through the blocks of a model while it runs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.families import Block, blocks


@contextmanager
def tokens_seen(model: nn.Module) -> Iterator[list[dict[str, Tensor]]]:
    """For each block, its "input", its "output" and the stages of its family, as (B, N, d), once `model` has run."""
    found = blocks(model)
    seen: list[dict[str, Tensor]] = [{} for _ in found]
    with ExitStack() as hooks:
        for block, stages in zip(found, seen, strict=True):
            places = {"input": ("", "input"), "output": ("", "output"), **block.family.stages}
            for stage, (name, end) in places.items():
                hook = _keep(stages, stage, end)
                layer = block.module.get_submodule(name)
                hooks.callback(layer.register_forward_hook(hook, with_kwargs=True).remove)
        yield seen


@contextmanager
def attention_seen(
    model: nn.Module, reduced: Callable[[Tensor], Any] = lambda matrices: matrices
) -> Iterator[list[Any]]:
    """A list that gets the attention matrices (B, H, N, N) of each block, `reduced`, as `model` runs."""
    seen: list[Any] = []
    with ExitStack() as hooks:
        for block in blocks(model):
            attention = block.family.attention
            if attention is None:
                continue
            layer = block.module.get_submodule(attention.name)
            hooks.enter_context(attention.exposed(layer))

            def look(
                layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any, of: Any = attention
            ) -> None:
                with torch.no_grad():
                    seen.append(reduced(of.matrices(layer, arguments, options, output)))

            hooks.callback(layer.register_forward_hook(look, with_kwargs=True).remove)
        yield seen


@contextmanager
def calls_seen(found: list[Block], part: str) -> Iterator[list[tuple[Callable[[Tensor], Tensor], Tensor]]]:
    """For each block, its "attention" or "mlp" as a function of what it sees, and what it saw as the model ran."""
    seen: list[tuple[Callable[[Tensor], Tensor], Tensor]] = []
    with ExitStack() as hooks:
        for block in found:
            first = block.module.get_submodule(block.family.stages[f"{part} input"][0])
            last = block.module.get_submodule(block.family.stages[part][0])

            def keep(
                layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any, last: Any = last
            ) -> None:
                seen.append((_replay(layer, last, arguments, options), _first_tensor(arguments, options).detach()))

            hooks.callback(first.register_forward_hook(keep, with_kwargs=True).remove)
        yield seen


def as_tokens(output: Tensor) -> Tensor:
    """A block's output as (B, N, d); a convolutional one is (B, d, height, width)."""
    return output.flatten(2).mT if output.ndim == 4 else output


def _keep(stages: dict[str, Tensor], stage: str, end: str) -> Callable[..., None]:
    def hook(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
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
        is_named = not arguments
        name = next(iter(options)) if is_named else ""
        call = {**options, name: x} if is_named else options
        output = _first_output(first(*(() if is_named else (x, *arguments[1:])), **call))
        return output if last is first else _first_output(last(output))

    return function


def _first_tensor(arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    tensor: Tensor = arguments[0] if arguments else next(iter(options.values()))
    return tensor


def _first_output(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor
