"""Patch features on disk, in place of a model: what `discover`, `segment` and `pca` take as features:FOLDER.

The folder holds test.safetensors, and train.safetensors where something is trained. In each there is one tensor
(N, rows, columns, D) per layer, of any name, and beside them, where the command needs it:

    masks   (N, H, W)      integers: the class of each pixel, 255 for none
    boxes   (N, K, 4)      left, top, right, bottom in pixels, the last two exclusive; one without area is none
    size    (2,)           integers: height and width of the images in which the boxes are
    images  (N, 3, H, W)   uint8: the images themselves, to be shown
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from wellposed.errors import DataError
from wellposed.evaluation.labelled import by_number

_BESIDE = {"masks": "(N, H, W)", "boxes": "(N, K, 4)", "size": "(2,)", "images": "(N, 3, H, W)"}


@dataclass(frozen=True)
class StoredPatches:
    """The features of N images, and what lies beside them."""

    layers: dict[str, Tensor]
    """By name, (N, rows, columns, D)."""
    beside: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.layers.values())))


def read_patches(folder: Path, split: str, *needed: str) -> StoredPatches:
    """The features of a split, with at least those tensors beside them that are `needed`."""
    path = folder / f"{split}.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); expected a tensor (N, rows, columns, D) per layer{_and(needed)}"
        ) from error
    beside = {name: tensors.pop(name) for name in _BESIDE if name in tensors}
    missing = [name for name in needed if name not in beside]
    if missing or not tensors:
        raise DataError(
            f"{path} holds {', '.join([*tensors, *beside]) or 'nothing'}; expected features{_and(missing or needed)}"
        )
    count = len(next(iter(tensors.values())))
    for name, layer in tensors.items():
        if layer.ndim != 4 or len(layer) != count or not layer.numel() or not layer.is_floating_point():
            raise DataError(
                f"{path}: {name} is {layer.dtype} {tuple(layer.shape)}, expected floating point "
                f"({count}, rows, columns, D)"
            )
        if not layer.isfinite().all():
            raise DataError(f"{path}: {name} holds NaN or Inf")
    for name, tensor in beside.items():
        _check_beside(path, name, tensor, count)
    return StoredPatches({name: tensors[name] for name in sorted(tensors, key=by_number)}, beside)


def _check_beside(path: Path, name: str, tensor: Tensor, count: int) -> None:
    kinds = {"masks": not tensor.is_floating_point(), "size": not tensor.is_floating_point()}
    kinds |= {"images": tensor.dtype == torch.uint8}
    shapes = {"masks": 3, "boxes": 3, "size": 1, "images": 4}
    fits = tensor.ndim == shapes[name] and kinds.get(name, True) and len(tensor) == (2 if name == "size" else count)
    fits &= (name != "boxes" or tensor.shape[-1] == 4) and (name != "images" or tensor.shape[1:2] == (3,))
    if not fits:
        raise DataError(
            f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected {_BESIDE[name]} with N = {count}"
            f"{', uint8' if name == 'images' else '' if name == 'boxes' else ', integers'}"
        )


def _and(names: tuple[str, ...] | list[str]) -> str:
    return "".join(f", and {name} {_BESIDE[name]}" for name in names)
