"""Rays: one through the middle of every pixel, in the world or in normalized device coordinates.

Shapes: R rays.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_NEAR_PLANE = 1.0


class Rays(NamedTuple):
    """Points o + t d, and the direction in the world, of length 1, from which colours are seen; (R, 3) each."""

    origins: Tensor
    directions: Tensor
    views: Tensor

    def at(self, chosen: Tensor | slice) -> "Rays":
        """Some of them."""
        return Rays(*(part[chosen] for part in self))

    def to(self, device: torch.device) -> "Rays":
        """On another device."""
        return Rays(*(part.to(device) for part in self))


def camera_rays(poses_N34: Tensor, height: int, width: int, focal: float, *, ndc: bool = False) -> Rays:
    """The rays of all pixels of all cameras, row by row; in the world, d is 1 long along the axis of the camera.

    Example:
        >>> rays = camera_rays(torch.eye(3, 4)[None], 1, 2, focal=1.0)
        >>> rays.directions.tolist()
        [[-0.5, 0.0, -1.0], [0.5, 0.0, -1.0]]
    """
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    local_P3 = torch.stack([(x - width / 2) / focal, -(y - height / 2) / focal, -torch.ones_like(x)], -1).view(-1, 3)
    with torch.autocast(poses_N34.device.type, enabled=False):  # rounded to bfloat16 they would be half a pixel off
        directions = (local_P3.to(poses_N34) @ poses_N34[:, :, :3].mT).reshape(-1, 3)
    origins = poses_N34[:, :, 3].repeat_interleave(height * width, 0)
    views = F.normalize(directions, dim=-1)
    if ndc:
        origins, directions = to_ndc(origins, directions, height, width, focal)
    return Rays(origins, directions, views)


def to_ndc(origins: Tensor, directions: Tensor, height: int, width: int, focal: float) -> tuple[Tensor, Tensor]:
    """Rays in the cube that a camera at the world's origin sees: t = 0 on the near plane z = -1, t = 1 at infinity.

    The appendix of arXiv 2003.08934, for a far plane at infinity; x and y are -1 to 1 within the picture.
    """
    ahead = -(_NEAR_PLANE + origins[:, 2]) / directions[:, 2]
    x, y, z = (origins + ahead[:, None] * directions).unbind(-1)
    dx, dy, dz = directions.unbind(-1)
    across, down = -2 * focal / width, -2 * focal / height
    start = torch.stack([across * x / z, down * y / z, 1 + 2 * _NEAR_PLANE / z], -1)
    way = torch.stack([across * (dx / dz - x / z), down * (dy / dz - y / z), -2 * _NEAR_PLANE / z], -1)
    return start, way


def within_box(rays: Rays, box_23: Tensor, near: float, far: float) -> tuple[Tensor, Tensor]:
    """Where each ray enters and leaves a box, within `near` and `far`; both the same where it misses it. (R,) each.

    Args:
        rays: R of them.
        box_23: its lowest and its highest corner.
        near: the smallest t.
        far: the largest t.
    """
    steep = torch.where(rays.directions.abs() < 1e-9, 1e-9, rays.directions)
    corners = (box_23[:, None] - rays.origins) / steep
    enters = corners.amin(0).amax(-1).clamp(near, far)
    leaves = corners.amax(0).amin(-1).clamp(near, far)
    return enters, torch.maximum(enters, leaves)
