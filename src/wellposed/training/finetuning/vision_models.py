"""Vision models from disk, for images of the size at hand; nothing in a file is executed, and nothing fetched."""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from wellposed.diagnosis.sources import input_statistics, made_for_size
from wellposed.errors import InvalidArgumentError, ModelFileError, UnsuitableModelError
from wellposed.recipes import WEIGHTS, dino_names, load
from wellposed.training.finetuning.heads import model_heads
from wellposed.training.finetuning.models import new_modules
from wellposed.training.finetuning.vision_config import VisionConfig
from wellposed.training.models import FEWEST_TOKENS, sketched

_SIZES = {"digits": 8, "shapes": 32, "cifar10": 32, "cifar100": 32}
"""Pixels a side of sets that have a size of their own, or a usual one."""
_CONFIG, _FILE, _HEADER = "config.json", "model.safetensors", "wellposed"


@dataclass(frozen=True)
class OpenedVision:
    """A model with the head of its file, for images of one size."""

    model: Any
    image_size: int
    channels: int
    statistics: tuple[Tensor, Tensor] | None
    """Mean and standard deviation that it was trained with, (C, 1, 1) each; None for those of the set at hand."""
    name: str = ""
    """The one by which timm made the model, if it did."""
    arguments: dict[str, Any] | None = None
    """What timm.create_model was given beside that."""
    is_new: bool = False
    """Whether its weights are those of an initialization."""
    new: Sequence[str] = ()
    """Modules before the head that its file has no weights for."""


def open_vision_model(config: VisionConfig) -> OpenedVision:
    """The model that `config` names, its image size and position embedding fitted to the images it will see."""
    path = Path(config.model)
    if path.exists() and (config.checkpoint is not None or config.model_args):
        raise InvalidArgumentError(
            f"{path} has its own weights and settings: leave out --checkpoint and --model-args, or give a timm name"
        )
    if path.is_file():
        return _of_file(path, config)
    if path.is_dir():
        return _of_folder(path, config)
    if config.model.startswith((".", "/", "~")) or path.suffix == ".safetensors":
        raise ModelFileError(f"{path} does not exist: expected a folder with a model, a .safetensors file or a name")
    sketched(config.model.partition(".")[0])  # raises, with names that are close, where timm has none such
    return _timm_model(config.model, config.model_args, config.checkpoint, {}, config)


def _of_file(path: Path, config: VisionConfig) -> OpenedVision:
    if _has_recipe(path):
        return _wellposed_model(path, config)
    described = _described(path.parent)
    if "architecture" not in described:
        raise ModelFileError(
            f"{path} holds weights, but neither it nor a {_CONFIG} beside it says of what model: "
            f"give --model NAME --checkpoint {path}, with timm's name for it"
        )
    return _timm_folder(described, path, config)


def _has_recipe(path: Path) -> bool:
    """Whether `path` is a file of wellposed.save."""
    if path.suffix != ".safetensors":
        return False
    try:
        with safe_open(path, framework="pt") as file:
            return _HEADER in (file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path} is not a whole safetensors file: {error}") from error


def _of_folder(path: Path, config: VisionConfig) -> OpenedVision:
    if (path / WEIGHTS).exists():
        return _wellposed_model(path, config)
    described = _described(path)
    if "architecture" in described:
        return _timm_folder(described, path / _FILE, config)
    return _transformers_model(path, config)


def _described(folder: Path) -> dict[str, Any]:
    """What config.json in `folder` says; nothing where there is none."""
    try:
        found = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{folder / _CONFIG} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _timm_folder(described: dict[str, Any], file: Path, config: VisionConfig) -> OpenedVision:
    """What timm's own save_for_hf writes: the name of the architecture, its arguments and its weights."""
    known = described.get("pretrained_cfg") or {}
    overlay = {name: tuple(known[name]) for name in ("mean", "std", "input_size") if known.get(name)}
    arguments = described.get("model_args") or {}
    name = str(described["architecture"])
    if not timm.is_model(name):
        raise ModelFileError(f"{file.parent / _CONFIG} names {name!r}, which the installed timm does not have")
    return _timm_model(name, arguments, file, overlay, config)


def _timm_model(
    name: str, given: Mapping[str, Any], checkpoint: Path | None, overlay: dict[str, Any], config: VisionConfig
) -> OpenedVision:
    """A model made by timm for the size at hand, and weights that timm fits to it."""
    given = {key: value for key, value in given.items() if key not in {"num_classes", "pretrained"}}
    if checkpoint is not None:
        given["num_classes"] = 0
    with torch.device("meta"):
        sketch: Any = _created(name, given, overlay)
    patch = getattr(getattr(sketch, "patch_embed", None), "patch_size", None)
    size = _chosen_size(config, made_for_size(sketch), patch[0] if isinstance(patch, tuple) else patch)
    if "img_size" in inspect.signature(type(sketch).__init__).parameters:
        given["img_size"] = size
    if checkpoint is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = _created(name, given, overlay)
    else:
        model = _with_weights(name, given, overlay, checkpoint)
    channels = int(given.get("in_chans", 3))
    usual = input_statistics(model, channels)
    return OpenedVision(model, size, channels, usual, name=name, arguments=given, is_new=checkpoint is None)


