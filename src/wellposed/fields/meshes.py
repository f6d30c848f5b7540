"""Triangle meshes: read, checked for holes, repaired, scaled into the cube, and the inside told from the outside.

Shapes: V vertices, F faces, P points, N grid points a side.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wellposed.errors import DataError, InvalidArgumentError
from wellposed.fields.columns import Columns

HALF_WIDTH = 0.9
"""Of the longest side of a mesh in the cube from -1 to 1."""


@dataclass(frozen=True)
class Shape:
    """A mesh in the cube from -1 to 1."""

    vertices: Tensor
    """(V, 3), float64."""
    faces: Tensor
    """(F, 3), int64."""
    centre: tuple[float, float, float]
    """Of its box, as it is in the file."""
    scale: float
    """What a unit of the cube is in the file."""

    def to(self, device: torch.device) -> "Shape":
        """The same on `device`."""
        return replace(self, vertices=self.vertices.to(device), faces=self.faces.to(device))

    @property
    def triangles(self) -> Tensor:
        """(F, 3, 3)."""
        return self.vertices[self.faces]

    @cached_property
    def _columns(self) -> Columns:
        return Columns(self.triangles)

    @cached_property
    def _is_oriented(self) -> bool:
        """Whether neighbouring triangles agree on what is out: each edge is walked once in each direction."""
        edges = _directed_edges(self.faces.cpu().numpy())
        return len(np.unique(edges, axis=0)) == len(edges)

    def contains(self, points: Tensor) -> Tensor:
        """Whether each of the points (P, 3) lies within: its winding number is not 0.

        Counted along the line upwards, with the side from which each triangle is met; where the triangles do not agree
        on what is out, whether their number is odd.
        """
        points = points.to(self.vertices)
        winding = torch.zeros(len(points), dtype=torch.long, device=points.device)
        for hits in self._columns.hits(points[:, :2]):
            above = hits.heights > points[hits.lines, 2]
            winding.index_add_(0, hits.lines, self._steps(hits.signs) * above)
        return self._is_inside(winding)

    def fill(self, size: int, rows: slice) -> Tensor:
        """Whether each point of the rows `rows` of `grid(size)` lies within, (len(rows), N, N): `contains`, faster."""
        axis = grid_axis(size, self.vertices.device, torch.float64)
        lines = torch.cartesian_prod(axis[rows], axis)
        winding = torch.zeros(len(lines) * (size + 1), dtype=torch.int16, device=axis.device)
        for hits in self._columns.hits(lines):
            below = torch.searchsorted(axis, hits.heights)
            winding.index_add_(0, hits.lines * (size + 1) + below, self._steps(hits.signs).to(torch.int16))
        # What is met at a height counts for all grid points below it.
        winding = winding.view(-1, size, size + 1)
        below = winding.flip(2).cumsum(2, dtype=torch.int16).flip(2)
        return self._is_inside(below[..., 1:])

    def _steps(self, signs: Tensor) -> Tensor:
        return signs if self._is_oriented else torch.ones_like(signs)

    def _is_inside(self, winding: Tensor) -> Tensor:
        return winding != 0 if self._is_oriented else winding % 2 == 1


def grid_axis(size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """The middles of `size` equal parts of -1 to 1, (N,)."""
    return (2 * torch.arange(size, device=device, dtype=dtype) + 1 - size) / size


def open_mesh(path: Path, *, repair: bool = False) -> Shape:
    """The mesh in the .obj, .ply, .stl or .off file `path`, which must be closed.

    Args:
        path: of the file.
        repair: close holes with a fan of triangles around the middle of each rim.

    Raises:
        DataError: it cannot be read, is empty, or has open edges that may not or cannot be closed.
    """
    vertices, faces = _read(path)
    count = len(open_edges(faces))
    if count and not repair:
        raise DataError(
            f"{path} is not watertight: {count} of its edges belong to one triangle only, so that it has no inside. "
            "Close its holes with --repair, or in a mesh editor"
        )
    if count:
        vertices, faces = _closed(vertices, faces)
        left = len(open_edges(faces))
        if left:
            raise DataError(f"{path} is not watertight: of {count} open edges, {left} cannot be closed; use an editor")
    low, high = vertices.min(0), vertices.max(0)
    centre, scale = (low + high) / 2, float((high - low).max()) / 2 / HALF_WIDTH
    if not (high > low).all():
        raise DataError(
            f"{path} is flat: its box is {' x '.join(f'{side:g}' for side in high - low)}; expected a solid"
        )
    x, y, z = centre.tolist()
    placed = torch.from_numpy((vertices - centre) / scale)
    return Shape(placed, torch.from_numpy(faces), (x, y, z), scale)


def check_extra() -> None:
    """InvalidArgumentError where a package of the extra "fields" is missing."""
    for module, package in (("trimesh", "trimesh"), ("skimage", "scikit-image")):
        if find_spec(module) is None:
            raise InvalidArgumentError(f"meshes need {package}, which is not here: pip install 'wellposed[fields]'")


def _read(path: Path) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    import trimesh

    if not path.is_file():
        raise DataError(f"{path}: there is no such file; expected a mesh (.obj, .ply, .stl, .off)")
    try:
        mesh: Any = trimesh.load(path, force="mesh", process=False)
        vertices, faces = np.asarray(mesh.vertices, np.float64), np.asarray(mesh.faces, np.int64)
    except Exception as error:  # every format of trimesh fails in its own way
        raise DataError(f"{path} cannot be read as a mesh ({type(error).__name__}: {error})") from error
    if not len(faces):
        raise DataError(f"{path} holds {len(vertices)} points and no triangles; expected a surface")
    if not np.isfinite(vertices).all():
        raise DataError(f"{path} has vertices that are not finite numbers")
    vertices, same = np.unique(vertices, axis=0, return_inverse=True)  # seams of textures and normals
    faces = same.reshape(-1)[faces]
    a, b, c = faces.T
    return vertices, faces[(a != b) & (b != c) & (c != a)]


def open_edges(faces: NDArray[np.int64]) -> NDArray[np.int64]:
    """The edges that an odd number of triangles have, (E, 2), each in the direction of one of them."""
    edges = _directed_edges(faces)
    _, first, counts = np.unique(np.sort(edges, axis=1), axis=0, return_index=True, return_counts=True)
    return edges[first[counts % 2 == 1]]


def _directed_edges(faces: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]])


def _closed(vertices: NDArray[np.float64], faces: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The mesh with a fan of triangles in every hole: each rim is walked against the triangles that it bounds."""
    following: dict[int, list[int]] = defaultdict(list)
    for a, b in open_edges(faces).tolist():
        following[b].append(a)
    points, fans = [vertices], [faces]
    while following:
        rim = [next(iter(following))]
        while rim[-1] in following:
            rim.append(_taken(following, rim[-1]))
        middle = sum(map(len, points))
        points.append(vertices[rim].mean(0, keepdims=True))
        fans.append(np.array([(a, b, middle) for a, b in pairwise(rim)], np.int64))
    return np.concatenate(points), np.concatenate(fans)


def _taken(following: dict[int, list[int]], vertex: int) -> int:
    after = following[vertex].pop()
    if not following[vertex]:
        del following[vertex]
    return after
