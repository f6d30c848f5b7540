"""Models and inputs from what a command line can say: a name, a folder, a file, a picture, a text."""

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wellposed.models  # noqa: F401  # registers its names with timm
from wellposed.data import make_shapes, open_data, sampled_images, usual_statistics
from wellposed.data.pictures import picture_files, read_picture
from wellposed.diagnosis.diagnose import Inputs
from wellposed.errors import DataError, InvalidArgumentError, ModelFileError
from wellposed.families import blocks
from wellposed.recipes import WEIGHTS, dino_names, load, replay

_PREPROCESSOR = "preprocessor_config.json"


def open_model(source: str, checkpoint: Path | None = None, model_args: Mapping[str, Any] | None = None) -> nn.Module:
    """The model that `source` names; nothing is downloaded, and nothing in a file is executed.

    Args:
        source: a folder that wellposed.save or `wellposed train` wrote, a folder with a HuggingFace model in
            safetensors, a .gguf file, or the name of a timm model.
        checkpoint: weights for a timm model, .safetensors or torch's; without, it is at its initialization.
        model_args: further arguments of timm.create_model.
    """
    path = Path(source)
    if path.exists() and (checkpoint is not None or model_args):
        raise InvalidArgumentError(f"{source} has its own weights and settings: leave checkpoint and model_args out")
    if path.is_dir() and (path / WEIGHTS).exists():
        return load(path)
    if path.is_dir() or path.suffix == ".gguf":
        return _transformers_model(path)
    return _timm_model(source, checkpoint, dict(model_args or {}))


def open_inputs(
    model: nn.Module,
    source: str,
    *,
    images: Sequence[Path] = (),
    data: str | None = None,
    text: str | None = None,
    count: int = 16,
) -> Inputs:
    """At most `count` inputs for `model` from `images`, `data` or `text`; generated pictures if none is given."""
    if count < 1:
        raise InvalidArgumentError(f"count={count}: expected at least 1")
    if sum([bool(images), data is not None, text is not None]) > 1:
        raise InvalidArgumentError("image, data and text: expected one of them")
    if text is not None:
        return text_inputs(source, text, count)
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        raise InvalidArgumentError(f"{source} takes no images: give it a --text, or a file that holds one")
    return picture_inputs(model, images, count) if data is None else data_inputs(data, count)


def picture_inputs(model: nn.Module, files: Sequence[Path], count: int) -> Tensor:
    """The pictures, or the pictures in the folders, among `files` as `model` takes them: (B, C, size, size)."""
    from torchvision.transforms import v2

    if not files:
        size = made_for_size(model)
        pictures = [image / 255 for image in make_shapes(count, size, seed=1).images]
    else:
        crop = v2.Compose([v2.Resize(made_for_size(model), antialias=True), v2.CenterCrop(made_for_size(model))])
        pictures = []
        for file in picture_files(files)[:count]:
            pictures.append(crop(read_picture(file, upright=True)) / 255)
    images = torch.stack(pictures)
    if next(module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)) == 1:
        images = images.mean(1, keepdim=True)
    mean, std = input_statistics(model, images.shape[1])
    return (images - mean) / std


def data_inputs(spec: str, count: int) -> Tensor:
    """Images from all over the test set that `spec` names, normalized as in training."""
    train, test = (open_data(spec, split) for split in ("train", "test"))
    return sampled_images(train, test, count)[0]


