"""A frozen model with all that its features depend on: weights, changes, normalization, image size, device."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.data import open_data, open_loader
from wellposed.diagnosis.sources import input_statistics, made_for_size, open_model
from wellposed.errors import DataError, InvalidArgumentError, ModelFileError, WellposedError
from wellposed.evaluation.features import Kind, LayerFeatures, check_image_size, layer_features
from wellposed.families import trunk
from wellposed.recipes import WEIGHTS, recipe
from wellposed.runs import device_named

_RUN_CONFIG = "config.json"
# Attributes that say how a model runs at the moment, not what it computes.
_PASSING = {"training", "grad_checkpointing", "gradient_checkpointing", "fused_attn", "name_or_path"}


@dataclass(frozen=True)
class Backbone:
    """A model in eval mode on its device, ready for pictures as they are on disk."""

    model: nn.Module
    name: str
    mean: Tensor
    """Of each channel of images in [0, 1], (C, 1, 1)."""
    std: Tensor
    image_size: int
    """Pixels a side that suit it."""
    fingerprint: str
    """A hash of its weights, its recipe and its settings: equal ones give equal features."""
    device: torch.device

    def features(
        self, images_BCHW: Tensor, layers: Sequence[int] | None = (-1,), kind: Kind = "tokens"
    ) -> list[LayerFeatures]:
        """`layer_features` of uint8 images, grey or RGB, whose height and width are multiples of the patch size."""
        return layer_features(self.model, self.normalized(images_BCHW), layers, kind)

    def normalized(self, images_BCHW: Tensor) -> Tensor:
        """uint8 images as the model takes them: on its device, normalized, with its number of channels."""
        if images_BCHW.dtype != torch.uint8 or images_BCHW.ndim != 4:
            raise InvalidArgumentError(
                f"images are {images_BCHW.dtype} {tuple(images_BCHW.shape)}: expected uint8 (B, channels, height, "
                "width); layer_features takes normalized ones"
            )
        return self.standardized(images_BCHW.to(self.device, torch.float32) / 255)

    def standardized(self, images: Tensor) -> Tensor:
        """Images in [0, 1] on the device, (B, channels, height, width), with the model's channels and statistics."""
        given, expected = images.shape[1], len(self.mean)
        if given != expected and 1 not in {given, expected}:
            raise InvalidArgumentError(f"images have {given} channels: expected {expected}, or 1")
        if expected == 1:
            images = images.mean(1, keepdim=True)
        return (images.expand(-1, expected, -1, -1) - self.mean) / self.std


def open_backbone(
    source: str,
    *,
    checkpoint: Path | None = None,
    model_args: Mapping[str, Any] | None = None,
    image_size: int | None = None,
    device: str = "auto",
    data: str | None = None,
    seed: int = 0,
) -> Backbone:
    """The model that `source` names, ready to give features.

    Images are normalized as the model's own settings say, or, for a run of `wellposed train`, as in that run, whose
    training set is read for it. Nothing is downloaded, and nothing in a file is executed.

    Args:
        source: a timm name, a HuggingFace folder, a folder of wellposed.save, a run of `wellposed train` or one of
            its checkpoints.
        checkpoint: weights for a timm model; without, it is at its initialization.
        model_args: further arguments of timm.create_model.
        image_size: pixels a side; the size the model was made for if None.
        device: auto (a GPU where there is one), cpu, cuda, cuda:1, ...
        data: where the training set of the run now is, as --data has it; what the run's configuration says if None, or
            if it is another set.
        seed: of the initialization, where there are no weights.
    """
    place = device_named(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = open_model(source, checkpoint, model_args).eval()
    found = trunk(model)
    own = found.image_size[0] if found.image_size is not None else made_for_size(model)
    run = _run_config(Path(source))
    if run is not None:
        mean, std, own = _of_run(run, source, data)
    else:
        mean, std = input_statistics(model, found.channels)
    if image_size is not None and not found.takes_any_size and image_size != own:
        model = _resized(model, image_size)
        found = trunk(model)
    size = image_size or own
    check_image_size(found, size, size)
    return Backbone(
        model=model.to(place).requires_grad_(False),
        name=Path(source).name or source,
        mean=mean.to(place),
        std=std.to(place),
        image_size=size,
        fingerprint=model_fingerprint(model),
        device=place,
    )


def model_fingerprint(model: nn.Module) -> str:
    """A hash of all that `model` computes with: weights, buffers, recipe, and the plain settings of its modules."""
    digest = hashlib.sha256()
    settings = {
        name: {"class": type(module).__name__, **_plain_settings(module)} for name, module in model.named_modules()
    }
    digest.update(json.dumps([settings, recipe(model)], sort_keys=True, default=str).encode())
    for name, tensor in sorted({**dict(model.named_buffers()), **model.state_dict()}.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _plain_settings(module: nn.Module) -> dict[str, Any]:
    """Numbers, words and sequences of them, such as the number of heads, which leave no trace in the weights."""

    def plain(value: Any) -> bool:
        if isinstance(value, tuple | list):
            return all(map(plain, value))
        return value is None or isinstance(value, bool | int | float | str)

    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _PASSING and plain(value)
    }


def _resized(model: Any, image_size: int) -> nn.Module:
    """The model for images of another size, of those that can be told only once, such as timm's Swin."""
    if not hasattr(model, "set_input_size"):
        raise InvalidArgumentError(f"image_size={image_size}: {type(model).__name__} takes only images of its own size")
    try:
        model.set_input_size(img_size=(image_size, image_size))
    except (AssertionError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(
            f"image_size={image_size}: {type(model).__name__} cannot take it: {error}"
        ) from error
    return model


def _run_config(folder: Path) -> dict[str, Any] | None:
    """The settings of the run in `folder`, or of the one whose checkpoint it is; None where it is neither."""
    if not (folder / WEIGHTS).is_file():
        return None
    homes = [folder, *([folder.parents[1]] if folder.parent.name in {"checkpoints", "kept"} else [])]
    path = next((home / _RUN_CONFIG for home in homes if (home / _RUN_CONFIG).is_file()), None)
    if path is None:
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))["config"]
        return {"data": str(config["data"]), "image_size": config["image_size"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFileError(f"{path} cannot be read as the settings of a run ({error!r}); put it back") from error


def _of_run(run: dict[str, Any], source: str, data: str | None) -> tuple[Tensor, Tensor, int]:
    """Mean, standard deviation and image size of a run's training set."""
    spec = run["data"]
    if data is not None and data.partition(":")[0] == spec.partition(":")[0]:
        spec = data
    try:
        return _statistics_of(spec, run["image_size"])
    except WellposedError as error:
        raise DataError(
            f"{source} normalizes images by the statistics of the set it was trained on, which cannot be opened: "
            f"{error}. Say where that set is"
        ) from error


@lru_cache(maxsize=8)  # a run's checkpoints are opened one after the other, and the set is read anew for each
def _statistics_of(spec: str, image_size: int | None) -> tuple[Tensor, Tensor, int]:
    images = open_data(spec, "train", image_size)
    loader = open_loader(images, 1, workers=0)
    return loader.mean, loader.std, images.image_shape[-1]
