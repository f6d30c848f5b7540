"""Pictures of shapes: lines of sight through pixels, met by the nearest triangle, shaded by smooth normals.

Shapes: F triangles, V vertices, K hits.
"""

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.fields.columns import Columns
from wellposed.fields.meshes import Shape
from wellposed.runs import atomic_path

VIEWS = ((-30.0, 20.0), (60.0, 20.0))
"""Turn around the upright axis y, and tilt, in degrees."""
SIZE = 400
"""Pixels a side of a view."""
_LIGHT, _FILL = (-0.45, 0.65, 0.6), (0.7, 0.1, 0.4)
_CLAY = (0.80, 0.77, 0.72)
_FINER = 2
"""Lines of sight across a pixel, each way."""


def shaded_view(shape: Shape | None, turn: float, tilt: float, size: int) -> Tensor:
    """The shape from one side on white, uint8 (size, size, 3); white alone if there is none."""
    fine = size * _FINER
    picture = torch.ones(fine * fine, 3, dtype=torch.float64)
    if shape is not None:
        _draw(picture, shape.vertices.cpu() @ _rotation(turn, tilt).T, shape.faces.cpu(), fine)
    small = F.avg_pool2d(picture.view(fine, fine, 3).permute(2, 0, 1)[None], _FINER)[0]
    return (small.permute(1, 2, 0) * 255).round().to(torch.uint8)


def save_views(shape: Shape | None, path: Path) -> None:
    """Write the shape from two sides, beside one another; atomically."""
    from PIL import Image

    picture = torch.cat([shaded_view(shape, *view, SIZE) for view in VIEWS], dim=1)
    with atomic_path(path) as file:
        Image.fromarray(picture.numpy()).save(file, "PNG", optimize=True)


def _draw(picture: Tensor, vertices: Tensor, faces: Tensor, fine: int) -> None:
    """Colour those of the fine pixels, (fine^2, 3), through which the mesh is seen along z."""
    step = 2.3 / fine
    middles = step * (torch.arange(fine, dtype=torch.float64) + 0.5) - 1.15
    places = torch.cartesian_prod(-middles, middles).flip(1)
    nearest = torch.full((fine * fine,), -math.inf, dtype=torch.float64)
    seen = torch.zeros(fine * fine, dtype=torch.long)
    for hits in Columns(vertices[faces]).hits(places):
        nearest.scatter_reduce_(0, hits.lines, hits.heights, "amax")
        first = hits.heights == nearest[hits.lines]
        seen[hits.lines[first]] = hits.triangles[first]
    pixels = nearest.isfinite().nonzero()[:, 0]
    normals = _smooth_normals(vertices, faces)[faces[seen[pixels]]]
    shares = _barycentric(vertices[faces[seen[pixels]]], places[pixels])
    picture[pixels] = _shaded(F.normalize((shares[..., None] * normals).sum(1), dim=1))


def _shaded(normals: Tensor) -> Tensor:
    """Colours of a matt surface under a main light and a weaker one, with a little sky from above."""
    light, fill = (F.normalize(torch.tensor(way, dtype=normals.dtype), dim=0) for way in (_LIGHT, _FILL))
    bright = 0.30 + 0.70 * (normals @ light).clamp(min=0) + 0.16 * (normals @ fill).clamp(min=0)
    bright = bright + 0.08 * (normals[:, 1] + 1) / 2
    return (bright[:, None] * torch.tensor(_CLAY, dtype=normals.dtype)).clamp(0, 1)


def _smooth_normals(vertices: Tensor, faces: Tensor) -> Tensor:
    """The mean normal of the triangles around each vertex, by area, (V, 3)."""
    a, b, c = vertices[faces].unbind(1)
    normals = torch.linalg.cross(b - a, c - a)
    sums = torch.zeros_like(vertices).index_add_(0, faces.flatten(), normals.repeat_interleave(3, dim=0))
    return F.normalize(sums, dim=1)


def _barycentric(triangles: Tensor, places: Tensor) -> Tensor:
    """The shares of the corners in each place, (K, 3), clamped for triangles that are seen edge-on."""
    a, b, c = triangles[..., :2].unbind(1)
    u, v, w = b - a, c - a, places - a
    area = u[:, 0] * v[:, 1] - u[:, 1] * v[:, 0]
    area = torch.where(area.abs() < 1e-30, 1.0, area)
    second = (w[:, 0] * v[:, 1] - w[:, 1] * v[:, 0]) / area
    third = (u[:, 0] * w[:, 1] - u[:, 1] * w[:, 0]) / area
    return torch.stack([1 - second - third, second, third], dim=1).clamp(0, 1)


def _rotation(turn: float, tilt: float) -> Tensor:
    """A turn around y, then a tilt towards the eye, which looks along -z."""
    t, s = math.radians(turn), math.radians(tilt)
    around = [[math.cos(t), 0, math.sin(t)], [0, 1, 0], [-math.sin(t), 0, math.cos(t)]]
    towards = [[1, 0, 0], [0, math.cos(s), -math.sin(s)], [0, math.sin(s), math.cos(s)]]
    return torch.tensor(towards, dtype=torch.float64) @ torch.tensor(around, dtype=torch.float64)
