"""Saving a changed model and loading it again: weights and recipe in one safetensors file."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from wellposed.errors import InvalidArgumentError, ModelFileError, UnsuitableModelError
from wellposed.families import unwrapped
from wellposed.recipes.origins import build, origin
from wellposed.recipes.recipe import check_same_changes, recipe, replay, take_provenance
from wellposed.runs import atomic_path, device_named, write_json

Model = TypeVar("Model", bound=nn.Module)

# Not the names timm and transformers look for: their loaders know no recipe and would build another model.
WEIGHTS, READABLE = "wellposed.safetensors", "wellposed.json"
FORMAT_VERSION = 1
_HEADER = "wellposed"
_LAYER_COUNTS = ("depth", "num_hidden_layers", "n_layer")


def save(model: nn.Module, folder: str | os.PathLike[str], model_args: dict[str, Any] | None = None) -> Path:
    """Write `model` into `folder`, so that `load` can build it again, and return the folder.

    `wellposed.safetensors` holds the weights and, in its header, what the model is and its recipe;
    `wellposed.json` is a copy of that header for people to read. Old files stay until the new ones are whole. Of a
    transformers model, the attention implementation and the generation config are not kept.

    Args:
        model: a timm or HuggingFace transformers model.
        folder: made where it does not exist.
        model_args: arguments of timm.create_model that made the model; only needed where they cannot be read off it,
            which is checked before anything is written.
    """
    return write(model, folder, describe(model, model_args))


def describe(model: nn.Module, model_args: dict[str, Any] | None = None) -> dict[str, Any]:
    """What `save` writes beside the weights; raises UnsuitableModelError where the model could not be built again."""
    model = unwrapped(model)
    _check_savable(model)
    return {"format": FORMAT_VERSION, "model": origin(model, model_args), "recipe": recipe(model)}


def write(model: nn.Module, folder: str | os.PathLike[str], header: dict[str, Any]) -> Path:
    """Write `model`, which `header` describes, into `folder`: `save` for one that is saved again and again."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ModelFileError(f"{folder} is a file; expected a folder, or a name that is free")
    with atomic_path(folder / WEIGHTS) as temporary:
        save_model(unwrapped(model), str(temporary), metadata={"format": "pt", _HEADER: json.dumps(header)})
    write_json(folder / READABLE, header)
    return folder


def load(
    folder: str | os.PathLike[str], model: Model | None = None, device: torch.device | str | None = None
) -> nn.Module | Model:
    """The model saved in `folder`, built again with its recipe, in eval mode; or its weights, loaded into `model`.

    A fresh model is put on `device`, the CPU if None. A given `model` must change its forward as the saved recipe does
    (RecipeMismatchError) and have the saved keys and shapes; nothing is loaded otherwise. Its device, dtype and mode
    stay.

    Nothing in the file is executed: weights are read as safetensors, models are built only from names that the
    installed timm and transformers know, and nothing is downloaded.
    """
    if model is not None and device is not None:
        raise InvalidArgumentError(f"device={device!r} with a model: its weights stay where they are; give only one")
    place = device_named(str(device or "cpu"))
    path = _weights_file(Path(folder))
    header, tensors, shared = _read(path)
    if model is not None:
        target = unwrapped(model)
        check_same_changes(target, header["recipe"], str(path))
        _check_fit(target, tensors, path)
        target.load_state_dict(tensors)
        take_provenance(target, header["recipe"])
        return model
    # Before time and memory go into a model the file may only claim to hold.
    size = max(2**21, sum(tensor.numel() for tensor in tensors.values()))
    _check_numbers(header.get("model"), size, layers=len(tensors))
    with torch.device("meta"), _at_most_parameters(2 * len(tensors) + 64):
        _check_fit(_changed(header), tensors, path)
    fresh = _changed(header)
    _tie(fresh, shared)
    _cast_like(fresh, tensors)
    fresh.load_state_dict(tensors)
    return fresh.to(place).eval()


def _check_savable(model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor) or tensor.is_meta or hasattr(tensor, "full_tensor"):
            kind = "on the meta device" if getattr(tensor, "is_meta", False) else f"a {type(tensor).__name__}"
            raise UnsuitableModelError(
                f"cannot save {name}: it is {kind}, not a tensor with values. "
                "Save the model before it is quantized or sharded, and after it is materialized."
            )


def _changed(header: dict[str, Any]) -> nn.Module:
    model = build(header.get("model"))
    replay(model, header["recipe"])
    return model


def _check_numbers(described: Any, size: int, layers: int) -> None:
    """Raise where a whole number anywhere in `described` is larger than what such a file could mean."""
    if not isinstance(described, dict | list):
        return
    for key, value in described.items() if isinstance(described, dict) else enumerate(described):
        limit = layers if key in _LAYER_COUNTS else size
        if isinstance(value, int) and value > limit:
            raise ModelFileError(f"the file describes a model with {key}={value}, far more than it holds; not used")
        _check_numbers(value, size, layers)


@contextmanager
def _at_most_parameters(limit: int) -> Iterator[None]:
    """Stop the making of a model that would have more parameters than this."""
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > limit:
            raise ModelFileError(f"the file describes over {limit} parameters, far more than it holds; not used")

    handle = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


def _weights_file(path: Path) -> Path:
    file = path / WEIGHTS if path.is_dir() else path
    if not file.is_file():
        raise ModelFileError(f"{file} does not exist; expected a folder that wellposed.save wrote")
    return file


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
    """The header, all weights, and for each weight that was tied to another the name it is stored under."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path} is not a whole safetensors file ({error}); save the model again") from error
    if _HEADER not in metadata:
        raise ModelFileError(f"{path} holds weights but no wellposed header; load it with the library that wrote it")
    shared = {name: stored for name, stored in metadata.items() if stored in tensors and name not in tensors}
    tensors |= {name: tensors[stored] for name, stored in shared.items()}
    return _parsed_header(metadata[_HEADER], path), tensors, shared


def _parsed_header(text: str, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"the wellposed header of {path} is not JSON ({error}); save the model again") from error
    version = header.get("format") if isinstance(header, dict) else None
    if version != FORMAT_VERSION or not isinstance(header.get("recipe"), list):
        raise ModelFileError(
            f"the wellposed header of {path} has format {version!r}, expected {FORMAT_VERSION} with a recipe. "
            "If a newer wellposed wrote it, upgrade."
        )
    return header


def _check_fit(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Raise unless `tensors` has exactly the keys and shapes of `model`."""
    expected = model.state_dict()
    problems = [f"missing {name}" for name in expected.keys() - tensors.keys()]
    problems += [f"unexpected {name}" for name in tensors.keys() - expected.keys()]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, expected {tuple(expected[name].shape)}"
        for name in expected.keys() & tensors.keys()
        if tensors[name].shape != expected[name].shape
    ]
    problems += [
        f"{name} is {tensors[name].dtype}, expected {expected[name].dtype}"
        for name in expected.keys() & tensors.keys()
        if not _interchangeable(tensors[name].dtype, expected[name].dtype)
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ModelFileError(f"the weights in {path} do not fit {type(model).__name__}: {shown}")


def _interchangeable(ours: torch.dtype, theirs: torch.dtype) -> bool:
    floating = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return ours == theirs or (ours in floating and theirs in floating)


def _tie(model: nn.Module, shared: dict[str, str]) -> None:
    """Make one parameter of those that were one when the model was saved."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, stored in shared.items():
        if parameters.keys() >= {name, stored} and parameters[name] is not parameters[stored]:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, parameters[stored])


def _cast_like(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in tensors:
            tensor.data = tensor.data.to(tensors[name].dtype)
