"""The model a run trains: a timm model made for the data, then changed as asked."""

import difflib
import inspect
from dataclasses import replace
from typing import Any, TypeVar

import timm
import torch
from timm.models.convmixer import ConvMixer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import wellposed.models  # noqa: F401  # registers its names with timm
from wellposed.attention import Polynomial, Relu, Sigmoid, use_attention
from wellposed.data import Dataset
from wellposed.errors import InvalidArgumentError, UnsuitableModelError
from wellposed.families import blocks
from wellposed.graying import gray_tokens
from wellposed.lowrank import factorize
from wellposed.skipless import condition_, cut_skips
from wellposed.training.run_config import RunConfig

Config = TypeVar("Config", bound=RunConfig)

FEWEST_TOKENS, MOST_TOKENS, USUAL_TOKENS = 16, 256, 64


def fitted_to_data(config: Config, data: Dataset) -> Config:
    """`config` with the patch size that it leaves to the data, as a ViT does."""
    size = data.image_shape[-1]
    sketch = sketched(config.model)
    patch = config.patch_size
    if isinstance(sketch, VisionTransformer) and patch is None:
        patch = choose_patch_size(size, own=sketch.patch_embed.patch_size[0])
    if patch is None:
        return config
    if not isinstance(sketch, VisionTransformer | ConvMixer):
        raise InvalidArgumentError(f"patch_size={patch}: {config.model} is no ViT or ConvMixer and has its own")
    if size % patch:
        fitting = ", ".join(str(p) for p in range(1, size + 1) if size % p == 0)
        raise InvalidArgumentError(f"patch_size={patch}: images of {size} pixels divide into {fitting}")
    return replace(config, patch_size=patch)


def choose_patch_size(image_size: int, own: int) -> int:
    """A patch size that divides the image into 16 to 256 tokens.

    The model's own if it gives 64 or more; if it gives more than 256, the smallest that does not; else what comes
    nearest to 64 tokens.

    Example:
        >>> [choose_patch_size(size, own=16) for size in (8, 28, 32, 64, 224, 384)]
        [2, 4, 4, 8, 16, 24]
    """

    def tokens(patch: int) -> int:
        return (image_size // patch) ** 2

    fitting = [p for p in range(1, image_size + 1) if image_size % p == 0 and FEWEST_TOKENS <= tokens(p) <= MOST_TOKENS]
    if not fitting:
        raise InvalidArgumentError(
            f"no patch divides images of {image_size} pixels into {FEWEST_TOKENS} to {MOST_TOKENS} tokens; "
            "choose one with --patch-size, or another --image-size"
        )
    if own in fitting and tokens(own) >= USUAL_TOKENS:
        return own
    if tokens(own) > MOST_TOKENS:
        return min(fitting)
    # A patch of one pixel is a token without content.
    return min([p for p in fitting if p > 1] or fitting, key=lambda p: abs(image_size - p * USUAL_TOKENS**0.5))


def model_arguments(config: RunConfig, data: Dataset) -> dict[str, Any]:
    """What timm.create_model is given for `config`, fitted to `data`."""
    arguments: dict[str, Any] = {"in_chans": data.image_shape[0], "num_classes": len(data.classes)}
    sketch = sketched(config.model)
    if isinstance(sketch, VisionTransformer):
        arguments |= {"patch_size": config.patch_size, "global_pool": config.pool}
    elif config.patch_size is not None:
        arguments["patch_size"] = config.patch_size
    if "img_size" in inspect.signature(type(sketch).__init__).parameters:
        arguments["img_size"] = data.image_shape[-1]
    return arguments | config.model_args


def build_model(config: RunConfig, data: Dataset) -> nn.Module:
    """The model that `config`, fitted to `data`, describes; random numbers come from torch's default generator."""
    return changed_model(config, model_arguments(config, data))


def changed_model(config: RunConfig, arguments: dict[str, Any]) -> nn.Module:
    """The timm model of `config`, made with `arguments`, then changed as it says."""
    try:
        model: nn.Module = timm.create_model(config.model, **arguments)
    except Exception as error:  # timm raises of every kind
        raise InvalidArgumentError(f"{config.model} cannot be built with {arguments}: {error!r}") from error
    return changed(config, model)


def changed(config: RunConfig, model: nn.Module) -> nn.Module:
    """`model` with skips cut, weights conditioned, input grayed, MLPs factorized and softmax replaced as asked."""
    if not config.skips:
        cut_skips(model, attention=config.cut != "mlp", mlp=config.cut != "attention")
    if config.init == "conditioned":
        condition_(model, alpha=config.alpha, beta=config.beta, c=config.c)
    if config.gray != "none":
        gray_tokens(model, config.gray, eps=config.gray_eps, at=config.gray_at)
    if config.low_rank is not None:
        how = {"omega": config.low_rank_omega, "activation": config.low_rank_activation}
        factorize(model, config.low_rank, mlp_layers(model), **how)  # type: ignore[arg-type]
    if config.attention in {"relu", "sigmoid"}:
        use_attention(model, Relu() if config.attention == "relu" else Sigmoid())
    elif config.attention != "softmax":
        scale, degree = config.attention_scale, int(config.attention.removeprefix("degree-"))
        use_attention(model, Polynomial(degree, scale=1.0 if scale == "none" else None, learnable=scale == "learned"))
    return model


def mlp_layers(model: nn.Module) -> list[str]:
    """The names of the layers that make up the MLPs of the blocks of `model`."""
    try:
        found = {id(matrix.module) for block in blocks(model) for matrix in block.family.weights(block.module).mlp}
    except UnsuitableModelError as error:
        raise UnsuitableModelError(
            f"the blocks of {type(model).__name__} have no MLPs to be of low rank: expected a transformer"
        ) from error
    return [name for name, module in model.named_modules() if id(module) in found]


def sketched(name: str) -> nn.Module:
    """The timm model `name` without weights, to see what it is."""
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        advice = f"did you mean {' or '.join(close)}?" if close else "see timm.list_models()"
        raise InvalidArgumentError(f"model={name!r}: timm has no model of that name; {advice}")
    with torch.device("meta"):
        return timm.create_model(name)
