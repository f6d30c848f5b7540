"""A model that keeps the patch features of every picture it has seen on disk, and takes from there what it has seen.

A file per picture, found by a hash of its pixels as the model gets them and of all else that its features depend on.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import DataError
from wellposed.evaluation.backbones import Backbone
from wellposed.evaluation.cache import FORMAT_VERSION, read_cached, write_cached
from wellposed.evaluation.features import Kind, LayerFeatures, chosen_layers
from wellposed.families import trunk


@dataclass(frozen=True)
class Remembering(Backbone):
    """A `Backbone` whose `features` are kept in the folder `cache`."""

    cache: Path

    def features(
        self, images_BCHW: Tensor, layers: Sequence[int] | None = (-1,), kind: Kind = "tokens"
    ) -> list[LayerFeatures]:
        """`Backbone.features`, of which only those pictures go through the model that have not yet."""
        if images_BCHW.dtype != torch.uint8 or images_BCHW.ndim != 4:
            return super().features(images_BCHW, layers, kind)  # which says what is wrong
        chosen = chosen_layers(len(trunk(self.model).blocks), layers)
        keys = [self._key(image_CHW, chosen, kind) for image_CHW in images_BCHW]
        found = [read_cached(self.cache, key, _from_tensors) for key in keys]
        missing = [number for number, one in enumerate(found) if one is None]
        if missing:
            made = super().features(images_BCHW[missing], chosen, kind)
            for place, number in enumerate(missing):
                own = slice(place, place + 1)
                new = [LayerFeatures(one.patches_BND[own], one.grid, one.summary_BD[own]) for one in made]
                write_cached(self.cache, keys[number], _to_tensors(new))
                found[number] = new
        known = [one for one in found if one is not None]
        return [self._joined(each) for each in zip(*known, strict=True)]

    def _key(self, image_CHW: Tensor, layers: Sequence[int], kind: str) -> dict[str, Any]:
        device = self.device.type
        autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off"
        return {
            "format": FORMAT_VERSION,
            "model": self.fingerprint,
            "pixels": hashlib.sha256(image_CHW.cpu().contiguous().numpy().tobytes()).hexdigest(),
            "shape": list(image_CHW.shape),
            "mean": self.mean.flatten().tolist(),
            "std": self.std.flatten().tolist(),
            "layers": list(layers),
            "kind": kind,
            "autocast": autocast,
        }

    def _joined(self, each: Sequence[LayerFeatures]) -> LayerFeatures:
        patches, summaries = ([one.patches_BND for one in each], [one.summary_BD for one in each])
        patches_BND, summary_BD = (
            torch.cat([part.to(self.device) for part in parts]) for parts in (patches, summaries)
        )
        return LayerFeatures(patches_BND, each[0].grid, summary_BD)


def _to_tensors(layers: Sequence[LayerFeatures]) -> dict[str, Tensor]:
    tensors = {}
    for number, one in enumerate(layers):
        tensors[f"{number}.patches"] = one.patches_BND.cpu().contiguous()
        tensors[f"{number}.summary"] = one.summary_BD.cpu().contiguous()
        tensors[f"{number}.grid"] = torch.tensor(one.grid)
    return tensors


def _from_tensors(tensors: dict[str, Tensor]) -> list[LayerFeatures]:
    found = []
    for number in range(len(tensors) // 3):
        patches, summary, grid = (tensors[f"{number}.{name}"] for name in ("patches", "summary", "grid"))
        rows, columns = grid.tolist()
        if patches.ndim != 3 or patches.shape[1] != rows * columns or not patches.isfinite().all():
            raise DataError(f"it holds {tuple(patches.shape)} for {rows} x {columns} patches, or numbers not finite")
        found.append(LayerFeatures(patches, (rows, columns), summary))
    return found
