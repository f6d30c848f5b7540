"""What a model is, as data: the library, the name and the arguments that build it again.

`origin` rebuilds every model on the meta device and compares before it answers, so that a model which cannot
be built again is refused when it is saved, not when it is needed.
"""

import json
from typing import Any

import torch
from torch import nn

from wellposed.attention.replacing import read_attention, replay_attention
from wellposed.errors import ModelFileError, UnsuitableModelError
from wellposed.families import library_class
from wellposed.lowrank.factorize import read_factorizations, replay_factorization
from wellposed.recipes import timm_models, transformers_models

Origin = dict[str, Any]

# Attributes that say how a model runs at the moment, not what it is.
_PASSING = {
    *("training", "grad_checkpointing", "gradient_checkpointing", "fused_attn"),
    *("weight_init_mode", "fix_init", "name_or_path", "max_seq_len_cached"),
}


def origin(model: nn.Module, model_args: dict[str, Any] | None = None) -> Origin:
    """How to build a model like `model`; raises UnsuitableModelError where that cannot be told."""
    if timm_models.is_timm(model):
        described, advice = timm_models.describe(model, model_args), "Give timm.create_model's arguments as model_args"
    elif transformers_models.is_transformers(model):
        described, advice = (
            transformers_models.describe(model),
            ("It was built with more than its configuration holds, or changed by hand: use its save_pretrained"),
        )
    else:
        raise UnsuitableModelError(
            f"{type(model).__module__}.{type(model).__qualname__} is neither a timm nor a transformers model, so a "
            "folder could not say how to build it. Save the model inside it, or state_dict() and wellposed.recipe()."
        )
    try:
        described = json.loads(json.dumps(described))
    except TypeError as error:
        raise UnsuitableModelError(f"the model's arguments do not fit into JSON ({error}): {described}") from error
    with torch.device("meta"):
        rebuilt = build(described)
        for entry in read_factorizations(model):
            replay_factorization(rebuilt, **entry)
        for entry in read_attention(model):
            replay_attention(rebuilt, **entry)
    difference = _first_difference(model, rebuilt)
    if difference:
        raise UnsuitableModelError(
            f"cannot tell how {type(model).__name__} was made: rebuilt from {described}, {difference}. {advice}."
        )
    return described


def build(described: Any) -> nn.Module:
    """A fresh model from what `origin` returned; the text may come from anywhere, so nothing in it is trusted."""
    library = described.get("library") if isinstance(described, dict) else None
    if library == "timm":
        return timm_models.build(described)
    if library == "transformers":
        return transformers_models.build(described)
    raise ModelFileError(f"the file names the library {library!r}; expected 'timm' or 'transformers'")


def _first_difference(model: nn.Module, rebuilt: nn.Module) -> str | None:
    ours, theirs = dict(model.named_modules()), dict(rebuilt.named_modules())
    for name in [*theirs, *ours]:
        if name not in ours or name not in theirs:
            return f"the module {name!r} is {'missing' if name in ours else 'one too many'}"
        if library_class(ours[name]).__name__ != library_class(theirs[name]).__name__:
            return f"{name!r} is a {type(theirs[name]).__name__}, not a {type(ours[name]).__name__}"
        for attribute, value in vars(theirs[name]).items():
            own = vars(ours[name]).get(attribute)
            if not _is_plain(value) or attribute in _PASSING or attribute.startswith("_"):
                continue
            if not _is_plain(own) or own != value:
                return f"{name}.{attribute} is {value!r}, not {own!r}"
    ours_shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    theirs_shapes = {name: tensor.shape for name, tensor in rebuilt.state_dict().items()}
    for name in [*theirs_shapes, *ours_shapes]:
        if ours_shapes.get(name) != theirs_shapes.get(name):
            return f"{name!r} has shape {theirs_shapes.get(name)}, not {ours_shapes.get(name)}"
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
