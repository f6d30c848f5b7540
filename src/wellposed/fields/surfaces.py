"""From a field back to a mesh: marching cubes, and the mesh as a file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wellposed.fields.meshes import Shape
from wellposed.runs import atomic_path


def extract_mesh(values: Callable[[slice], Tensor], size: int, like: Shape) -> Shape | None:
    """The surface on which a field is 0, closed; None where the field has one sign all over.

    Args:
        values: of the field on some rows of a grid over the cube from -1 to 1, above 0 inside: (rows, N, N).
        size: N.
        like: the shape in whose coordinates a file of the mesh is to be.
    """
    from skimage.measure import marching_cubes

    planes = [values(slice(row, row + 1)).cpu() for row in range(size)]
    volume = np.pad(torch.cat(planes).numpy(), 1, constant_values=-1.0)  # what reaches the cube's sides ends there
    if volume.max() <= 0:
        return None
    vertices, faces, _, _ = marching_cubes(volume, 0.0, gradient_direction="ascent", allow_degenerate=False)
    places = (2 * (vertices.astype(np.float64) - 1) + 1 - size) / size
    return replace(like, vertices=torch.from_numpy(places), faces=torch.from_numpy(faces.astype(np.int64)))


def save_mesh(shape: Shape, path: Path) -> None:
    """Write a binary .ply in the coordinates of the file that the shape came from; atomically."""
    import trimesh

    vertices = shape.vertices.cpu().numpy() * shape.scale + np.array(shape.centre)
    mesh = trimesh.Trimesh(vertices, shape.faces.cpu().numpy(), process=False)
    with atomic_path(path) as file:
        mesh.export(file, file_type="ply")
