"""timm's vision models, layer by layer.

Most of them say themselves what their layers give (`forward_intermediates`); those that do not, but name the modules
that end their stages (`feature_info`), are convolutional, and their maps are checked against the widths named there.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import UnsuitableModelError
from wellposed.families.family import class_path
from wellposed.families.layer_outputs import LayerOutput, Trunk, first_convolution, listed, pair, recorded

_CONVMIXER = "timm.models.convmixer.ConvMixer"


class TimmTrunk(Trunk):
    """A timm model, laid out."""

    def run(self, images_BCHW: Tensor) -> Any:
        """Send images, normalized, through the model; where their size is not the model's, positions are resampled."""
        with self._resampling(images_BCHW):
            return self.model.forward_features(images_BCHW)

    def outputs(self, images_BCHW: Tensor, layers: Sequence[int]) -> list[LayerOutput]:
        """What these layers give, after the final norm where timm applies it; the head reads the last one's summary."""
        if hasattr(self.model, "forward_intermediates"):
            final, found = self._intermediates(images_BCHW, layers)
            if isinstance(final, Tensor) and self.model.num_features not in final.shape[1:]:
                final = self.run(images_BCHW)  # MobileNetV5's intermediates leave out its last layers
        else:
            with recorded({layer: self.blocks[layer] for layer in layers}) as seen:
                final = self.run(images_BCHW)
            found = [(_no_tokens(seen[layer]), seen[layer]) for layer in layers]
        made = []
        for layer, (before_BPD, maps_BDHW) in zip(layers, found, strict=True):
            self._check_maps(layer, maps_BDHW)
            made.append(LayerOutput(maps_BDHW, self._summary(layer, before_BPD, maps_BDHW, final)))
        return made

    def _summary(self, layer: int, before_BPD: Tensor, maps_BDHW: Tensor, final: Any) -> Tensor:
        """What the head makes of a layer: of the last, from what it is given; of others, if they look like the last."""
        read = final
        if layer < len(self.blocks) - 1:
            read = torch.cat([before_BPD, maps_BDHW.flatten(2).mT], 1)
            if not isinstance(final, Tensor) or read.shape != final.shape:
                return self.plain_summary(before_BPD, maps_BDHW)
        pooled: Tensor = self.model.forward_head(read, pre_logits=True)
        return pooled if pooled.ndim == 2 else self.plain_summary(before_BPD, maps_BDHW)

    def _intermediates(self, images_BCHW: Tensor, layers: Sequence[int]) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
        """What goes to the head, and of each layer the tokens before the patches and the maps of patches."""
        known = inspect.signature(self.model.forward_intermediates).parameters
        options = {"return_prefix_tokens": True} if self.prefix and "return_prefix_tokens" in known else {}
        ask = partial(self.model.forward_intermediates, images_BCHW, indices=list(layers), output_fmt="NCHW", **options)
        with self._resampling(images_BCHW):
            try:
                final, given = ask(norm=True)
            except AssertionError:  # some, such as Hiera, have their norm in the head and say so
                final, given = ask(norm=False)
        pairs = [one if isinstance(one, tuple) else (one, _no_tokens(one)) for one in given]
        return final, [(before_BPD, maps_BDHW) for maps_BDHW, before_BPD in pairs]

    def _check_maps(self, layer: int, maps_BDHW: Any) -> None:
        width = _features(self.model)[layer]["num_chs"]
        widths = {width, self.model.num_features}  # the latter behind SAM's neck, which it has for a norm
        if not isinstance(maps_BDHW, Tensor) or maps_BDHW.ndim != 4 or maps_BDHW.shape[1] not in widths:
            shape = tuple(maps_BDHW.shape) if isinstance(maps_BDHW, Tensor) else type(maps_BDHW).__name__
            raise UnsuitableModelError(
                f"layer {layer} of {class_path(self.model)} gives {shape}: expected maps (B, {width}, height, width)"
            )

    @contextmanager
    def _resampling(self, images_BCHW: Tensor) -> Iterator[None]:
        """Have timm's dynamic_img_size for the time being, where images are of another size than the model is for."""
        own_size = self.image_size in {None, tuple(images_BCHW.shape[-2:])}
        if own_size or not hasattr(self.model, "dynamic_img_size") or self.model.dynamic_img_size:
            yield
            return
        embedding = self.model.patch_embed
        there = [(self.model, "dynamic_img_size", True), (embedding, "strict_img_size", False)]
        there += [(embedding, "flatten", False), (embedding, "output_fmt", type(embedding.output_fmt)("NHWC"))]
        before = [getattr(owner, name) for owner, name, _ in there]
        try:
            for owner, name, value in there:
                setattr(owner, name, value)
            yield
        finally:
            for (owner, name, _), value in zip(there, before, strict=True):
                setattr(owner, name, value)


def timm_trunk(model: Any) -> TimmTrunk | None:
    """How a timm model is laid out; None where it says of no layer what it gives."""
    features, convolution = _features(model), first_convolution(model)
    modules = dict(model.named_modules())
    found = all(one["module"] in modules for one in features) or hasattr(model, "forward_intermediates")
    if not features or convolution is None or not found:
        return None
    embedding: Any = getattr(model, "patch_embed", None) or getattr(model, "stem", None)
    patch = embedding.feat_ratio(as_scalar=False) if hasattr(embedding, "feat_ratio") else features[0]["reduction"]
    size = getattr(embedding, "img_size", None)
    usual = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    prefix = getattr(model, "num_prefix_tokens", 0)
    return TimmTrunk(
        model=model,
        blocks=tuple(modules.get(one["module"], model) for one in features),
        prefix=prefix,
        reads_class_token=prefix > 0
        and getattr(model, "cls_token", None) is not None
        and getattr(model, "global_pool", "token") in {"", "token"},
        patch=pair(patch),
        image_size=pair(size) if size is not None else None if usual is None else pair(usual[-2:]),
        takes_any_size=size is None or _can_resample(model, embedding),
        channels=getattr(model, "in_chans", None) or convolution.in_channels,
    )


def _features(model: Any) -> list[dict[str, Any]]:
    """Module, width (num_chs) and stride (reduction) of every layer that the model says it gives maps of."""
    if class_path(model) == _CONVMIXER:
        blocks: Any = listed(model.blocks)
        width, stride = model.stem[0].out_channels, model.stem[0].stride[0]
        return [{"module": f"blocks.{i}", "num_chs": width, "reduction": stride} for i in range(len(blocks))]
    features = list(getattr(model, "feature_info", None) or ())
    return features if all(one["reduction"] for one in features) else []


def _no_tokens(maps: Any) -> Tensor:
    """(B, 0, D), what stands before the patches of a model that puts nothing there."""
    return maps.flatten(2).mT[:, :0] if isinstance(maps, Tensor) else torch.empty(0)


def _can_resample(model: Any, embedding: Any) -> bool:
    if not hasattr(model, "dynamic_img_size"):
        return not getattr(embedding, "strict_img_size", True)
    # Rotary positions are made once, for one size, unless the model was made to be dynamic.
    return model.dynamic_img_size or getattr(model, "rope", None) is None
