"""What fitting an image is, as data: the flags of `wellposed fit image`, the arguments of `fit_image`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from wellposed.fields.config import FieldConfig
from wellposed.training.settings import require


@dataclass(frozen=True, kw_only=True)
class ImageConfig(FieldConfig):
    """A picture as a network from places to colours."""

    name: ClassVar[str] = "image"
    scores: ClassVar[tuple[str, ...]] = ("psnr", "ssim")

    data: Annotated[str, tyro.conf.Positional] = ""
    """The picture: grey or colour, 8 bits, without transparency."""
    activation: Literal["gauss", "siren", "relu-fourier"] = "gauss"
    scale: float | None = None
    """Sigma of gauss, frequency of siren, standard deviation of the Fourier features; 0.1, 30 and 5 if None."""
    depth: int = 2
    """Hidden width x width layers."""
    fraction: float = 0.25
    """Of the pixels, chosen at random, that are trained on; PSNR and SSIM are of all."""
    batch_size: int = 2**16
    """Pixels of a step, at most; drawn anew each time where there are more."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        super().check()
        for name in ("depth", "batch_size"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        require(self, "fraction", 0 < self.fraction <= 1, "a number above 0, at most 1")
        require(self, "scale", self.scale is None or self.scale > 0, "a number above 0")
        even = self.activation != "relu-fourier" or self.width % 2 == 0
        require(self, "width", even, "an even number: Fourier features come as sine and cosine")
