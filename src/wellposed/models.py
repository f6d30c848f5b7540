"""Importing this module registers the skipless models and a small ConvMixer with timm.

    import timm, wellposed.models

    model = timm.create_model("skipless_vit_base_patch16_224", num_classes=10, beta=0.8)

Each skipless one is timm's model of that size with both skips cut and its weights conditioned; `alpha`, `beta`, `c` and
`scale_mlp` may be given beside timm's own arguments. No pretrained weights exist.
"""

import inspect
from typing import Any

from timm.models import model_entrypoint, register_model
from timm.models.convmixer import ConvMixer
from torch import nn

from wellposed.errors import InvalidArgumentError
from wellposed.skipless import condition_, cut_skips

_OF_CONDITION = set(inspect.signature(condition_).parameters) - {"model"}
_OF_CONVMIXER = [
    name for name, known in inspect.signature(ConvMixer).parameters.items() if known.kind is not known.VAR_KEYWORD
]
_OF_CREATE_MODEL = {"pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}


@register_model
def skipless_vit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT-Tiny without skips, conditioned."""
    return _skipless("vit_tiny_patch16_224", pretrained, kwargs)


@register_model
def skipless_vit_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT-Small without skips, conditioned."""
    return _skipless("vit_small_patch16_224", pretrained, kwargs)


@register_model
def skipless_vit_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT-Base without skips, conditioned."""
    return _skipless("vit_base_patch16_224", pretrained, kwargs)


@register_model
def convmixer_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """A ConvMixer of timm's class for images of 32 pixels, with its skips; the smallest that timm names is 768/32."""
    _refuse_pretrained("convmixer_tiny", pretrained)
    arguments = {name: value for name, value in kwargs.items() if name not in _OF_CREATE_MODEL}
    for name in arguments:
        if name not in _OF_CONVMIXER:  # ConvMixer would take it, and make nothing of it
            raise InvalidArgumentError(f"convmixer_tiny has no argument {name!r}; it has {', '.join(_OF_CONVMIXER)}")
    return ConvMixer(**({"dim": 256, "depth": 8, "kernel_size": 5, "patch_size": 2} | arguments))


def _skipless(base: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    _refuse_pretrained(f"skipless_{base}", pretrained)
    of_condition = {name: kwargs.pop(name) for name in _OF_CONDITION & kwargs.keys()}
    model = model_entrypoint(base)(**kwargs)
    return condition_(cut_skips(model), **of_condition)


def _refuse_pretrained(name: str, pretrained: bool) -> None:
    if pretrained:
        raise InvalidArgumentError(f"{name} has no pretrained weights; use pretrained=False, or wellposed.load")
