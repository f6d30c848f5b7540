"""A vision model as a whole: its stack of blocks, what it puts before the patches, the norm it ends with, its keys.

Wider than `blocks`, which must know every skip of a model in order to change it: to look at what a block gives, it is
enough to know where the blocks stand.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from wellposed.errors import UnknownFamilyError, UnsuitableModelError
from wellposed.families import timm
from wellposed.families.family import class_path
from wellposed.families.finding import unwrapped
from wellposed.families.surgery import library_class

_PREFIXES = ("cls_token", "class_embedding", "distillation_token", "register_tokens")
# transformers' models whose keys are what k_proj gives; in others, such as DINOv3, a rotation follows.
_PLAIN_KEYS = {
    f"transformers.models.{name}.modeling_{name}"
    for name in ("vit", "deit", "dinov2", "dinov2_with_registers", "clip", "siglip", "ijepa", "vit_msn")
}


# timm's models whose blocks give (B, H, W, D) without saying so.
_MAPS_LAST = {"timm.models.vision_transformer_sam"}


@dataclass(frozen=True)
class Trunk:
    """A vision model, laid out."""

    model: Any
    """The module that takes images; of a transformers model with a head, or with a text model, the part before that."""
    library: Literal["timm", "transformers"]
    blocks: tuple[nn.Module, ...]
    """In the order in which they run; those of a model with stages, stage after stage."""
    norm: nn.Module | None
    """What the tokens of the last block go through before the head."""
    pooled_norm: nn.Module | None
    """What their mean goes through, in models that normalize after pooling."""
    prefix: int
    """Class and register tokens that stand before the patches."""
    reads_class_token: bool
    """Whether the first token is a class token, and the model's head reads it."""
    patch: tuple[int, int]
    """Height and width of the pixels behind one token of the first block."""
    image_size: tuple[int, int] | None
    """Height and width that the model was made for, where it was."""
    takes_any_size: bool
    """Whether it can run on images of another size."""
    channels: int
    channels_last: bool
    """Whether blocks that give maps give them as (B, H, W, D) rather than (B, D, H, W)."""

    def run(self, images_BCHW: Tensor) -> None:
        """Send images, normalized, through the model; where their size is not the model's, positions are resampled."""
        own_size = self.image_size in {None, tuple(images_BCHW.shape[-2:])}
        if self.library == "timm":
            with _resampling(self.model, wanted=not own_size):
                self.model.forward_features(images_BCHW)
            return
        asks = "interpolate_pos_encoding" in inspect.signature(self.model.forward).parameters
        options = {"interpolate_pos_encoding": True} if asks and not own_size else {}
        self.model(pixel_values=images_BCHW, **options)


