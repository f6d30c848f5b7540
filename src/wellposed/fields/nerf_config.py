"""What fitting a scene is, as data: the flags of `wellposed fit nerf`, the arguments of `fit_nerf`."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from wellposed.fields.config import FieldConfig
from wellposed.training.settings import require

OCTAVES, VIEW_OCTAVES = 10, 4


def encoded_width(octaves: int) -> int:
    """Numbers in the encoding of a place or direction: x, and sine and cosine of each octave of it."""
    return 3 + 6 * octaves


@dataclass(frozen=True, kw_only=True)
class NerfConfig(FieldConfig):
    """A scene as a network from place and direction to density and colour (arXiv 2003.08934)."""

    name: ClassVar[str] = "nerf"
    scores: ClassVar[tuple[str, ...]] = ("psnr", "ssim")

    data: Annotated[str, tyro.conf.Positional] = ""
    """The folder of a scene: Blender synthetic (transforms_train.json) or LLFF (poses_bounds.npy)."""
    steps: int = 8000
    log_every: int = 100
    """Steps between two lines of metrics."""
    lr: float = 8e-3
    """Highest learning rate; it rises in the first steps and falls to 0 along a cosine. Chosen on Lego with grid."""
    bf16: bool = True
    """On a GPU, products in bfloat16; what is rendered from them, and the sine of a sine layer, stay in float32."""
    compile: bool = True
    """On a GPU, torch.compile."""
    downscale: int = 1
    """Pixels a side of which one is made."""
    held_out: Literal["test", "val"] = "test"
    """Views of a Blender scene that are tested on; of an LLFF scene, every 8th."""
    test_views: int = 0
    """How many of the held-out views are rendered in a test, spread over all of them; 0 for all."""
    sampler: Literal["grid", "hierarchical"] = "grid"
    """grid: empty and hidden space is left out. hierarchical: the original's coarse and fine network."""
    samples: int = 2**18
    """Places of a step at which the network is asked."""
    rays: int = 2**14
    """Of a step, with grid; those that --samples has no room for are left out. With hierarchical they follow."""
    pieces: int = 256
    """Into which a ray is cut within the box, with grid."""
    cells: int = 128
    """Of the grid, a side."""
    box: float = 1.5
    """Half a side of the cube around the origin in which a Blender scene lies, with grid."""
    coarse: int = 64
    """Places along a ray for the coarse network, with hierarchical."""
    fine: int = 128
    """Further places for the fine one."""
    frames: int = 40
    """Of turntable.gif; 0 for none."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        super().check()
        for name in ("downscale", "rays", "fine"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("test_views", "frames"):
            require(self, name, getattr(self, name) >= 0, "0 or more")
        require(self, "cells", 4 <= self.cells <= 512, "4 to 512")
        require(self, "pieces", 2 <= self.pieces <= 4096, "2 to 4096")
        require(self, "box", 0 < self.box < math.inf, "a number above 0")
        require(self, "coarse", self.coarse >= 4, "at least 4")
        require(self, "width", self.width >= 2, "at least 2")
        # Whole rays must fit: one cut into pieces, or one of the hierarchical places.
        least = self.pieces if self.sampler == "grid" else self.places
        require(self, "samples", least <= self.samples < 2**31, f"{least} to 2^31, so that a ray fits")
        if self.kind != "full":
            most = min(encoded_width(OCTAVES), self.width // 2)
            require(self, "rank", self.rank <= most, f"at most {most}, the narrowest side of a layer")

    @property
    def places(self) -> int:
        """At which the networks are asked along a ray, with hierarchical."""
        return 2 * self.coarse + self.fine
