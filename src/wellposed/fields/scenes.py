"""Scenes as their owners have them on disk: pictures with a camera each, in Blender's or LLFF's layout.

Cameras are as in OpenGL: x to the right, y up, looking along -z. A pose (3, 4) takes camera coordinates to the world.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.data.pictures import read_picture
from wellposed.errors import DataError, InvalidArgumentError

Split = Literal["train", "val", "test"]


@dataclass(frozen=True)
class Views:
    """Pictures of one size: images (N, height, width, 3) from 0 to 1, poses (N, 3, 4), the name of each."""

    images: Tensor
    poses: Tensor
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    def at(self, chosen: Sequence[int]) -> "Views":
        """Some of them."""
        return Views(self.images[chosen], self.poses[chosen], tuple(self.names[i] for i in chosen))

    def spread(self, count: int) -> "Views":
        """`count` of them, spread over all; all if there are no more, or if 0."""
        count = min(count, len(self)) or len(self)
        return self.at([i * len(self) // count for i in range(count)])


@dataclass(frozen=True)
class Scene:
    """What a scene is learned from, and what it is tested on."""

    train: Views
    test: Views
    focal: float
    """In pixels."""
    near: float
    far: float
    """Where a ray o + t d begins and ends; d has length 1 along the axis of the camera."""
    ndc: bool
    """Whether rays are to be taken to normalized device coordinates: forward-facing captures, which have no end."""
    path: Tensor
    """Poses (N, 3, 4) of a camera that goes around, or along, the scene."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of every picture."""
        height, width = self.train.images.shape[1:3]
        return height, width


def read_scene(
    folder: str | Path, *, downscale: int = 1, held_out: Literal["val", "test"] = "test", frames: int = 40
) -> Scene:
    """The scene in `folder`, which holds transforms_train.json (Blender) or poses_bounds.npy (LLFF).

    Args:
        folder: of the scene.
        downscale: pixels a side of which one is made, by averaging.
        held_out: the split of a Blender scene that it is tested on; of an LLFF scene it is every 8th view.
        frames: of the camera's path.

    Raises:
        DataError: a file is missing or damaged, or pictures and cameras do not belong together; the frame is named.
    """
    folder = Path(folder)
    if (folder / "transforms_train.json").is_file():
        train, focal = _blender_views(folder, "train", downscale)
        test, other = _blender_views(folder, held_out, downscale)
        if train.images.shape[1:] != test.images.shape[1:] or abs(focal - other) > 1e-3 * focal:
            raise DataError(f"{folder}: the cameras or sizes of train and {held_out} differ; expected one camera")
        return Scene(train, test, focal, near=2.0, far=6.0, ndc=False, path=_circle(train.poses, frames))
    if (folder / "poses_bounds.npy").is_file():
        from wellposed.fields.scenes_llff import read_llff

        return read_llff(folder, downscale=downscale, frames=frames)
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder; expected that of a scene")
    raise DataError(
        f"{folder} holds no scene: expected transforms_train.json (Blender synthetic) or poses_bounds.npy (LLFF) in it"
    )


def read_images(files: Sequence[Path], downscale: int) -> Tensor:
    """Pictures of one size on white, (N, height, width, 3) from 0 to 1; the first that is missing or odd is named."""
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        others = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise DataError(
            f"{len(missing)} of {len(files)} frames have no picture: {', '.join(missing[:3])}{others}. Put them back, "
            "or take them out of the list of frames"
        )
    images: list[Tensor] = []
    for file in files:
        image = read_picture(file).permute(1, 2, 0).float() / 255
        image = _shrunk(image, downscale, file)
        if images and image.shape != images[0].shape:
            sizes = " and ".join(f"{width} x {height}" for height, width, _ in (image.shape, images[0].shape))
            raise DataError(f"{file} and {files[0]} are {sizes} pixels; expected pictures of one size")
        images.append(image)
    return torch.stack(images)


def _shrunk(image_HW3: Tensor, downscale: int, file: Path) -> Tensor:
    height, width = image_HW3.shape[:2]
    if downscale < 1 or height % downscale or width % downscale:
        raise InvalidArgumentError(
            f"downscale={downscale}: expected a divisor of {width} and {height}, the size of {file}"
        )
    return F.avg_pool2d(image_HW3.permute(2, 0, 1), downscale).permute(1, 2, 0)


def _blender_views(folder: Path, split: Split, downscale: int) -> tuple[Views, float]:
    """The views of a split, and the focal length in pixels."""
    path = folder / f"transforms_{split}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        angle, frames = float(found["camera_angle_x"]), list(found["frames"])
        files = [_picture_of(folder, frame) for frame in frames]
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; expected the cameras of the {split} views") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"{path} cannot be read ({reason}); expected camera_angle_x and frames with file_path and transform_matrix"
        ) from error
    if not frames:
        raise DataError(f"{path} lists no frames")
    if not 0 < angle < math.pi:
        raise DataError(f"{path}: camera_angle_x is {angle}; expected an angle between 0 and pi")
    poses = torch.stack([_pose_of(frame, path) for frame in frames])
    images = read_images(files, downscale)
    focal = 0.5 * images.shape[2] / math.tan(0.5 * angle)
    return Views(images, poses, tuple(str(file.relative_to(folder)) for file in files)), focal


def _picture_of(folder: Path, frame: dict[str, Any]) -> Path:
    name = Path(frame["file_path"])
    return folder / (name if name.suffix else name.with_name(f"{name.name}.png"))


def _pose_of(frame: dict[str, Any], path: Path) -> Tensor:
    """The camera of a frame, once it is sure that it is one."""
    try:
        pose = torch.tensor(frame["transform_matrix"], dtype=torch.float32)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: the frame {frame['file_path']} has no transform_matrix of numbers") from error
    if pose.shape != (4, 4) or not is_camera(pose[:3]):
        raise DataError(
            f"{path}: the transform_matrix of {frame['file_path']} is no camera; expected 4 x 4, a rotation and a place"
        )
    return pose[:3]


def is_camera(poses: Tensor) -> bool:
    """Whether (..., 3, 4) are finite numbers and their first three columns rotations."""
    rotations = poses[..., :3]
    off = rotations.mT @ rotations - torch.eye(3, dtype=poses.dtype)
    return bool(poses.isfinite().all() and off.abs().max() < 1e-2 and (torch.linalg.det(rotations) > 0).all())


def facing(backwards: Tensor, up: Tensor, position: Tensor) -> Tensor:
    """The pose (3, 4) of a camera at `position` that looks against `backwards`, with `up` above."""
    z = F.normalize(backwards, dim=0)
    x = F.normalize(torch.linalg.cross(up, z), dim=0)
    return torch.stack([x, torch.linalg.cross(z, x), z, position], dim=1)


def _circle(poses: Tensor, frames: int, elevation: float = 30.0) -> Tensor:
    """Cameras around the origin, z up, as far from it as those of `poses` are on average."""
    radius, height = float(poses[:, :, 3].norm(dim=1).mean()), math.radians(elevation)
    up, path = torch.tensor([0.0, 0.0, 1.0]), []
    for i in range(frames):
        turn = 2 * math.pi * i / frames
        away = [math.cos(turn) * math.cos(height), math.sin(turn) * math.cos(height), math.sin(height)]
        path.append(facing(torch.tensor(away), up, radius * torch.tensor(away)))
    return torch.stack(path) if path else poses[:0]