def text_inputs(source: str, text: str, count: int, length: int = 128) -> dict[str, Tensor]:
    """`text`, or what the file of that name holds, as at most `count` rows of `length` tokens of the model's own."""
    from transformers import AutoTokenizer

    path, file = Path(source), Path(text)
    if len(text) < 256 and file.exists():
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"text={text}: this file cannot be read as text: {error}") from error
    named = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if named else path
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **named)
    except (OSError, ValueError, KeyError) as error:
        raise ModelFileError(f"{source} has no tokenizer that can be read: {error}") from error
    ids = torch.tensor(tokenizer(text[: 32 * length * count])["input_ids"])
    if not len(ids):
        raise InvalidArgumentError("text is empty: expected a sentence at least")
    rows = ids[None] if len(ids) < length else ids[: len(ids) // length * length].view(-1, length)
    return {"input_ids": rows[:count]}


def _transformers_model(path: Path) -> nn.Module:
    try:
        from transformers import AutoModel
    except ModuleNotFoundError as error:
        raise ModelFileError(f"{path}: reading it needs transformers (pip install transformers)") from error
    if not path.exists():
        raise ModelFileError(f"{path} does not exist; expected a folder with a model, a .gguf file or a timm name")
    try:
        if path.suffix == ".gguf":
            return AutoModel.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        options = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
        model, told = AutoModel.from_pretrained(path, output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelFileError(f"{path} cannot be read as a model: {' '.join(str(error).split())[:300]}") from error
    inside = [key for key in told["missing_keys"] if any(key.startswith(f"{block.name}.") for block in blocks(model))]
    if inside:
        raise ModelFileError(f"{path} lacks {len(inside)} weights of the model's blocks, such as {sorted(inside)[0]}")
    return model


def _timm_model(name: str, checkpoint: Path | None, model_args: dict[str, Any]) -> nn.Module:
    import timm

    if not timm.is_model(name.partition(".")[0]):
        close = difflib.get_close_matches(name, timm.list_models(), 3)
        raise InvalidArgumentError(
            f"model={name!r}: expected a folder with a model, a .gguf file or a timm model"
            + (f" such as {', '.join(close)}" if close else "")
        )
    if checkpoint is None:
        return _created(name, model_args)
    if not checkpoint.is_file():
        raise ModelFileError(f"checkpoint={checkpoint}: there is no such file")
    try:
        with torch.serialization.safe_globals(dino_names.PLAIN):
            state = timm.models.load_state_dict(str(checkpoint), use_ema=False, weights_only=True)
        changes = dino_names.recipe_of(state)
        state = dino_names.from_dino(state)[0] if "teacher" in state else state
    except Exception as error:  # whatever a broken or hostile file makes the reader raise
        raise ModelFileError(f"{checkpoint} cannot be read as weights: {' '.join(str(error).split())[:300]}") from error
    heads = [len(value) for key, value in state.items() if key in {"head.weight", "head.fc.weight", "fc.weight"}]
    model = _created(name, {"num_classes": heads[0] if heads else 0, **model_args})
    replay(model, changes)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ModelFileError(f"the weights in {checkpoint} do not fit {name}: {_first_lines(error)}") from error
    return model


def _created(name: str, model_args: dict[str, Any]) -> nn.Module:
    import timm

    try:
        return timm.create_model(name, **model_args)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise InvalidArgumentError(f"model={name!r} cannot be made with {model_args}: {error}") from error


def _first_lines(error: Exception) -> str:
    return " ".join(" ".join(str(error).splitlines()[1:3]).split())[:300]


def input_statistics(model: Any, channels: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation that the model was trained with, where it says so; else the usual ones."""
    settings = getattr(model, "pretrained_cfg", None) or {}
    folder = Path(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    if (folder / _PREPROCESSOR).is_file():
        try:
            read = json.loads((folder / _PREPROCESSOR).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelFileError(f"{folder / _PREPROCESSOR} is not JSON: {error}") from error
        settings = {"mean": read.get("image_mean"), "std": read.get("image_std")}
    if all(len(settings.get(name) or ()) == channels for name in ("mean", "std")):
        return torch.tensor(settings["mean"]).view(-1, 1, 1), torch.tensor(settings["std"]).view(-1, 1, 1)
    return usual_statistics(channels)


def made_for_size(model: Any) -> int:
    """Pixels a side of the images that `model` was made for; 224 where it does not say."""
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)  # timm's ViT
    size = size or getattr(getattr(model, "config", None), "image_size", None)  # transformers' ViT
    size = size or ((getattr(model, "pretrained_cfg", None) or {}).get("input_size") or (0, 0))[1]  # timm's others
    return (size[0] if isinstance(size, tuple | list) else size) or 224