def trunk(model: nn.Module) -> Trunk:
    """How `model` is laid out; raises UnknownFamilyError where it is no vision model whose blocks can be found."""
    model = unwrapped(model)
    home = library_class(model).__module__
    found = _timm_trunk(model) if home.startswith("timm.") else None
    if hasattr(model, "base_model") and hasattr(model, "config"):
        found = _transformers_trunk(model)
    if found is None:
        raise UnknownFamilyError(
            f"{home}.{library_class(model).__qualname__} is not laid out as a vision model whose blocks can be found. "
            "Expected a timm model with blocks, or with stages of them (ViT, DeiT, Swin, ConvNeXt, ConvMixer ...), or "
            "a transformers model with a patch embedding and layers (ViT, DINOv2, DeiT, CLIPVision ...)"
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


def _timm_trunk(model: Any) -> Trunk | None:
    blocks = _listed(getattr(model, "blocks", None))
    for stages in ("layers", "stages"):
        inner = [_listed(getattr(stage, "blocks", None)) for stage in _listed(getattr(model, stages, None))]
        blocks = blocks or tuple(block for stage in inner for block in stage)
    convolution = _first_convolution(model)
    if not blocks or convolution is None or not hasattr(model, "forward_features"):
        return None
    embedding: Any = getattr(model, "patch_embed", None) or getattr(model, "stem", None)
    patch = embedding.feat_ratio(as_scalar=False) if hasattr(embedding, "feat_ratio") else convolution.stride
    size = getattr(embedding, "img_size", None)
    return Trunk(
        model=model,
        library="timm",
        blocks=blocks,
        norm=_acting(getattr(model, "norm", None)),
        pooled_norm=_acting(getattr(model, "fc_norm", None)),
        prefix=getattr(model, "num_prefix_tokens", 0),
        reads_class_token=getattr(model, "cls_token", None) is not None
        and getattr(model, "num_prefix_tokens", 0) > 0
        and getattr(model, "global_pool", "token") in {"", "token"},
        patch=_pair(patch),
        image_size=None if size is None else _pair(size),
        takes_any_size=size is None or _can_resample(model, embedding),
        channels=convolution.in_channels,
        channels_last=getattr(model, "output_fmt", "NCHW") == "NHWC" or library_class(model).__module__ in _MAPS_LAST,
    )


def _transformers_trunk(model: Any) -> Trunk | None:
    base = model.base_model
    base = getattr(base, "vision_model", base)
    around = [base, getattr(base, "encoder", None)]
    blocks: tuple[nn.Module, ...] = ()
    for holder in around:
        for name in ("layers", "layer"):
            blocks = blocks or _listed(getattr(holder, name, None))
    convolution = _first_convolution(base)
    patch = getattr(base.config, "patch_size", None)
    embeddings = getattr(base, "embeddings", None)
    if not blocks or convolution is None or patch is None or embeddings is None:
        return None
    # A class embedding of CLIP's is (D,), the tokens of others (1, count, D).
    prefixes = {name: getattr(embeddings, name, None) for name in _PREFIXES}
    counts = {name: found.shape[1] if found.ndim == 3 else 1 for name, found in prefixes.items() if found is not None}
    size = getattr(base.config, "image_size", None)
    return Trunk(
        model=base,
        library="transformers",
        blocks=blocks,
        norm=_acting(getattr(base, "layernorm", None) or getattr(base, "post_layernorm", None)),
        pooled_norm=None,
        prefix=sum(counts.values()),
        reads_class_token=bool({"cls_token", "class_embedding"} & counts.keys()),
        patch=_pair(patch),
        image_size=None if size is None else _pair(size),
        takes_any_size=True,
        channels=convolution.in_channels,
        channels_last=False,
    )


def _can_resample(model: Any, embedding: Any) -> bool:
    if not hasattr(model, "dynamic_img_size"):
        return not getattr(embedding, "strict_img_size", True)
    # Rotary positions are made once, for one size, unless the model was made to be dynamic.
    return model.dynamic_img_size or getattr(model, "rope", None) is None


@contextmanager
def _resampling(model: Any, *, wanted: bool) -> Iterator[None]:
    """Have timm's dynamic_img_size for the time being, where it is `wanted` and the model was made without."""
    if not wanted or not hasattr(model, "dynamic_img_size") or model.dynamic_img_size:
        yield
        return
    embedding = model.patch_embed
    there = [(model, "dynamic_img_size", True), (embedding, "strict_img_size", False), (embedding, "flatten", False)]
    there.append((embedding, "output_fmt", type(embedding.output_fmt)("NHWC")))
    before = [getattr(owner, name) for owner, name, _ in there]
    try:
        for owner, name, value in there:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(there, before, strict=True):
            setattr(owner, name, value)


def _listed(container: Any) -> tuple[nn.Module, ...]:
    return tuple(container) if isinstance(container, nn.ModuleList | nn.Sequential) else ()


def _first_convolution(model: nn.Module) -> Any:
    return next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)


def _acting(norm: nn.Module | None) -> nn.Module | None:
    return None if isinstance(norm, nn.Identity) else norm


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int | float) else (int(size[0]), int(size[1]))
