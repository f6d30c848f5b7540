"""Forward-facing captures in LLFF's layout, prepared as the original NeRF code does (arXiv 1905.00889, 2003.08934)."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.data.pictures import picture_files
from wellposed.errors import DataError
from wellposed.fields.scenes import Scene, Views, facing, is_camera, read_images

_HELD_OUT = 8
"""Every so many views are tested on."""
_NEAREST = 0.75
"""The nearest point of the scene comes to lie at 1 / 0.75, behind the near plane at 1."""


def read_llff(folder: Path, *, downscale: int = 1, frames: int = 40) -> Scene:
    """The scene of poses_bounds.npy and the smallest pictures beside it, in units in which the near plane is at 1.

    A row of poses_bounds.npy is a pose (3, 5), of columns down, right, backwards, place and (height, width, focal) of
    the full-size picture, and the depth of the nearest and of the farthest point.
    """
    table = _read_table(folder / "poses_bounds.npy")
    files = picture_files([_smallest(folder)])
    if len(files) != len(table):
        raise DataError(
            f"{files[0].parent} holds {len(files)} pictures and poses_bounds.npy {len(table)} cameras; expected as many"
        )
    rows = table[:, :15].reshape(-1, 3, 5)
    poses = torch.stack([rows[..., 1], -rows[..., 0], rows[..., 2], rows[..., 3]], dim=2)
    if not is_camera(poses):
        raise DataError(
            f"{folder / 'poses_bounds.npy'}: some poses are no rotations; expected those of LLFF's imgs2poses"
        )
    images = read_images(files, downscale)
    height, width, focal = rows[0, :, 4].tolist()
    if abs(images.shape[1] / images.shape[2] - height / width) > 0.01 * height / width:
        raise DataError(
            f"{files[0]} is {images.shape[2]} x {images.shape[1]} pixels, the cameras are of pictures of {width:.0f} x "
            f"{height:.0f}; expected the same proportions"
        )
    depths = table[:, 15:]
    scale = 1 / (_NEAREST * float(depths.min()))
    poses[:, :, 3] *= scale
    poses = recentered(poses)
    path = _spiral(poses, depths * scale, frames).float()
    views = Views(images, poses.float(), tuple(file.name for file in files))
    test, train = (
        views.at([i for i in range(len(views)) if (i % _HELD_OUT == 0) == held_out]) for held_out in (True, False)
    )
    if not len(train):
        raise DataError(f"{folder} has {len(views)} view; expected at least 2, since every {_HELD_OUT}th is held out")
    return Scene(train, test, focal * images.shape[2] / width, near=0.0, far=1.0, ndc=True, path=path)


def recentered(poses_N34: Tensor) -> Tensor:
    """The same cameras in a world whose origin and axes are those of their average."""
    average = _whole(_average(poses_N34))
    return (torch.linalg.inv(average) @ _whole(poses_N34))[:, :3]


def _read_table(path: Path) -> Tensor:
    try:
        table = torch.from_numpy(np.load(path, allow_pickle=False)).double()
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if table.ndim != 2 or table.shape[1] != 17 or not len(table) or not table.isfinite().all():
        raise DataError(f"{path} holds {tuple(table.shape)} numbers; expected a row of 17 finite ones for each view")
    if not (table[:, 15:] > 0).all() or not (table[:, [4, 9, 14]] > 0).all():
        raise DataError(f"{path}: depths, sizes and focal lengths must be above 0")
    return table


def _smallest(folder: Path) -> Path:
    """The folder of the smallest pictures: images_8 before images_4 before images."""
    found = {
        int(path.name.removeprefix("images").removeprefix("_") or 1): path
        for path in folder.glob("images*")
        if path.is_dir() and path.name.removeprefix("images").removeprefix("_").isdigit() | (path.name == "images")
    }
    if not found:
        raise DataError(f"{folder} holds no pictures; expected them in images_8, images_4 or images")
    return found[max(found)]


def _average(poses: Tensor) -> Tensor:
    return facing(poses[:, :, 2].sum(0), poses[:, :, 1].sum(0), poses[:, :, 3].mean(0))


def _whole(poses: Tensor) -> Tensor:
    """(..., 3, 4) with the last row 0 0 0 1."""
    last = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=poses.dtype).expand(*poses.shape[:-2], 1, 4)
    return torch.cat([poses, last], dim=-2)


def _spiral(poses: Tensor, depths: Tensor, frames: int) -> Tensor:
    """Cameras on a spiral through the capture's own, all looking at one point in the depth of the scene."""
    average = _average(poses)
    up = F.normalize(poses[:, :, 1].sum(0), dim=0)
    focus = 1 / (0.25 / (0.9 * depths.min()) + 0.75 / (5 * depths.max()))
    radii = torch.quantile(poses[:, :, 3].abs(), 0.9, dim=0)
    target = average @ torch.tensor([0.0, 0.0, -float(focus), 1.0], dtype=poses.dtype)
    path = []
    for i in range(frames):
        turn = 4 * math.pi * i / frames
        away = torch.tensor([math.cos(turn), -math.sin(turn), -math.sin(turn / 2)], dtype=poses.dtype) * radii
        place = average @ torch.cat([away, torch.ones(1, dtype=poses.dtype)])
        path.append(facing(place - target, up, place))
    return torch.stack(path) if path else poses[:0]
