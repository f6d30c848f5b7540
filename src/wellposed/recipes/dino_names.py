"""DINO's own checkpoints: the names under which its authors keep student and teacher, and timm's, which are ours.

Theirs is a dictionary with `student`, whose names begin with module.backbone. or module.head., and `teacher`, with
backbone. or head.; the backbone's names after that are timm's.
"""

import json
import os
from argparse import Namespace
from codecs import encode
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import InvalidArgumentError, ModelFileError

Who = Literal["student", "teacher"]
WRAPPED = "module."
RECIPE = "wellposed_recipe"
"""In files that we write, beside the two: the recipe of the backbone as JSON, for the names do not tell it."""
_SCALAR: Any = np.float64(0).__reduce__()[0]
PLAIN: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    *(Namespace, np.dtype, type(np.dtype("float64")), encode, _SCALAR),
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]
"""What stands beside the weights in their files: the arguments of the run, and numbers of numpy's. It runs no code."""


def from_dino(checkpoint: Mapping[str, Any], who: Who = "teacher") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of the backbone, under timm's names, and of the head in a checkpoint of DINO's authors.

    Args:
        checkpoint: with student and teacher, or the weights of one backbone alone, as they publish them too.
        who: of which of the two; a backbone alone has no head, and then the second is empty.
    """
    if who not in {"student", "teacher"}:
        raise InvalidArgumentError(f"who={who!r}: expected 'student' or 'teacher'")
    names = checkpoint.get(who, checkpoint)
    if not isinstance(names, Mapping) or not names or not all(isinstance(value, Tensor) for value in names.values()):
        raise ModelFileError(
            f"the checkpoint holds {', '.join(map(str, list(checkpoint)[:5])) or 'nothing'}: expected a dictionary "
            f"with the weights of {who!r}, or of a backbone alone"
        )
    plain = {str(name).removeprefix(WRAPPED): tensor for name, tensor in names.items()}
    head = {name.removeprefix("head."): tensor for name, tensor in plain.items() if name.startswith("head.")}
    rest = {name.removeprefix("backbone."): tensor for name, tensor in plain.items() if not name.startswith("head.")}
    return rest, head


def recipe_of(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The changes under which the weights in `checkpoint` were trained; none in a file of DINO's authors."""
    return json.loads(checkpoint.get(RECIPE, "[]"))


def open_dino(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """What torch.save wrote into a file, for `from_dino` and `recipe_of`; nothing in it is executed."""
    try:
        with torch.serialization.safe_globals(PLAIN):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, pickle and zipfile each have their own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelFileError(
            f"{path} cannot be read as weights alone ({reason}). A checkpoint with more in it opens with "
            "torch.load(path, weights_only=False), if you trust it: give what that returns to from_dino"
        ) from error
    if not isinstance(found, Mapping):
        raise ModelFileError(f"{path} holds a {type(found).__name__}: expected a dictionary of weights")
    return found


def read_dino(path: str | os.PathLike[str], who: Who = "teacher") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """`from_dino` of a file."""
    return from_dino(open_dino(path), who)
