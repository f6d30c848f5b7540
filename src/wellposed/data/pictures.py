"""Pictures as their owners have them on disk: of any size and kind, some of them broken."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor

from wellposed.errors import DataError

T = TypeVar("T")
_KINDS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}


def read_picture(path: Path, *, upright: bool = False) -> Tensor:
    """The picture as uint8 (3, height, width); grey and 16-bit ones, palettes and transparency (on white) included.

    Pixels are as they are stored, as annotations have them; `upright` turns them as a camera has noted.
    """
    from PIL import Image, ImageOps
    from torchvision.transforms.v2.functional import pil_to_tensor

    try:
        with Image.open(path) as file:
            picture = ImageOps.exif_transpose(file) if upright else file
            if picture.mode.startswith("I") or picture.mode == "F":  # PIL would clip these at 255
                return _eight_bits(pil_to_tensor(picture).double(), picture.mode).expand(3, -1, -1).contiguous()
            if picture.mode in {"RGBA", "LA", "PA"} or "transparency" in picture.info:
                picture = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
            return pil_to_tensor(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as a picture: {error}") from error


def picture_files(given: Sequence[Path]) -> list[Path]:
    """The files among `given`, and the pictures in the folders among them, in the order of their names."""
    found: list[Path] = []
    for path in given:
        if not path.exists():
            raise DataError(f"{path}: there is no such file or folder")
        inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in _KINDS) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path}: there is no picture in this folder ({', '.join(sorted(_KINDS))})")
        found += inside
    return found


def _eight_bits(values: Tensor, mode: str) -> Tensor:
    """Grey values in 8 bits; 32-bit ones are taken to lie in 0 to 1, 0 to 255 or 0 to 65535, whichever they fit."""
    if not values.isfinite().all():
        raise ValueError("it holds NaN or Inf")
    tops = [65535.0] if mode.startswith("I;16") else [1.0, 255.0, 65535.0]
    top = next((top for top in tops if values.max() <= top), float(values.max()))
    return (values.clamp(min=0) / top * 255).round().to(torch.uint8)


@dataclass
class Readings:
    """Reads one thing after the other, and either ends at the first that cannot be read or names, counts and skips."""

    on_error: Literal["raise", "skip"] = "raise"
    problems: list[str] = field(default_factory=list)
    """What was wrong with each thing that was skipped, with its name."""

    def read(self, reader: Callable[[], T]) -> T | None:
        """What `reader` returns; None where it fails and that is to be skipped."""
        try:
            return reader()
        except DataError as error:
            if self.on_error == "raise":
                raise
            self.problems.append(str(error))
            return None
