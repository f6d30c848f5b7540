"""transformers' vision models, layer by layer.

They are listed by name: nothing in a model says whether its patches stay in the order of the grid, and in some they do
not (Hiera sorts them by window, YOLOS puts further tokens behind them).
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import UnsuitableModelError
from wellposed.families.layer_outputs import LayerOutput, Trunk, first_convolution, listed, pair, recorded

# config.model_type of models whose blocks give class and register tokens, then the patches row by row.
TOKEN_MODELS = {
    *("vit", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit", "vit_msn", "vit_mae", "ijepa", "beit"),
    *("data2vec-vision", "clip_vision_model", "metaclip_2_vision_model", "altclip_vision_model"),
    *("chinese_clip_vision_model", "siglip_vision_model"),
}
# Of models whose hidden states are maps (B, D, H, W), one for each stage after that of the embedding.
MAP_MODELS = {"convnext", "convnextv2", "dinov3_convnext", "resnet", "regnet", "swin", "swinv2", "focalnet"}

_PREFIXES = ("cls_token", "class_embedding", "distillation_token", "register_tokens")


class TransformersTrunk(Trunk):
    """A transformers model, laid out."""

    def run(self, images_BCHW: Tensor, **options: Any) -> Any:
        """Send images, normalized, through the model; where their size is not the model's, positions are resampled."""
        known = inspect.signature(self.model.forward).parameters
        if "interpolate_pos_encoding" in known and self.image_size not in {None, tuple(images_BCHW.shape[-2:])}:
            options["interpolate_pos_encoding"] = True
        if self.model.config.model_type == "vit_mae":
            count = images_BCHW.shape[2] // self.patch[0] * (images_BCHW.shape[3] // self.patch[1])
            options["noise"] = torch.arange(count, device=images_BCHW.device).expand(len(images_BCHW), -1)
        with _nothing_masked(self.model.config):
            return self.model(pixel_values=images_BCHW, **options)

    def outputs(self, images_BCHW: Tensor, layers: Sequence[int]) -> list[LayerOutput]:
        """What these layers give, tokens after the final norm; the head reads the last one's summary."""
        if self.model.config.model_type in MAP_MODELS:
            return self._stages(images_BCHW, layers)
        with recorded({layer: self.blocks[layer] for layer in layers}) as seen:
            self.run(images_BCHW)
        norm, pooler = _final_norm(self.model), _pooler(self.model)
        made = []
        for layer in layers:
            tokens_BND = norm(seen[layer])
            before_BPD, maps_BDHW = self.split(tokens_BND, images_BCHW, layer)
            summary_BD = pooler(tokens_BND) if pooler is not None else self.plain_summary(before_BPD, maps_BDHW)
            made.append(LayerOutput(maps_BDHW, summary_BD))
        return made

    def _stages(self, images_BCHW: Tensor, layers: Sequence[int]) -> list[LayerOutput]:
        output = self.run(images_BCHW, output_hidden_states=True)
        states = list(getattr(output, "reshaped_hidden_states", None) or output.hidden_states)[1:]
        last = len(self.blocks) - 1
        if len(states) != len(self.blocks) or any(state.ndim != 4 for state in states):
            raise UnsuitableModelError(
                f"{type(self.model).__name__} gives hidden states {[tuple(state.shape) for state in states]}: expected "
                f"a map (B, D, height, width) for each of its {len(self.blocks)} stages"
            )
        if output.last_hidden_state.ndim == 3:  # the patches after the final norm, perhaps behind a class token
            grid = states[last].shape[2:]
            states[last] = output.last_hidden_state[:, -grid.numel() :].mT.unflatten(-1, grid)
        return [
            LayerOutput(states[layer], output.pooler_output.flatten(1) if layer == last else states[layer].mean((2, 3)))
            for layer in layers
        ]


def transformers_trunk(model: Any) -> TransformersTrunk | None:
    """How a transformers model is laid out; None where it is none of those that are known."""
    # DINOv3's base_model is its encoder, which takes no images.
    base = model.base_model if _takes_images(model.base_model) else model
    base = getattr(base, "vision_model", base)
    kind = getattr(base.config, "model_type", None)
    convolution, embeddings = first_convolution(base), getattr(base, "embeddings", None)
    inside = (base, getattr(base, "encoder", None), getattr(base, "model", None))
    lists = [listed(getattr(holder, name, None)) for holder in inside for name in ("layers", "layer", "stages")]
    blocks = next(filter(None, lists), ())
    if kind not in TOKEN_MODELS | MAP_MODELS or not blocks or convolution is None:
        return None
    # A class embedding of CLIP's is (D,), the tokens of others (1, count, D).
    prefixes = {name: getattr(embeddings, name, None) for name in _PREFIXES if kind in TOKEN_MODELS}
    counts = {name: found.shape[1] if found.ndim == 3 else 1 for name, found in prefixes.items() if found is not None}
    size = getattr(base.config, "image_size", None)
    return TransformersTrunk(
        model=base,
        blocks=blocks,
        prefix=sum(counts.values()),
        reads_class_token=bool({"cls_token", "class_embedding"} & counts.keys())
        and not getattr(base.config, "use_mean_pooling", False),
        patch=pair(convolution.stride),
        image_size=None if size is None else pair(size),
        takes_any_size=True,
        channels=convolution.in_channels,
    )


def _takes_images(model: nn.Module) -> bool:
    return "pixel_values" in inspect.signature(model.forward).parameters


def _final_norm(base: Any) -> nn.Module:
    names = ("layernorm", "post_layernorm", "norm")
    return next((norm for name in names if (norm := getattr(base, name, None)) is not None), nn.Identity())


def _pooler(base: Any) -> nn.Module | None:
    """What makes a vector for the head of all tokens, where the model has more than a mean or a class token for it."""
    names = {"beit": "pooler", "data2vec-vision": "pooler", "siglip_vision_model": "head"}
    return getattr(base, names.get(base.config.model_type, ""), None)


@contextmanager
def _nothing_masked(config: Any) -> Iterator[None]:
    """A masked autoencoder sees all patches, as it does when it is used and no longer trained."""
    ratio = getattr(config, "mask_ratio", None)
    if ratio is None:
        yield
        return
    config.mask_ratio = 0.0
    try:
        yield
    finally:
        config.mask_ratio = ratio
