"""What fitting a shape is, as data: the flags of `wellposed fit occupancy`, the arguments of `fit_occupancy`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro

from wellposed.fields.config import FieldConfig
from wellposed.training.settings import require


@dataclass(frozen=True, kw_only=True)
class OccupancyConfig(FieldConfig):
    """A solid as a network from places to inside or outside, with the paper's layers (arXiv 2403.19243)."""

    name: ClassVar[str] = "occupancy"
    scores: ClassVar[tuple[str, ...]] = ("iou",)

    data: Annotated[str, tyro.conf.Positional] = ""
    """A mesh without holes: .obj, .ply, .stl or .off."""
    repair: bool = False
    """Close the holes of the mesh instead of refusing it."""
    sigma: float = 0.1
    """Of the Gaussian activation."""
    depth: int = 2
    """Hidden width x width layers."""
    tests: int = 4
    """Times that the grid is evaluated, at equal distances and at the end."""
    samples: int = 2**20
    """Points that are labelled, half of them near the surface; steps draw from them."""
    spread: float = 0.02
    """Standard deviation of the distance to the surface of points near it; the cube is 2 wide."""
    batch_size: int = 2**15
    """Points of a step."""
    grid: int | None = None
    """Points a side of the grid for IoU; 512 on a GPU and 128 elsewhere if None."""
    mesh_grid: int | None = None
    """Points a side of the grid that marching cubes turns into a mesh; 256, or `grid` if that is less, if None."""

    def check(self) -> None:
        """Raise InvalidArgumentError where a value lies outside what it is defined for."""
        super().check()
        for name in ("depth", "batch_size"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        require(self, "samples", self.samples >= 2, "at least 2")
        for name in ("sigma", "spread"):
            require(self, name, 0 < getattr(self, name) <= 1, "a number above 0, at most 1")
        for name in ("grid", "mesh_grid"):
            value = getattr(self, name)
            require(self, name, value is None or 8 <= value <= 2048, "8 to 2048")
