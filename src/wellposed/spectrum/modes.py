"""How a model is being run: in eval mode, whichever mode it is in; within a transform of torch.func."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def in_eval_mode(module: Any) -> Iterator[None]:
    """All of `module` in eval mode, and afterwards each part in the mode it was in; other callables as they are."""
    training = [part for part in module.modules() if part.training] if isinstance(module, nn.Module) else []
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def within_transform() -> bool:
    """Whether torch.func's vmap, vjp or jvp look on, the last of which takes operations of ours for constants."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
