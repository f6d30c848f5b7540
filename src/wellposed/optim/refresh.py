"""The refresh of the bases: one step of orthogonal iteration, and the moments turned along."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wellposed.optim.batch import Batch
from wellposed.optim.graph import side_by_side
from wellposed.optim.rotation import power_step, rotated, rotated_back

# Entries of the matrices that are refreshed together: a quarter of a GiB of float64.
_REFRESH_ENTRIES = 2**25


@dataclass(frozen=True)
class Axis:
    """One dimension of some members of a batch: factors and bases (B, n, n), and the second moments along it."""

    factor: Tensor
    basis: Tensor
    squares: Tensor
    i: int

    def split(self, count: int) -> list[Axis]:
        parts = zip(self.factor.split(count), self.basis.split(count), self.squares.split(count), strict=True)
        return [Axis(factor, basis, squares, self.i) for factor, basis, squares in parts]


def refresh(due: list[tuple[Batch, slice]]) -> None:
    """Take one step of orthogonal iteration with the bases of these members, and turn their moments along.

    Factors of one size are refreshed together, whatever batch they belong to.
    """
    device = due[0][0].work.device
    turns = [(batch.exp_avg[members], batch.bases_of(members)) for batch, members in due]
    unrotated = side_by_side([partial(rotated_back, momentum, bases) for momentum, bases in turns], device)
    packs = _packed([axis for batch, members in due for axis in _axes(batch, members)])
    for pack, orders in zip(packs, side_by_side([partial(_turn_, pack) for pack in packs], device), strict=True):
        for axis, order in zip(pack, orders, strict=True):
            shape = [len(order), *(-1 if k == axis.i else 1 for k in range(axis.squares.ndim - 1))]
            axis.squares.copy_(axis.squares.gather(axis.i + 1, order.reshape(shape).expand_as(axis.squares)))
    back = side_by_side([partial(rotated, x, bases) for x, (_, bases) in zip(unrotated, turns, strict=True)], device)
    torch._foreach_copy_([momentum for momentum, _ in turns], back)


def _axes(batch: Batch, members: slice) -> list[Axis]:
    return [
        Axis(factor[members], basis[members], batch.exp_avg_sq[members], i)
        for i, (factor, basis) in enumerate(zip(batch.factors, batch.bases, strict=True))
        if factor is not None and basis is not None
    ]


def _packed(axes: list[Axis]) -> list[list[Axis]]:
    """Axes of one size, type and device together, as many as the limit allows; the largest first."""
    alike: dict[Any, list[Axis]] = {}
    for axis in sorted(axes, key=lambda axis: -axis.factor.shape[-1]):
        alike.setdefault((axis.factor.shape[-1], axis.factor.dtype, axis.factor.device), []).append(axis)
    packs: list[list[Axis]] = []
    for (size, _, _), members in alike.items():
        limit = max(1, _REFRESH_ENTRIES // size**2)
        room = 0
        for axis in (part for member in members for part in member.split(limit)):
            if len(axis.factor) > room:
                packs.append([])
                room = limit
            packs[-1].append(axis)
            room -= len(axis.factor)
    return packs


def _turn_(pack: list[Axis]) -> list[Tensor]:
    """Take the step with these bases; the orders in which they take their old columns."""
    factor, basis = (_together(x) for x in ([axis.factor for axis in pack], [axis.basis for axis in pack]))
    new, order = power_step(factor, basis)
    counts = [len(axis.factor) for axis in pack]
    torch._foreach_copy_([axis.basis for axis in pack], new.split(counts))
    return list(order.split(counts))


def _together(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
