"""timm models as data: the architecture's name and the arguments that differ from its defaults."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wellposed.errors import ModelFileError, UnsuitableModelError

_OWN_CLASSES = ("VisionTransformer", "ConvMixer")
"""Classes whose models may also be made without create_model, and all of whose arguments are read off."""


def is_timm(model: nn.Module) -> bool:
    """Whether timm made `model`."""
    return type(model).__module__.startswith("timm.models.")


def describe(model: nn.Module, model_args: dict[str, Any] | None = None) -> dict[str, Any]:
    """The architecture and the arguments of `timm.create_model` that differ from its defaults."""
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if architecture is None and type(model).__name__ not in _OWN_CLASSES:
        raise UnsuitableModelError(
            f"this {type(model).__name__} was not made by timm.create_model, so its architecture has no name"
        )
    described = {"library": "timm", "architecture": architecture or type(model).__name__}
    if model_args is None:
        model_args = _arguments(model)
        if architecture is not None:
            with torch.device("meta"):
                default = _arguments(build(described))
            model_args = {key: value for key, value in model_args.items() if default.get(key) != value}
    return {**described, "args": model_args}


def build(described: dict[str, Any]) -> nn.Module:
    """A fresh timm model; only architectures timm knows, and no argument that loads or downloads something."""
    import timm

    name, arguments = described.get("architecture"), described.get("args", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ModelFileError(f"expected an architecture and its arguments, got {name!r} and {arguments!r}")
    loading = set(inspect.signature(timm.create_model).parameters) - {"kwargs"}
    refused = sorted(key for key in arguments if key in loading or key.startswith("pretrained"))
    if refused:
        raise ModelFileError(f"the file sets {refused}, arguments that load other files; it is not used")
    if name in _OWN_CLASSES:
        constructor: Callable[..., nn.Module] = getattr(timm.models, name)
    elif timm.is_model(name):  # a plain name: never "hf-hub:..." or "local-dir:..."
        constructor = timm.models.model_entrypoint(name)
    else:
        raise ModelFileError(
            f"the installed timm {timm.__version__} has no model {name!r}; upgrade timm, or import what registers it"
        )
    try:
        return constructor(**{key: tuple(v) if isinstance(v, list) else v for key, v in arguments.items()})
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ModelFileError(f"timm cannot make {name} with {arguments}: {error}") from error


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
    "mlp_ratio": lambda m: m.blocks[0].mlp.fc1.out_features / m.embed_dim,
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
