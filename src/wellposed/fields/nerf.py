"""A scene that has been, or is being, learned: a network, where it is to be asked, and the camera it was seen by.

Shapes: R rays.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from wellposed.errors import ModelFileError
from wellposed.fields.files import load
from wellposed.fields.nerf_network import NerfNetwork
from wellposed.fields.occupancy_grid import OccupancyGrid
from wellposed.fields.rays import Rays, camera_rays
from wellposed.fields.rendering import render_hierarchical


@dataclass(frozen=True)
class Sampling:
    """Where along the rays of a camera a network is asked; JSON-able, it travels with the weights."""

    height: int
    width: int
    focal: float
    ndc: bool
    near: float
    far: float
    background: float | None
    """Light from behind, 1 for white; None where rays have no end."""
    box: tuple[list[float], list[float]]
    """Lowest and highest corner of what there is."""
    sampler: Literal["grid", "hierarchical"]
    samples: int
    rays: int
    """At a time."""
    pieces: int
    cells: int
    counts: tuple[int, int]
    """Places for the coarse network, and more for the fine one."""


class Rendered(NamedTuple):
    """What rays see."""

    colour: Tensor
    """(R, 3)."""
    coarse: Tensor | None
    """(R, 3), by the coarse network, if there is one."""
    complete: Tensor
    """(R,), which of the rays are whole."""
    used: Tensor
    """The share of the batch of samples that was needed."""


class Nerf:
    """A network and the grid that spares it work, on the device of the network."""

    def __init__(self, network: NerfNetwork, sampling: Sampling) -> None:
        self.network, self.sampling = network, sampling
        self.device = next(network.parameters()).device
        box = torch.tensor(sampling.box, device=self.device)
        size = (sampling.cells, sampling.pieces, sampling.samples)
        self.grid = OccupancyGrid(box, *size, sampling.background) if sampling.sampler == "grid" else None

    def render(self, rays: Rays, *, jitter: bool) -> Rendered:
        """What at most `sampling.rays` rays see: one batch of samples."""
        near, far, background = self.sampling.near, self.sampling.far, self.sampling.background
        if self.grid is not None:
            packed = self.grid.pack(rays, near, far, jitter=jitter)
            seen = self.grid.render(self.network.fine, rays, packed)
            return Rendered(seen.colour, None, packed.complete, (packed.pieces < packed.t.numel()).float().mean())
        pair = self.network.coarse or self.network.fine, self.network.fine
        coarse, fine = render_hierarchical(*pair, rays, near, far, self.sampling.counts, background, jitter=jitter)
        whole = torch.ones_like(rays.origins[:, 0])
        return Rendered(fine, coarse, whole.bool(), whole.mean())

    @torch.no_grad()
    def colours(self, rays: Rays, render: Callable[..., Rendered] | None = None) -> Tensor:
        """What any number of rays see, (R, 3) from 0 to 1.

        Always as many at a time as in training: those that did not fit into one batch go into the next.
        """
        found = torch.zeros_like(rays.origins)
        waiting = torch.arange(len(found), device=self.device)
        while len(waiting):
            chosen, waiting = waiting[: self.sampling.rays], waiting[self.sampling.rays :]
            spare = chosen[-1:].expand(self.sampling.rays - len(chosen))
            seen = (render or self.render)(rays.at(torch.cat([chosen, spare])), jitter=False)
            complete = seen.complete[: len(chosen)]
            found[chosen[complete]] = seen.colour[: len(chosen)][complete].float()
            waiting = torch.cat([chosen[~complete], waiting])
        return found.clamp(0, 1)

    def picture(self, pose_34: Tensor, render: Callable[..., Rendered] | None = None) -> Tensor:
        """What a camera sees, (height, width, 3) from 0 to 1."""
        camera = self.sampling
        rays = camera_rays(pose_34[None].to(self.device), camera.height, camera.width, camera.focal, ndc=camera.ndc)
        return self.colours(rays, render).unflatten(0, (camera.height, camera.width))

    def facts(self) -> dict[str, Any]:
        """What a weights file must say beside the weights."""
        return {"field": "nerf", **asdict(self.sampling)}


def load_nerf(path: str | Path, device: str | torch.device = "cpu", cells: int | None = None) -> Nerf:
    """The scene in a field.safetensors, or the folder of a run; the grid is made anew from the network.

    Args:
        path: of the file or folder.
        device: where it is to be rendered.
        cells: of the grid, a side; as in training if None. 128 take the network 8 million questions, 48 half a million.

    Raises:
        ModelFileError: there is no such file, or it is none of a scene, or damaged.
    """
    network, spec = load(path, device)
    facts = {name: value for name, value in spec.facts.items() if name != "field"}
    try:
        if not isinstance(network, NerfNetwork):
            raise TypeError("its network is another one")
        nerf = Nerf(network, Sampling(**facts | ({} if cells is None else {"cells": cells})))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelFileError(f"{path} is not a scene ({error}); expected a file of `wellposed fit nerf`") from error
    if nerf.grid is not None:
        nerf.grid.rebuild(network.fine.density)
    return nerf
