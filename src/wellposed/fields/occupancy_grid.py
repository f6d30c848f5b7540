"""Empty and hidden space left out: a grid of densities says where along a ray the network must be asked.

Rays are cut into many short pieces; of these, the ones that lie in occupied cells and in sight are packed, ray after
ray, into a batch of fixed size. All shapes are fixed and nothing is read back, so that a step can be compiled and the
GPU never waits. What does not fit is left to another step: `complete` says which rays are whole.

Shapes: R rays, M pieces of each, S samples of the batch, G cells a side.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.fields.rays import Rays, within_box
from wellposed.fields.rendering import ENDLESS, Field, Seen, composite, sum_before

UPDATE_EVERY, _PHASES, _WARMUP = 16, 4, 256
_DECAY, _RISE = 0.95, 0.1
_VISIBLE = 10.0
"""Optical depth behind which nothing is seen: exp(-10)."""
_FAINT = 0.01
"""Opacity of a piece of a ray below which it counts as empty."""
_AT_ONCE = 2**19


class Packed(NamedTuple):
    """Pieces of rays that are worth a sample."""

    pieces: Tensor
    """(S,), the number of each among all R M pieces; R M where a place of the batch stayed free."""
    places: Tensor
    """(R, M), the place of each piece in the batch; S where it has none."""
    t: Tensor
    """(R, M), where along its ray a piece is asked."""
    lengths: Tensor
    """(R, M)."""
    complete: Tensor
    """(R,), whether all of a ray that is worth a sample got one."""


class OccupancyGrid:
    """Densities of the cells of a box, remembered from the network.

    `ceiling` is a maximum that decays: a cell is occupied if that is high. `floor` falls at once and rises slowly:
    where it is high in a cell and in all cells around, light is lost for certain.

    Args:
        box_23: lowest and highest corner.
        cells: G.
        pieces: M, into which a ray is cut within the box.
        samples: S.
        background: light from behind, or None where the last piece of a ray has no end.
    """

    def __init__(self, box_23: Tensor, cells: int, pieces: int, samples: int, background: float | None) -> None:
        self.box, self.cells, self.pieces, self.samples = box_23, cells, pieces, samples
        self.background = background
        shape, device = (cells, cells, cells), box_23.device
        self.ceiling = torch.zeros(shape, device=device)
        self.floor = torch.zeros(shape, device=device)
        self.occupied = torch.ones(shape, dtype=torch.bool, device=device)
        self.opaque = torch.zeros(shape, device=device)

    def state(self) -> dict[str, Tensor]:
        """All that it remembers, to be written and filled in place."""
        return {name: getattr(self, name) for name in ("ceiling", "floor", "occupied", "opaque")}

    @torch.no_grad()
    def update(self, density: Callable[[Tensor], Tensor], step: int) -> None:
        """Ask the network about a quarter of the cells, each at a random point, every 16 steps; all count at first."""
        if step % UPDATE_EVERY:
            return
        self._remember(density, step // UPDATE_EVERY % _PHASES, _PHASES)
        if step >= _WARMUP:
            self._judge()

    @torch.no_grad()
    def rebuild(self, density: Callable[[Tensor], Tensor], rounds: int = 4) -> None:
        """Learn everything anew from a trained network, in few rounds: the neighbours of occupied cells count too."""
        for _ in range(rounds):
            self._remember(density, 0, 1)
        self.ceiling.copy_(F.max_pool3d(self.ceiling[None, None], 3, stride=1, padding=1)[0, 0])
        self._judge()

    def _remember(self, density: Callable[[Tensor], Tensor], first: int, stride: int) -> None:
        """Ask about every `stride`th cell, from `first` on."""
        low, high = self.box
        for start in range(first, self.cells**3, _AT_ONCE * stride):
            end = min(start + _AT_ONCE * stride, self.cells**3)
            cell = torch.arange(start, end, stride, device=low.device)
            corner = torch.stack([cell // self.cells**2, cell // self.cells % self.cells, cell % self.cells], 1)
            found = density(low + (corner + torch.rand(len(cell), 3, device=low.device)) / self.cells * (high - low))
            ceiling, floor = (kept.view(-1)[start:end:stride] for kept in (self.ceiling, self.floor))
            ceiling.copy_(torch.maximum(_DECAY * ceiling, found))
            floor.copy_(torch.minimum(floor + _RISE * (found - floor), found))

    def _judge(self) -> None:
        faint = _FAINT * self.pieces / (self.box[1] - self.box[0]).max()
        self.occupied.copy_(self.ceiling > torch.minimum(self.ceiling.mean(), faint))
        self.opaque.copy_(-F.max_pool3d(-self.floor[None, None], 3, stride=1, padding=1)[0, 0])

    @torch.no_grad()
    def pack(self, rays: Rays, near: float, far: float, *, jitter: bool) -> Packed:
        """The pieces of `rays` in occupied space and in sight, as many as there is room for."""
        start_R, end_R = within_box(rays, self.box, near, far)
        shift_R1 = torch.rand_like(start_R)[:, None] if jitter else torch.full_like(start_R, 0.5)[:, None]
        length_R1 = ((end_R - start_R) / self.pieces)[:, None]
        t_RM = start_R[:, None] + length_R1 * (torch.arange(self.pieces, device=start_R.device) + shift_R1)
        length_RM = (length_R1 * rays.directions.norm(dim=1, keepdim=True)).expand_as(t_RM)
        cell_RM = self._cell(rays, t_RM)
        visible = sum_before(self.opaque.view(-1)[cell_RM] * length_RM) < _VISIBLE
        worth = self.occupied.view(-1)[cell_RM] & visible & (length_R1 > 0)
        if self.background is None:
            last = torch.arange(self.pieces, device=start_R.device) == self.pieces - 1
            worth = worth | (last & visible & (length_R1 > 0))
            length_RM = torch.where(last, ENDLESS, length_RM)
        count = worth.flatten().cumsum(0, dtype=torch.int32)
        wanted = torch.arange(1, self.samples + 1, dtype=torch.int32, device=count.device)
        piece_S = torch.searchsorted(count, wanted)
        count_RM = count.view_as(t_RM)
        place_RM = torch.where(worth & (count_RM <= self.samples), count_RM - 1, self.samples)
        return Packed(piece_S, place_RM, t_RM, length_RM, count_RM[:, -1] <= self.samples)

    def _cell(self, rays: Rays, t_RM: Tensor) -> Tensor:
        low, high = self.box
        scale = self.cells / (high - low)
        start, way = (rays.origins - low) * scale, rays.directions * scale
        i, j, k = (
            (start[:, axis, None] + t_RM * way[:, axis, None]).long().clamp_(0, self.cells - 1) for axis in range(3)
        )
        return (i * self.cells + j) * self.cells + k

    def render(self, field: Field, rays: Rays, packed: Packed) -> Seen:
        """What rays see of `field`, asked at the packed places alone; of no meaning where they are not complete."""
        pieces = packed.t.numel()
        piece_S = packed.pieces.clamp(max=pieces - 1)
        ray_S = piece_S // self.pieces
        points = rays.origins[ray_S] + packed.t.reshape(-1)[piece_S][:, None] * rays.directions[ray_S]
        density, colour = field(points, rays.views[ray_S])
        values_RM4 = _Spread.apply(torch.cat([density[:, None], colour], 1), packed.places, packed.pieces)
        return composite(values_RM4[..., 0], values_RM4[..., 1:], packed.lengths, self.background)


class _Spread(torch.autograd.Function):
    """Rows of a batch put back to the pieces they came from, zeros elsewhere; both ways by looking up, never adding."""

    @staticmethod
    def forward(ctx: Any, values_SC: Tensor, place_RM: Tensor, piece_S: Tensor) -> Tensor:
        ctx.save_for_backward(piece_S)
        return torch.cat([values_SC, torch.zeros_like(values_SC[:1])])[place_RM]

    @staticmethod
    def backward(ctx: Any, gradient_RMC: Tensor) -> tuple[Tensor, None, None]:
        (piece_S,) = ctx.saved_tensors
        flat = gradient_RMC.reshape(-1, gradient_RMC.shape[-1])
        return flat[piece_S.clamp(max=len(flat) - 1)] * (piece_S < len(flat))[:, None], None, None
