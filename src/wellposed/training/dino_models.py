"""The backbone that a run of DINO trains, and what its configuration leaves to the data."""

from dataclasses import replace
from typing import Any

from wellposed.data import Dataset
from wellposed.errors import InvalidArgumentError
from wellposed.optim import BETAS
from wellposed.training.dino_config import LEARNING_RATES, DinoConfig
from wellposed.training.models import choose_patch_size, sketched

_LARGEST_GLOBAL = 224
_LOCAL_PART = 3 / 7
_BLURRED_FULLY = 96
_NOT_MIRRORED = {"digits"}


def resolved(config: DinoConfig, data: Dataset) -> DinoConfig:
    """`config` with everything filled in that it leaves to the data, the model and the optimizer.

    Raises InvalidArgumentError where the crops cannot be taken from such images, or cut into patches.
    """
    sketch: Any = sketched(config.model)
    if not hasattr(sketch, "dynamic_img_size") or not hasattr(sketch, "num_features"):
        raise InvalidArgumentError(
            f"model={config.model!r}: DINO shows it crops of two sizes; expected a ViT that takes any, such as "
            "vit_small_patch16_224"
        )
    image = min(data.image_shape[1:])
    size = config.global_size or min(image, _LARGEST_GLOBAL)
    patch = config.patch_size or choose_patch_size(size, own=sketch.patch_embed.patch_size[0])
    local = config.local_size or max(1, round(_LOCAL_PART * size / patch)) * patch
    for name, crop in (("global_size", size), ("local_size", local)):
        if crop > image:
            raise InvalidArgumentError(
                f"{name}={crop}: a crop cannot be larger than the images, which have {image} pixels; expected at most "
                f"{image // patch * patch}, or a larger --image-size"
            )
        if crop % patch:
            nearest = sorted({max(patch, crop // patch * patch), -(-crop // patch) * patch})
            raise InvalidArgumentError(
                f"{name}={crop}: it does not divide into patches of {patch} pixels; expected a multiple, such as "
                f"{' or '.join(map(str, nearest))}"
            )
    if local > size:
        raise InvalidArgumentError(f"local_size={local}: expected at most the size of a global crop, {size}")
    has_skips = config.skips or config.cut != "both"
    return replace(
        config,
        out=config.folder,
        lr=LEARNING_RATES[config.optimizer] if config.lr is None else config.lr,
        betas=BETAS[config.optimizer] if config.betas is None else config.betas,
        patch_size=patch,
        global_size=size,
        local_size=local,
        flip=data.name not in _NOT_MIRRORED if config.flip is None else config.flip,
        blur=2.0 * min(1.0, size / _BLURRED_FULLY) if config.blur is None else config.blur,
        drop_path=(0.1 if has_skips else 0.0) if config.drop_path is None else config.drop_path,
    )


def backbone_arguments(config: DinoConfig, data: Dataset) -> dict[str, Any]:
    """What timm.create_model is given for the backbone of `config`, which has everything filled in."""
    arguments = {
        "in_chans": data.image_shape[0],
        "num_classes": 0,
        "img_size": config.global_size,
        "patch_size": config.patch_size,
        "global_pool": config.pool,
        "dynamic_img_size": True,
        "drop_path_rate": config.drop_path,
    }
    return arguments | config.model_args


def shown_size(config: DinoConfig, data: Dataset) -> int:
    """Pixels a side at which whole images are shown: their own, if it divides into patches, or a global crop's."""
    assert config.patch_size is not None
    assert config.global_size is not None
    height, width = data.image_shape[1:]
    return height if height == width and height % config.patch_size == 0 else config.global_size
