"""timm models as data: the architecture's name and the arguments that differ from its defaults."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wellposed.errors import ModelFileError, UnsuitableModelError, WellposedError

_OWN_CLASSES = ("VisionTransformer", "ConvMixer")
"""Classes whose models may also be made without create_model, and all of whose arguments are read off."""


def is_timm(model: nn.Module) -> bool:
    """Whether timm made `model`."""
    return type(model).__module__.startswith("timm.models.")


def describe(model: nn.Module, model_args: dict[str, Any] | None = None) -> dict[str, Any]:
    """The architecture and the arguments of `timm.create_model` that differ from its defaults."""
    made_as = getattr(model, "pretrained_cfg", None) or {}
    if made_as.get("architecture") is None and type(model).__name__ not in _OWN_CLASSES:
        raise UnsuitableModelError(
            f"this {type(model).__name__} was not made by timm.create_model, so its architecture has no name"
        )
    described: dict[str, Any] = {"library": "timm", "architecture": made_as.get("architecture", type(model).__name__)}
    arguments = _arguments(model)
    if made_as:
        with torch.device("meta"):
            unchanged: Any = build(described)
        if made_as.get("tag") != unchanged.pretrained_cfg.get("tag"):  # another mean and std go with another tag
            described["architecture"] += f".{made_as['tag']}"
        default = _arguments(unchanged)
        # What fc_norm is by default depends on global_pool, so the two go together.
        kept = {"global_pool", "fc_norm"} if arguments.get("global_pool") != default.get("global_pool") else set()
        arguments = {key: v for key, v in arguments.items() if default.get(key) != v or key in kept}
    if model_args is not None:
        given = {key: v for key, v in model_args.items() if not _loads_something(key)}
        arguments = given if made_as else arguments | given  # a class alone has no defaults to add to them
    return {**described, "args": arguments}


def build(described: dict[str, Any]) -> nn.Module:
    """A fresh timm model; only architectures timm knows, and no argument that loads or downloads something."""
    import timm

    name, arguments = described.get("architecture"), described.get("args", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ModelFileError(f"expected an architecture and its arguments, got {name!r} and {arguments!r}")
    refused = sorted(filter(_loads_something, arguments))
    if refused:
        raise ModelFileError(f"the file sets {refused}, which are no arguments of a model alone; it is not used")
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    architecture, _, tag = name.partition(".")
    try:
        if name in _OWN_CLASSES:
            return getattr(timm.models, name)(**arguments)
        if timm.is_model(architecture):  # a plain name: never "hf-hub:..." or "local-dir:..."
            return timm.models.model_entrypoint(architecture)(pretrained_cfg=tag or None, **arguments)
    except WellposedError:
        raise
    except Exception as error:  # whatever an argument can make a constructor stumble over
        raise ModelFileError(f"timm cannot make {name} with {arguments}: {error}") from error
    raise ModelFileError(
        f"the installed timm {timm.__version__} has no model {name!r}; upgrade timm, or import what registers it"
    )


def _loads_something(argument: str) -> bool:
    """Whether this is an argument of create_model or its wrappers rather than of the model."""
    import timm

    wrapping = {*inspect.signature(timm.create_model).parameters, "features_only", "out_indices", "feature_cls"}
    return argument.startswith("pretrained") or argument in wrapping


def _arguments(model: nn.Module) -> dict[str, Any]:
    """The arguments of `model`'s constructor as far as its parts tell them."""
    classes = {cls.__name__ for cls in type(model).__mro__}
    readers = _ANY | (_VIT if "VisionTransformer" in classes else {}) | (_CONVMIXER if "ConvMixer" in classes else {})
    values: dict[str, Any] = {}
    for name, read in readers.items():
        try:
            values[name] = read(model)
        except AttributeError:  # a variant without this part; what it hides, `origin` sees when it compares
            continue
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _ratio(hidden: int, width: int) -> float:
    """The mlp_ratio for which timm's int(width * ratio) is `hidden`."""
    return hidden / width if int(width * (hidden / width)) == hidden else (hidden + 0.5) / width


def _is_there(module: nn.Module) -> bool:
    return not isinstance(module, nn.Identity)


_ANY: dict[str, Callable[[Any], Any]] = {
    "num_classes": lambda m: m.num_classes,
    "in_chans": lambda m: m.in_chans,
    "drop_rate": lambda m: m.head_drop.p,
}
_VIT: dict[str, Callable[[Any], Any]] = {
    "img_size": lambda m: m.patch_embed.img_size,
    "patch_size": lambda m: m.patch_embed.proj.kernel_size,
    "embed_dim": lambda m: m.embed_dim,
    "depth": lambda m: len(m.blocks),
    "num_heads": lambda m: m.blocks[0].attn.num_heads,
    "mlp_ratio": lambda m: _ratio(m.blocks[0].mlp.fc1.out_features, m.embed_dim),
    "qkv_bias": lambda m: m.blocks[0].attn.qkv.bias is not None,
    "qk_norm": lambda m: _is_there(m.blocks[0].attn.q_norm),
    "proj_bias": lambda m: m.blocks[0].attn.proj.bias is not None,
    "init_values": lambda m: m.blocks[0].ls1.init_values if _is_there(m.blocks[0].ls1) else None,
    "class_token": lambda m: m.has_class_token,
    "pos_embed": lambda m: "none" if m.pos_embed is None else "learn",
    "no_embed_class": lambda m: m.no_embed_class,
    "reg_tokens": lambda m: m.num_reg_tokens,
    "pre_norm": lambda m: _is_there(m.norm_pre),
    "final_norm": lambda m: _is_there(m.norm) or _is_there(m.fc_norm),
    "fc_norm": lambda m: _is_there(m.fc_norm),
    "global_pool": lambda m: m.global_pool,
    "dynamic_img_size": lambda m: m.dynamic_img_size,
    "dynamic_img_pad": lambda m: m.patch_embed.dynamic_img_pad,
    "pos_drop_rate": lambda m: m.pos_drop.p,
    "patch_drop_rate": lambda m: getattr(m.patch_drop, "prob", 0.0),
    "proj_drop_rate": lambda m: m.blocks[0].attn.proj_drop.p,
    "attn_drop_rate": lambda m: m.blocks[0].attn.attn_drop.p,
    "drop_path_rate": lambda m: getattr(m.blocks[-1].drop_path1, "drop_prob", 0.0),
}
_CONVMIXER: dict[str, Callable[[Any], Any]] = {
    "dim": lambda m: m.stem[0].out_channels,
    "depth": lambda m: len(m.blocks),
    "kernel_size": lambda m: m.blocks[0][0].fn[0].kernel_size[0],
    "patch_size": lambda m: m.stem[0].kernel_size[0],
    "global_pool": lambda m: m.pooling.pool_type,
}
