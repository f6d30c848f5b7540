"""A scene that is known in closed form, and as files: a ball of one colour and density, seen from all around."""

import json
import math
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from wellposed.fields.rays import Rays, camera_rays
from wellposed.fields.scenes import facing

CENTRE, RADIUS, COLOUR, DENSITY = torch.tensor([0.3, -0.2, 0.4]), 0.7, torch.tensor([0.9, 0.3, 0.1]), 4.0
ANGLE = 0.7


def ball(points: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
    inside = (points - CENTRE).norm(dim=1) < RADIUS
    return DENSITY * inside, COLOUR.expand_as(points)


def ball_seen(rays: Rays, background: float = 1.0) -> Tensor:
    """Its colour along each ray, from the length of the chord."""
    unit = rays.directions / rays.directions.norm(dim=1, keepdim=True)
    along = ((CENTRE - rays.origins) * unit).sum(1, keepdim=True)
    apart = (rays.origins + along * unit - CENTRE).norm(dim=1, keepdim=True)
    chord = 2 * (RADIUS**2 - apart**2).clamp(min=0).sqrt()
    through = torch.exp(-DENSITY * chord)
    return (1 - through) * COLOUR + through * background


def cameras(count: int, distance: float = 4.0) -> Tensor:
    """Poses spread around the origin, z up."""
    poses = []
    for i in range(count):
        height, turn = -0.3 + 1.2 * (i + 0.5) / count, 2.4 * i
        away = [math.cos(turn) * math.cos(height), math.sin(turn) * math.cos(height), math.sin(height)]
        poses.append(facing(torch.tensor(away), torch.tensor([0.0, 0.0, 1.0]), distance * torch.tensor(away)))
    return torch.stack(poses)


def focal_of(size: int) -> float:
    return 0.5 * size / math.tan(0.5 * ANGLE)


def pictures_of_ball(poses: Tensor, size: int) -> Tensor:
    return ball_seen(camera_rays(poses, size, size, focal_of(size))).view(len(poses), size, size, 3)


def write_blender(folder: Path, *, size: int = 16, counts: tuple[int, int] = (12, 2)) -> Path:
    """The ball in the layout of Blender's scenes."""
    for split, poses in zip(("train", "test"), cameras(sum(counts)).split(list(counts)), strict=True):
        frames = []
        for i, (pose, picture) in enumerate(zip(poses, pictures_of_ball(poses, size), strict=True)):
            matrix = torch.cat([pose, torch.tensor([[0.0, 0.0, 0.0, 1.0]])])
            frames.append({"file_path": f"./{split}/r_{i}", "transform_matrix": matrix.tolist()})
            path = folder / split / f"r_{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((picture * 255).round().to(torch.uint8).numpy()).save(path)
        (folder / f"transforms_{split}.json").write_text(json.dumps({"camera_angle_x": ANGLE, "frames": frames}))
    return folder
