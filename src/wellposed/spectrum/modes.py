"""Measuring a model in eval mode, whichever mode it is in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