def _with_weights(name: str, given: dict[str, Any], overlay: dict[str, Any], checkpoint: Path) -> nn.Module:
    """The model with the weights in `checkpoint`, without their head; position embeddings resized as timm does."""
    if not checkpoint.is_file():
        raise ModelFileError(f"checkpoint={checkpoint}: there is no such file")
    try:
        with torch.serialization.safe_globals(dino_names.PLAIN):
            state = timm.models.load_state_dict(str(checkpoint), weights_only=True)
        is_changed = bool(dino_names.recipe_of(state)) or _has_recipe(checkpoint)
        state = dino_names.from_dino(state)[0] if "teacher" in state else state
    except Exception as error:  # whatever a broken or hostile file makes the reader raise
        raise ModelFileError(f"{checkpoint} cannot be read as weights: {' '.join(str(error).split())[:300]}") from error
    if is_changed:
        raise ModelFileError(
            f"{checkpoint} has weights of a model that was changed, and its recipe: give the folder or the file itself "
            "as --model, so that the recipe is followed"
        )
    with torch.device("meta"):
        heads = (_created(name, given, overlay).pretrained_cfg or {}).get("classifier") or ()
    for head in (heads,) if isinstance(heads, str) else heads:
        state = {key: value for key, value in state.items() if not key.startswith(f"{head}.")}
    try:
        # With as many classes as the weights are said to have, none, timm asks for exactly the weights of the model.
        model = _created(name, given, overlay | {"state_dict": state, "num_classes": 0}, pretrained=True)
    except RuntimeError as error:
        reason = " ".join(" ".join(str(error).splitlines()[1:3]).split())[:300]
        raise ModelFileError(f"the weights in {checkpoint} do not fit {name}: {reason}") from error
    model.pretrained_cfg.pop("state_dict", None)
    return model


def _created(name: str, given: Mapping[str, Any], overlay: dict[str, Any], *, pretrained: bool = False) -> Any:
    try:
        return timm.create_model(name, pretrained=pretrained, pretrained_cfg_overlay=overlay or None, **given)
    except (TypeError, ValueError, AssertionError, AttributeError) as error:
        raise InvalidArgumentError(f"model={name!r} cannot be made with {dict(given)}: {error}") from error


def _wellposed_model(path: Path, config: VisionConfig) -> OpenedVision:
    """A model with its recipe; such a one was trained on images normalized by the statistics of their set."""
    model: Any = load(path)
    if hasattr(model, "config"):
        _require_classifier(model, path)
        return OpenedVision(model, *_transformers_size(model.config, config), None)
    size = config.image_size or _SIZES.get(config.sets, made_for_size(model))
    if hasattr(model, "set_input_size") and size != made_for_size(model):
        try:
            model.set_input_size(img_size=(size, size))
        except (AssertionError, ValueError, RuntimeError) as error:
            raise InvalidArgumentError(f"image_size={size}: {type(model).__name__} cannot take it: {error}") from error
    return OpenedVision(model, size, int(model.in_chans), None)


def _transformers_model(path: Path, config: VisionConfig) -> OpenedVision:
    """What transformers' save_pretrained wrote, whether or not there is a head for classes in it."""
    try:
        from transformers import AutoModelForImageClassification
    except ImportError as error:
        raise InvalidArgumentError("this folder needs transformers: pip install 'wellposed[peft]'") from error
    options = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
    try:
        model, told = AutoModelForImageClassification.from_pretrained(path, output_loading_info=True, **options)
    except Exception as error:  # whatever a broken or foreign folder makes the reader raise
        reason = " ".join(str(error).split())[:300]
        raise ModelFileError(
            f"{path} cannot be read as a vision model: {reason}. Expected {_CONFIG} and safetensors of transformers or "
            f"timm, or {WEIGHTS}"
        ) from error
    _require_classifier(model, path)
    new = new_modules(model, told["missing_keys"], str(path))
    size, channels = _transformers_size(model.config, config)
    return OpenedVision(model, size, channels, input_statistics(model, channels), new=new)


def _require_classifier(model: Any, path: Path) -> None:
    if not model_heads(model):
        raise UnsuitableModelError(
            f"{path} holds a {type(model).__name__}, which has no head for classes: expected a model that "
            "transformers' AutoModelForImageClassification makes"
        )


def _transformers_size(known: Any, config: VisionConfig) -> tuple[int, int]:
    size, patch = (
        found[0] if isinstance(found := getattr(known, name, None), list | tuple) else found
        for name in ("image_size", "patch_size")
    )
    size = size or 224
    return _chosen_size(config, size, patch), int(getattr(known, "num_channels", None) or 3)


def _chosen_size(config: VisionConfig, own: int, patch: int | None) -> int:
    """As asked; else that of the set, where it cuts into enough patches; else what the model was made for."""
    if config.image_size is not None:
        if config.image_size % (patch or 1):
            raise InvalidArgumentError(
                f"image_size={config.image_size}: {config.model} cuts images into patches of {patch} pixels; expected "
                "a multiple of that"
            )
        return config.image_size
    size = _SIZES.get(config.sets, own)
    is_enough = patch is not None and size % patch == 0 and (size // patch) ** 2 >= FEWEST_TOKENS
    return size if is_enough else own
