"""A vision model as a whole: its layers and what they give, and the keys of its attention.

Wider than `blocks`, which must know every skip of a model in order to change it: to look at what a block gives, it is
enough to know where it stands and how it is laid out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from wellposed.errors import UnknownFamilyError, UnsuitableModelError
from wellposed.families import timm
from wellposed.families.family import class_path
from wellposed.families.finding import unwrapped
from wellposed.families.layer_outputs import Trunk
from wellposed.families.surgery import library_class
from wellposed.families.timm_trunks import timm_trunk
from wellposed.families.transformers_trunks import MAP_MODELS, TOKEN_MODELS, transformers_trunk

# transformers' models whose keys are what k_proj gives; in others, such as DINOv3, a rotation follows.
_PLAIN_KEYS = {
    f"transformers.models.{name}.modeling_{name}"
    for name in ("vit", "deit", "dinov2", "dinov2_with_registers", "clip", "siglip", "ijepa", "vit_msn")
}


def trunk(model: nn.Module) -> Trunk:
    """How `model` is laid out; raises UnknownFamilyError where it is no vision model whose layers are known."""
    model = unwrapped(model)
    model = getattr(model, "timm_model", model)  # transformers' TimmWrapper
    home = library_class(model).__module__
    found: Trunk | None = timm_trunk(model) if home.startswith("timm.") else None
    if hasattr(model, "base_model") and hasattr(model, "config"):
        found = transformers_trunk(model)
    if found is None:
        raise UnknownFamilyError(
            f"{home}.{library_class(model).__qualname__} is not known to be a vision model whose layers can be looked "
            "at. Expected a timm model with forward_intermediates or feature_info, which most have, or a transformers "
            f"model of one of the types {', '.join(sorted(TOKEN_MODELS | MAP_MODELS))}"
        )
    return found


def keys_of(block: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The layer of a block whose output holds the keys, and what makes (B, N, heads x width) of that output."""
    for name in ("attn", "attention", "self_attn"):
        attention: Any = getattr(block, name, None)
        if attention is None:
            continue
        if class_path(attention) == timm.ATTENTION:
            return attention.qkv, partial(timm.keys, attention)
        if library_class(attention).__module__ in _PLAIN_KEYS and hasattr(attention, "k_proj"):
            return attention.k_proj, lambda keys_BND: keys_BND
        raise UnsuitableModelError(
            f"the keys of {class_path(attention)} are not known to be on the grid of patches; expected the attention "
            "of timm's ViT and DeiT, or of transformers' ViT, DINOv2, DeiT or CLIP. Use kind='tokens'"
        )
    raise UnsuitableModelError(f"a {type(block).__name__} has no attention, so it has no keys; use kind='tokens'")
