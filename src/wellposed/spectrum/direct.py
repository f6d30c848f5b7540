"""Operations of ours in torch's registry, called without going through it where nobody needs to know them.

torch.compile, autocast and FSDP see an operation of torch.library as one, with its shapes. Its dispatch in Python costs
the host time at every call: on plain tensors outside of torch.compile the functions behind it are called as they are.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, get_args

import torch
from torch import Tensor, nn


@cache
def _is_plain(kind: type) -> bool:
    """Whether what is of this type has its values here: a subclass of Tensor may stand for something that has none."""
    return kind in {Tensor, nn.Parameter} or not issubclass(kind, Tensor)


def direct(
    operation: Callable[..., Tensor],
    forward: Callable[..., Tensor],
    gradients: Callable[..., Any],
    *,
    keep: Callable[..., None],
    backward: Callable[..., Any],
    refuse: Callable[..., Any],
) -> Callable[..., Tensor]:
    """What is called in place of `operation`.

    Args:
        operation: of torch.library, with its gradients registered.
        forward: what it computes.
        gradients: what the operation of its backward pass computes.
        keep: of the context, inputs and output; what is kept for the backward pass.
        backward: of the context, the gradient of the output and a function such as `gradients`; those of the inputs.
        refuse: raises where gradients of the gradients are asked for.
    """

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            return gradients(*inputs)

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            return refuse(ctx, *given)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            output = forward(*inputs)
            keep(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            return backward(ctx, *given, Once.apply if torch.is_grad_enabled() else gradients)

    def call(*inputs: Any) -> Tensor:
        if torch.compiler.is_compiling() or not all(map(_is_plain, map(type, inputs))):
            return operation(*inputs)
        output: Tensor = Direct.apply(*inputs)
        return output

    return call


def filled(gradients: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """A function of tensors as an operation of torch.library has to be, which cannot return None.

    Where `gradients` returns None the result has a tensor without entries, on the device of the first argument.
    """

    def operation(*given: Any) -> tuple[Tensor, ...]:
        return tuple(given[0].new_empty(0) if each is None else each for each in gradients(*given))

    signature = inspect.signature(gradients)
    returned = (Tensor,) * len(get_args(signature.return_annotation))
    operation.__signature__ = signature.replace(return_annotation=tuple[returned])  # type: ignore[attr-defined, valid-type]
    return operation
