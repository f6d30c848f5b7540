"""Importing this module registers the skipless models with timm.

    import timm, wellposed.models

    model = timm.create_model("skipless_vit_base_patch16_224", num_classes=10, beta=0.8)

Each is timm's model of that size with both skips cut and its weights conditioned; `alpha`, `beta`, `c` and `scale_mlp`
may be given beside timm's own arguments. No pretrained weights exist.
"""

import inspect
from typing import Any

from timm.models import model_entrypoint, register_model
from torch import nn

from wellposed.errors import InvalidArgumentError
from wellposed.skipless import condition_, cut_skips

_OF_CONDITION = set(inspect.signature(condition_).parameters) - {"model"}


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


def _skipless(base: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    if pretrained:
        raise InvalidArgumentError(
            f"skipless_{base} has no pretrained weights; use pretrained=False, or wellposed.load"
        )
    of_condition = {name: kwargs.pop(name) for name in _OF_CONDITION & kwargs.keys()}
    model = model_entrypoint(base)(**kwargs)
    return condition_(cut_skips(model), **of_condition)
