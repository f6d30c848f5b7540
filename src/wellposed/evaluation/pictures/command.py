"""`wellposed evaluate pca`: patch features as pictures."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from wellposed.errors import InvalidArgumentError
from wellposed.evaluation.command import ON_DISK

if TYPE_CHECKING:
    from wellposed.evaluation.pictures.showing import PcaResult


@dataclass(frozen=True, kw_only=True)
class PcaConfig:
    """Patch features as pictures: three principal components of a layer as red, green and blue."""

    model: str
    """A timm name, a folder of wellposed's, a run or one of its checkpoints, a HuggingFace folder, or features:FOLDER
    with patch features of the images that are beside them."""
    other: str | None = None
    """Another model, shown beside it in the same colours; or features:FOLDER of the same images."""
    images: tuple[Path, ...] = ()
    """Pictures, or folders of them. Each is cropped at its centre to a square and resized."""
    data: str | None = None
    """Look at test images of this set instead: digits, cifar10:PATH, folder:PATH, ...; shapes if neither is given."""
    count: int = 8
    """At most so many images, from all over what is given."""
    on_error: Literal["raise", "skip"] = "raise"
    """What to do with a picture that cannot be read: end, or name it, count it and go on."""
    layers: tuple[int, ...] | None = None
    """Blocks, counted from 0, negative ones from the end; four from all over the model if None."""
    kind: Literal["tokens", "keys"] = "tokens"
    """Show the outputs of the blocks, or the keys of their attention."""
    foreground: bool = False
    """Leave out what lies on the edge's side of the last layer's first component."""
    upsampling: Literal["nearest", "bicubic"] = "nearest"
    """Show every patch as a square, or smoothly."""
    out: Path | None = None
    """Folder for pca.png and pca.html; one under runs/ named after the model if None."""
    checkpoint: Path | None = None
    """Weights of a timm model, .safetensors or torch's; without, it is at its initialization."""
    other_checkpoint: Path | None = None
    """Likewise of the other model."""
    model_args: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Further arguments of timm.create_model, such as img_size 32 patch_size 4."""
    other_args: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Likewise of the other model."""
    image_size: int | None = None
    """Pixels a side; the model's own if None."""
    batch_size: int = 64
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    seed: int = 0
    """Of the initialization, where a model has no weights."""

    def run(self) -> "PcaResult":
        """Look at the images through the model, or both, and write the sheet and the page."""
        from wellposed.evaluation.pictures.showing import shown

        self.check()
        return shown(self)

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        if self.images and self.data is not None:
            raise InvalidArgumentError(f"images and data={self.data!r}: expected one of them")
        for name in ("count", "batch_size"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.other is None and (self.other_checkpoint is not None or self.other_args):
            raise InvalidArgumentError("other_checkpoint and other_args: expected them with --other, the model's name")
        stored = [source.startswith(ON_DISK) for source in (self.model, self.other) if source is not None]
        if any(stored):
            settled = ("images", "data", "layers", "image_size", "checkpoint", "model_args")
            given = [name for name in settled if getattr(self, name) not in (None, (), {})]
            if given or not all(stored) or self.kind != "tokens":
                what = ", ".join(given) or ("model and other" if not all(stored) else "kind")
                raise InvalidArgumentError(f"{what}: features on disk are shown as they are, and beside others on disk")
        if self.image_size is not None and self.image_size < 1:
            raise InvalidArgumentError(f"image_size={self.image_size}: expected at least 1")
        if self.layers is not None and not self.layers:
            raise InvalidArgumentError("layers: expected at least one block, or none named for four of them")
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise InvalidArgumentError(f"out={self.out} is a file; expected a folder, or a name that is free")
