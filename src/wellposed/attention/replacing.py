"""Replacing the softmax in a model's attention layers, and putting it back."""

from collections.abc import Sequence
from dataclasses import replace
from logging import getLogger
from typing import Any, TypeVar, get_args

import torch
from torch import nn

from wellposed.attention.sites import Attend
from wellposed.attention.specs import Polynomial, Softmax, Spec, from_json, to_json
from wellposed.errors import InvalidArgumentError
from wellposed.families import (
    IMPLEMENTATION,
    LOG_GAIN,
    AttentionSite,
    attentions,
    check_operable,
    drop_compiled_code,
    set_sites,
    sites_of,
    unwrapped,
)

Model = TypeVar("Model", bound=nn.Module)

# What transformers computed attention by before; kept on the layer, where copies and pickles of it find it.
_BEFORE = "_wellposed_implementation_before"


def use_attention(model: Model, spec: Spec, *, only: Sequence[str] | None = None) -> Model:
    """Compute the attention of `model` by `spec` instead of softmax, in place, and return it.

    Parameters and state-dict keys stay as they were, except that a learnable scale is one parameter more for each
    layer, `log_scale_bias`, which begins at 0: make the optimizer afterwards. What was there before is replaced;
    `use_attention(model, Softmax())` gives the library's own attention back, and removes that parameter.

    A row counts the keys it can see: those of its window in Swin, those up to its own in a causal model, those in the
    cache, never padding. In XCiT channels attend to each other, so n is the number of channels of a head. Swin's
    relative bias is added to the logits as before.

    Args:
        model: a timm VisionTransformer (DeiT, ...), Swin or XCiT, or a HuggingFace ViT, BERT, GPT-2 or Llama.
        spec: Polynomial(3), Relu(), Sigmoid() or Softmax().
        only: names of attention layers, where not all of them are meant.

    Raises:
        InvalidArgumentError: no spec, or a name that is not an attention layer's.
        UnknownFamilyError, UnsuitableModelError: the model's attention cannot be replaced. It is untouched.

    Example:
        >>> import timm, wellposed as wp
        >>> model = use_attention(timm.create_model("vit_tiny_patch16_224", depth=1), Polynomial(3))
        >>> wp.recipe(model)
        [{'change': 'use_attention', 'kind': 'polynomial', 'degree': 3, 'scale': None, 'learnable': False}]
    """
    if not isinstance(spec, get_args(Spec)):
        raise InvalidArgumentError(
            f"expected Polynomial(3), Relu(), Sigmoid() or Softmax(), got {type(spec).__name__}: {spec!r}"
        )
    _warn_of_dropout(_replaced(model, spec, only), spec)
    return model


def read_attention(model: nn.Module) -> list[dict[str, Any]]:
    """The arguments with which `replay_attention` makes a fresh model like `model`, if its softmax was replaced."""
    if not any(sites_of(module).attention for module in model.modules()):
        return []
    found = [(name, _spec(module)) for name, module, _ in attentions(model)]
    specs = list(dict.fromkeys(spec for _, spec in found))
    if len(specs) == 1:
        return [to_json(specs[0])]
    return [
        {**to_json(spec), "only": [name for name, own in found if own == spec]}
        for spec in specs
        if not isinstance(spec, Softmax)
    ]


def replay_attention(model: nn.Module, kind: str, only: Sequence[str] | None = None, **arguments: Any) -> None:
    """What `use_attention` did, from an entry of a recipe."""
    _replaced(model, from_json(kind, **arguments), only)


def _replaced(model: nn.Module, spec: Spec, only: Sequence[str] | None) -> list[tuple[str, nn.Module, AttentionSite]]:
    """The layers of `model` that `spec` is something new for, after they have been changed."""
    known = attentions(model)
    found = [each for each in known if only is None or each[0] in only]
    if only is not None and len(found) != len(set(only)):
        names = ", ".join(name for name, _, _ in known[:4])
        raise InvalidArgumentError(f"only={list(only)}: expected some of the model's attention layers {names} ...")
    wanted = None if isinstance(spec, Softmax) else Attend(spec)
    changing = [each for each in found if sites_of(each[1]).attention != wanted]
    for name, module, site in changing:
        check_operable(module, site.forward(), name)
    for _, module, site in changing:
        set_sites(module, site.forward(), replace(sites_of(module), attention=wanted))
        _set_parameter(module, site.heads(module) if isinstance(spec, Polynomial) and spec.learnable else 0)
    for _, module, _ in found:  # also those that had `spec`: set_attn_implementation may have been called since
        _point_transformers_here(module)
    _point_transformers_back(model)
    if changing:
        drop_compiled_code()
    return changing


def _spec(module: nn.Module) -> Spec:
    site = sites_of(module).attention
    return site.spec if isinstance(site, Attend) else Softmax()


def _set_parameter(module: nn.Module, heads: int) -> None:
    """Give `module` its learnable scale for so many heads, or take away the one that it has."""
    module._parameters.pop(LOG_GAIN, None)
    if heads:
        like = next(module.parameters())
        dtype = like.dtype if like.is_floating_point() else torch.float32
        module.register_parameter(LOG_GAIN, nn.Parameter(torch.zeros(heads, dtype=dtype, device=like.device)))


def _point_transformers_here(module: Any) -> None:
    """Have transformers ask our implementation, as long as the layer has a site."""
    if sites_of(module).attention is None or not hasattr(module, "config"):
        return
    before = module.config._attn_implementation
    if before != IMPLEMENTATION:
        vars(module)[_BEFORE] = before
        module.config._attn_implementation = IMPLEMENTATION


def _point_transformers_back(model: nn.Module) -> None:
    """Give every transformers model in `model` without a site its own implementation again.

    One that is only a part of a model keeps ours, which computes softmax for layers without a site: what the rest of
    the model needs cannot be seen from here.
    """
    modules = list(unwrapped(model).modules())
    used = {id(module.config) for module in modules if sites_of(module).attention and hasattr(module, "config")}
    whole = {id(module.config) for module in modules if hasattr(module, "config_class") and hasattr(module, "config")}
    for module in modules:
        config: Any = getattr(module, "config", None)
        if _BEFORE in vars(module) and id(config) in whole - used:
            before = vars(module).pop(_BEFORE)
            if config._attn_implementation == IMPLEMENTATION:  # else it was chosen since
                config._attn_implementation = before


def _warn_of_dropout(found: Sequence[tuple[str, nn.Module, AttentionSite]], spec: Spec) -> None:
    dropping = [(name, site.dropout(module)) for name, module, site in found if site.dropout(module) > 0]
    if dropping and not isinstance(spec, Softmax):
        name, share = dropping[0]
        getLogger(__name__).warning(
            "%s and %d more drop %g of their attention weights in training: the fused kernels cannot, so that every "
            "weight is written out there, in O(N^2) memory. Set that dropout to 0 to train with the kernels.",
            *(name, len(dropping) - 1, share),
        )
