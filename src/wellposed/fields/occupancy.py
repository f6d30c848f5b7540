"""Fitting a shape: a network from places to inside or outside, and back to a mesh.

Shapes: P points, F triangles, N grid points a side.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.fields.files import FieldSpec
from wellposed.fields.meshes import Shape, check_extra, grid_axis, open_mesh
from wellposed.fields.occupancy_config import OccupancyConfig
from wellposed.fields.results import FITTED, TRUTH, FieldResult
from wellposed.fields.shading import save_views
from wellposed.fields.surfaces import extract_mesh, save_mesh
from wellposed.fields.training import FieldTask, fit_field
from wellposed.runs import device_named, writing_to
from wellposed.training.accelerators import compiled

MESH = "fitted.ply"
_AT_A_TIME = {"cuda": 2**20, "cpu": 2**16}
"""Points whose occupancy is computed together: 1 GiB for an activation of width 256 on a GPU; on a CPU, its cache."""


def fit_occupancy(config: OccupancyConfig, *, quiet: bool = False, given: Collection[str] | None = None) -> FieldResult:
    """Fit a network to a mesh as `config` says; see `wellposed.fields.training.fit_field` for what a run leaves.

    Beside that the folder holds fitted.ply, in the coordinates of the file, and pictures of both meshes.

    Raises:
        DataError: the file is no closed mesh; the message has the number of open edges.
        InvalidArgumentError, RunError, DivergedError: as for every run.
    """
    config = _resolved(config.begun(given))
    check_extra()
    shape = open_mesh(Path(config.data), repair=config.repair)
    task, result = fit_field(
        config, lambda place: OccupancyTask(config, shape, place), size=len(shape.faces), quiet=quiet
    )
    size = config.mesh_grid
    assert size is not None
    fitted = extract_mesh(lambda rows: logits(task.model, size, rows), size, shape)
    with writing_to(config.folder):
        if fitted is not None:
            save_mesh(fitted, config.folder / MESH)
        save_views(shape, config.folder / TRUTH)
        save_views(fitted, config.folder / FITTED)
    return result


def _resolved(config: OccupancyConfig) -> OccupancyConfig:
    """`config` with the grids that suit its device filled in."""
    grid = config.grid or (512 if device_named(config.device).type == "cuda" else 128)
    return replace(config, grid=grid, mesh_grid=config.mesh_grid or min(grid, 256))


def sampled_points(shape: Shape, count: int, spread: float) -> Tensor:
    """Points (P, 3) of the cube: half of them everywhere, half around the surface, where it takes most to be right."""
    triangles = shape.triangles
    device = triangles.device
    near = count // 2
    a, b, c = triangles.unbind(1)
    areas = torch.linalg.cross(b - a, c - a).norm(dim=1)
    heights = torch.rand(near, dtype=areas.dtype, device=device) * areas.sum()
    upto = areas.cpu().cumsum(0).to(device)  # torch has no repeatable kernel for it on a GPU
    chosen = torch.searchsorted(upto, heights).clamp(max=len(areas) - 1)
    u, v = torch.rand(2, near, 1, dtype=areas.dtype, device=device)
    u, v = torch.where(u + v > 1, 1 - u, u), torch.where(u + v > 1, 1 - v, v)
    surface = a[chosen] + u * (b - a)[chosen] + v * (c - a)[chosen]
    surface = surface + spread * torch.randn_like(surface)
    everywhere = 2 * torch.rand(count - near, 3, dtype=areas.dtype, device=device) - 1
    return torch.cat([everywhere, surface.clamp(-1, 1)])


class OccupancyTask(FieldTask):
    """A shape that is learned from points whose side is known."""

    def __init__(self, config: OccupancyConfig, shape: Shape, accelerator: Accelerator) -> None:
        arguments = {"in_features": 3, "out_features": 1, "depth": config.depth, **config.layers}
        arguments |= {"activation": "gauss", "scale": config.sigma}
        facts = {"field": "occupancy", "centre": list(shape.centre), "scale": shape.scale}
        spec, device = FieldSpec("coordinates", arguments, facts), accelerator.device
        network = spec.build().to(device)
        self._forward = compiled(network, accelerator) if config.compile else network
        self._shape = shape.to(device if device.type == "cuda" else torch.device("cpu"))  # labels need float64
        points_P3 = sampled_points(self._shape, config.samples, config.spread).float()
        self._inside_P, self._points_P3 = self._shape.contains(points_P3).to(device), points_P3.to(device)
        self._batch, self._grid = min(config.batch_size, len(points_P3)), config.grid or 0
        super().__init__(network, spec, config, accelerator, batch_size=self._batch, unit="points")

    def loss(self, step: int) -> dict[str, Tensor]:
        """Cross-entropy of some of the points."""
        drawn = torch.randint(len(self._points_P3), (self._batch,), device=self.device)
        inside, found = self._inside_P[drawn], self._forward(self._points_P3[drawn])[:, 0].float()
        error = F.binary_cross_entropy_with_logits(found, inside.float())
        return {"loss": error, "iou": iou(found.detach() > 0, inside)}

    def scores(self) -> dict[str, float]:
        """IoU on the grid, a slab at a time."""
        counts = torch.zeros(2, dtype=torch.long, device=self.device)
        for rows in slabs(self._grid, self.device):
            found, truth = logits(self.model, self._grid, rows) > 0, self._shape.fill(self._grid, rows).to(self.device)
            counts += torch.stack([(found & truth).sum(), (found | truth).sum()])
        both, either = counts.tolist()
        return {"iou": both / max(either, 1)}


def iou(found: Tensor, truth: Tensor) -> Tensor:
    """Intersection over union of two sets of points."""
    return (found & truth).sum() / (found | truth).sum().clamp(min=1)


def slabs(size: int, device: torch.device) -> list[slice]:
    """Rows of a grid that are worked on together."""
    rows = max(1, _AT_A_TIME["cuda" if device.type == "cuda" else "cpu"] // size**2)
    return [slice(start, min(start + rows, size)) for start in range(0, size, rows)]


@torch.no_grad()
def logits(network: nn.Module, size: int, rows: slice) -> Tensor:
    """What the network says of the rows `rows` of the grid, (len(rows), N, N): above 0 is inside."""
    axis = grid_axis(size, next(network.parameters()).device)
    points = torch.cartesian_prod(axis[rows], axis, axis)
    parts = points.split(_AT_A_TIME["cuda" if points.is_cuda else "cpu"])
    return torch.cat([network(part)[:, 0].float() for part in parts]).view(-1, size, size)
