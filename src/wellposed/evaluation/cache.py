"""Features kept on disk between commands: files found by a hash of all that they depend on, per model, set and layer.

The file's header holds what was hashed, so that a file which is damaged, or is not what its name says, is noticed and
made again. Files are there as a whole or not at all, so several processes may share a folder.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from wellposed.data import Dataset, ImageSet
from wellposed.errors import RunError, WellposedError
from wellposed.evaluation.backbones import Backbone
from wellposed.evaluation.extraction import Pool, extract, open_for
from wellposed.evaluation.features import Kind, chosen_layers
from wellposed.evaluation.labelled import Labelled
from wellposed.families import trunk
from wellposed.runs import atomic_path

FORMAT_VERSION = 2
_HEADER = "wellposed features"
T = TypeVar("T")


def set_features(
    backbone: Backbone,
    spec: str,
    split: str,
    layers: Sequence[int] | None = (-1,),
    *,
    kind: Kind = "tokens",
    pool: Pool = "summary",
    batch_size: int = 64,
    workers: int = 4,
    on_error: Literal["raise", "skip"] = "raise",
    cache: Path | None = None,
) -> dict[int, Labelled]:
    """`extract` for the `split` of the set that `spec` names; read from the folder `cache` where it has been done.

    The key of a file is the model's weights, recipe and settings, the images and labels themselves (of a folder of
    pictures: names, sizes and times of change), size and normalization, layer, kind and pool. Neither the batch size
    nor the device is part of it: features differ by rounding there.
    """
    data = open_for(backbone, spec, split)
    chosen = list(dict.fromkeys(chosen_layers(len(trunk(backbone.model).blocks), layers)))
    options: dict[str, Any] = {"kind": kind, "pool": pool, "on_error": on_error}
    options |= {"batch_size": batch_size, "workers": workers}
    if cache is None:
        return extract(backbone, data, chosen, **options)
    keys = _keys(backbone, data, spec, split, chosen, {"kind": kind, "pool": pool, "on_error": on_error})
    found = {layer: read_cached(cache, key, _labelled) for layer, key in keys.items()}
    missing = [layer for layer, features in found.items() if features is None]
    if missing:
        made = extract(backbone, data, missing, **options)
        for layer in missing:
            tensors = {"features": made[layer].features_ND, "labels": made[layer].labels_N}
            write_cached(cache, keys[layer], {name: each.contiguous() for name, each in tensors.items()})
        found |= made
    return {layer: features for layer, features in found.items() if features is not None}


def data_fingerprint(data: Dataset, spec: str) -> str:
    """A hash of the images and labels of a set in memory; of a folder's files by their names, sizes and times."""
    digest = hashlib.sha256(json.dumps([data.name, data.classes, data.image_shape, len(data)]).encode())
    if isinstance(data, ImageSet):
        for tensor in (data.images, data.labels):
            digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
    digest.update(folder_fingerprint(spec.partition(":")[2]).encode())
    return digest.hexdigest()


def folder_fingerprint(folder: str) -> str:
    """A hash of the names, sizes and times of change of the files in a folder; nothing for none."""
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()) if folder else []:
        about = path.stat()
        digest.update(f"{path.relative_to(folder)} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def cache_file(folder: Path, key: dict[str, Any]) -> Path:
    """Where the features of `key` lie, if they do."""
    return folder / f"features-{hashlib.sha256(_text(key).encode()).hexdigest()[:24]}.safetensors"


def _keys(
    backbone: Backbone, data: Dataset, spec: str, split: str, layers: Sequence[int], choices: dict[str, str]
) -> dict[int, dict[str, Any]]:
    shared = {
        "format": FORMAT_VERSION,
        "model": backbone.fingerprint,
        "data": spec.partition(":")[0],
        "split": split,
        "content": data_fingerprint(data, spec),
        "transform": {
            "size": backbone.image_size,
            "resampling": "bicubic, antialiased",
            "mean": backbone.mean.flatten().tolist(),
            "std": backbone.std.flatten().tolist(),
        },
        **choices,
        "dtype": "float32",
    }
    return {layer: {**shared, "layer": layer} for layer in layers}


def _labelled(tensors: dict[str, Tensor]) -> Labelled:
    return Labelled.checked("cache", tensors["features"], tensors["labels"])


def _text(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def read_cached(folder: Path, key: dict[str, Any], made: Callable[[dict[str, Tensor]], T]) -> T | None:
    """What is `made` of the tensors of `key`; None where there is no file, or it is damaged, which is said."""
    path = cache_file(folder, key)
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get(_HEADER) != _text(key):
                raise RunError("it holds other features than its name says")
            return made({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, KeyError, ValueError, WellposedError) as error:
        reason = " ".join(str(error).split())[:200]
        print(f"wellposed: {path} cannot be used ({reason}); its features are computed again", file=sys.stderr)
        return None


def write_cached(folder: Path, key: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Keep the tensors of `key`."""
    try:
        with atomic_path(cache_file(folder, key)) as temporary:
            save_file(tensors, temporary, metadata={_HEADER: _text(key)})
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot write to cache={folder} ({error}); make room, or choose another folder") from error
