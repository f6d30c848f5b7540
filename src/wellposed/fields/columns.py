"""Where vertical lines meet a triangle mesh: what labels points, fills grids and draws pictures of shapes.

A line is a point of the x-y plane. Triangles are sorted into square cells of that plane, so that a line is held against
the few of its cell. A line through an edge that two triangles share meets exactly one of them: each edge is judged from
its two ends in a fixed order, in float64, and half of its rim belongs to a triangle. Sums over a closed mesh are
therefore exact, however the lines lie.

Shapes: F triangles, P lines, K pairs of a line and a triangle.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

_PAIRS = {"cuda": 2**23, "cpu": 2**17}
"""Pairs that are worked on at a time: a gigabyte or two on a GPU, about the cache elsewhere."""
_ENTRIES = 2**25
"""Triangles over all cells, each counted in every cell it may touch."""
_LARGEST_SIDE = 2048


@dataclass(frozen=True)
class Hits:
    """Lines and the triangles they meet."""

    lines: Tensor
    """Index of the line, (K,)."""
    triangles: Tensor
    """Index of the triangle, (K,)."""
    heights: Tensor
    """z of the meeting point, (K,)."""
    signs: Tensor
    """1 where the line goes up out of the side that the triangle faces, -1 where into it, (K,)."""


class Columns:
    """A mesh of triangles (F, 3, 3), float64, ready to be asked which of them lie above and below a point."""

    def __init__(self, triangles: Tensor) -> None:
        self.triangles, self._edges = triangles, _edges(triangles)
        self.low = triangles[..., :2].amin((0, 1))
        self.extent = (triangles[..., :2].amax((0, 1)) - self.low).max().clamp(min=1e-30)
        self.side = min(_LARGEST_SIDE, max(1, 2 * isqrt(len(triangles))))
        while True:
            first, last = (self._cells(corner) for corner in (triangles[..., :2].amin(1), triangles[..., :2].amax(1)))
            spans = last - first + 1
            counts = spans.prod(1)
            if self.side == 1 or int(counts.sum()) <= _ENTRIES:
                break
            self.side //= 2
        owner, place = _ragged(counts)
        row = first[owner, 0] + place // spans[owner, 1]
        column = first[owner, 1] + place % spans[owner, 1]
        order = torch.argsort(row * self.side + column, stable=True)
        self._entries = owner[order]
        self._counts = torch.bincount(row * self.side + column, minlength=self.side**2)
        self._starts = self._counts.cumsum(0) - self._counts

    def _cells(self, places: Tensor) -> Tensor:
        return ((places - self.low) / self.extent * self.side).long().clamp(0, self.side - 1)

    def hits(self, places: Tensor) -> Iterator[Hits]:
        """All meetings of the lines at `places`, (P, 2) of float64, with the mesh, in parts."""
        cells = self._cells(places)
        cell = cells[:, 0] * self.side + cells[:, 1]
        counts = self._counts[cell]
        pairs = _PAIRS["cuda" if places.is_cuda else "cpu"]
        begin = 0
        upto = counts.cumsum(0)
        while begin < len(places):
            before = int(upto[begin - 1]) if begin else 0
            end = max(begin + 1, int(torch.searchsorted(upto, before + pairs, right=True)))
            owner, place = _ragged(counts[begin:end])
            owner += begin
            yield self._met(places, owner, self._entries[self._starts[cell[owner]] + place])
            begin = end

    def _met(self, places: Tensor, lines: Tensor, triangles: Tensor) -> Hits:
        """Of the pairs of a line and a triangle, those that meet: the line passes an odd number of its edges."""
        x, y = places[lines][..., None].unbind(1)
        from_x, from_y, to_y, slope = self._edges.index_select(0, triangles).unbind(1)
        passed = (from_y <= y) & (y < to_y) & (x < from_x + (y - from_y) * slope)
        meeting = passed[:, 0] ^ passed[:, 1] ^ passed[:, 2]
        lines, triangles = lines[meeting], triangles[meeting]
        a, b, c = self.triangles[triangles].unbind(1)
        normals = torch.linalg.cross(b - a, c - a)
        offsets = places[lines] - a[:, :2]
        rise = -(normals[:, :2] * offsets).sum(1) / normals[:, 2]
        upright = normals[:, 2] == 0  # seen edge-on: rounding alone can make a line meet it, at any of its heights
        low, high = torch.minimum(torch.minimum(a, b), c)[:, 2], torch.maximum(torch.maximum(a, b), c)[:, 2]
        heights = torch.where(upright, low, a[:, 2] + rise).clamp(low, high)
        return Hits(lines, triangles, heights, normals[:, 2].sign().long())


def _edges(triangles: Tensor) -> Tensor:
    """Of each edge, seen from above, the lower end's x and y, the upper end's y, and how x grows with y: (F, 4, 3).

    An edge is the same to the last bit in both triangles that have it. A level one is passed by no line.
    """
    a = triangles[..., :2]
    b = a.roll(-1, dims=1)
    swap = (a[..., 1] > b[..., 1]) | ((a[..., 1] == b[..., 1]) & (a[..., 0] > b[..., 0]))
    low, high = torch.where(swap[..., None], b, a), torch.where(swap[..., None], a, b)
    run, rise = (high - low).unbind(-1)
    return torch.stack([low[..., 0], low[..., 1], high[..., 1], torch.where(rise > 0, run / rise, 0.0)], dim=1)


def _ragged(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For lists of these lengths one after the other: of every element, its list and its place in it.

    Example:
        >>> _ragged(torch.tensor([2, 0, 1]))
        (tensor([0, 0, 2]), tensor([0, 1, 0]))
    """
    owner = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    starts = counts.cumsum(0) - counts
    return owner, torch.arange(len(owner), device=counts.device) - starts[owner]
