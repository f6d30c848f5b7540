"""Parameters that are stepped together: how each is seen, their stacked state, and the refresh of their bases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from wellposed.errors import InvalidArgumentError
from wellposed.optim.rotation import Bases, power_step, rotated, rotated_back

# Entries of the matrices that are refreshed together: half a GiB of float64.
_REFRESH_ENTRIES = 2**26


@dataclass(frozen=True)
class Layout:
    """How a parameter is seen by the optimizer: its shape, and which of its dimensions are rotated."""

    shape: tuple[int, ...]
    rotates: tuple[bool, ...]
    original: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @staticmethod
    def of(param: Tensor, group: dict[str, Any]) -> Layout:
        shape = tuple(param.shape) or (1,)
        channels_last = group["merge_dims"] and group["data_format"] == "channels_last" and len(shape) == 4
        if group["merge_dims"] and len(shape) > 1:
            ordered = (shape[0], shape[3], shape[1], shape[2]) if channels_last else shape
            shape = _merged(ordered, group["max_precond_dim"])
        vector = param.ndim < 2 and not group["precondition_1d"]
        rotates = tuple(1 < size <= group["max_precond_dim"] and not vector for size in shape)
        return Layout(shape, rotates, tuple(param.shape), param.dtype, channels_last)

    def gradients(self, params: list[Tensor]) -> Tensor:
        """The gradients of `params`, stacked, in this layout and at least in float32."""
        stacked = torch.stack([_whole(param.grad) for param in params])
        stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        return (stacked.permute(0, 1, 4, 2, 3) if self.channels_last else stacked).reshape(len(params), *self.shape)

    def restored(self, x: Tensor) -> tuple[Tensor, ...]:
        """A stack of tensors in this layout, one by one in the parameters' own shape and dtype."""
        x = x.to(self.dtype)
        if not self.channels_last:
            return x.reshape(len(x), *self.original).unbind()
        n, height, width, channels = self.original
        return x.reshape(len(x), n, channels, height, width).permute(0, 1, 3, 4, 2).unbind()


class Batch:
    """The state of parameters that are stepped together, stacked; each parameter's own state is a view into it."""

    def __init__(self, layout: Layout, params: list[Tensor], state: dict[Tensor, Any]) -> None:
        for param in params:
            _check_state(state[param], layout)
        self.layout = layout
        self.params = params
        self.exp_avg = torch.stack([state[p]["exp_avg"] for p in params])
        self.exp_avg_sq = torch.stack([state[p]["exp_avg_sq"] for p in params])
        dimensions = range(len(state[params[0]]["Q"]))
        self.factors: Bases = [_stacked([state[p]["GG"][i] for p in params]) for i in dimensions]
        self.bases: Bases = [_stacked([state[p]["Q"][i] for p in params]) for i in dimensions]
        for j, param in enumerate(params):
            state[param]["exp_avg"] = self.exp_avg[j]
            state[param]["exp_avg_sq"] = self.exp_avg_sq[j]
            state[param]["GG"] = [None if factor is None else factor[j] for factor in self.factors]
            state[param]["Q"] = [None if basis is None else basis[j] for basis in self.bases]
        self._views = [state[param]["exp_avg"] for param in params]

    def is_current(self, state: dict[Tensor, Any]) -> bool:
        """Whether the parameters' states are still views into this batch."""
        return all(state[p]["exp_avg"] is view for p, view in zip(self.params, self._views, strict=True))

    def advance(self, state: dict[Tensor, Any]) -> int:
        for param in self.params:
            state[param]["step"] += 1
        return int(state[self.params[0]]["step"])

    def due(self, state: dict[Tensor, Any], group: dict[str, Any], offset: int) -> slice | None:
        """The members whose bases are refreshed at this step; spread ones `offset` steps before their turn."""
        if not any(self.layout.rotates):
            return None
        step, spread = state[self.params[0]]["step"], group["spread_refresh"]
        step += offset if spread else 0
        return due_members(len(self.params), step, group["precondition_frequency"], spread=spread)

    def bases_of(self, members: slice) -> Bases:
        return [None if basis is None else basis[members] for basis in self.bases]


def _check_state(state: dict[str, Any], layout: Layout) -> None:
    """Raise where `state` is not that of a parameter seen in this `layout`."""
    present = tuple(factor is not None for factor in state["GG"])
    if tuple(state["exp_avg"].shape) != layout.shape or present != layout.rotates:
        raise InvalidArgumentError(
            f"SOAP's state for a parameter of shape {layout.original} is that of another: it is "
            f"{tuple(state['exp_avg'].shape)} with rotated dimensions {present}, expected {layout.shape} with "
            f"{layout.rotates}. Load the state of this model, and keep merge_dims, max_precond_dim and precondition_1d"
        )


def refresh(due: list[tuple[Batch, slice]]) -> None:
    """Take one step of orthogonal iteration with the bases of these members, and turn their moments along.

    Factors of one size are refreshed together, whatever batch they belong to.
    """
    unrotated = [rotated_back(batch.exp_avg[members], batch.bases_of(members)) for batch, members in due]
    alike: dict[Any, list[tuple[Batch, slice, int, Tensor, Tensor]]] = {}
    for batch, members in due:
        for i, (factor, basis) in enumerate(zip(batch.factors, batch.bases, strict=True)):
            if factor is not None and basis is not None:
                key = (factor.shape[-1], factor.dtype, factor.device)
                alike.setdefault(key, []).append((batch, members, i, factor[members], basis[members]))
    for (size, _, _), jobs in alike.items():
        counts = [len(job[3]) for job in jobs]
        chunk = max(1, _REFRESH_ENTRIES // size**2)
        factors = torch.cat([job[3] for job in jobs]).split(chunk)
        bases = torch.cat([job[4] for job in jobs]).split(chunk)
        steps = [power_step(factor, basis) for factor, basis in zip(factors, bases, strict=True)]
        new, order = (torch.cat(parts).split(counts) for parts in zip(*steps, strict=True))
        for j, (batch, members, i, _, basis) in enumerate(jobs):
            basis.copy_(new[j])
            squares = batch.exp_avg_sq[members]
            index = order[j].reshape(len(squares), *(-1 if k == i else 1 for k in range(squares.ndim - 1)))
            squares.copy_(squares.gather(i + 1, index.expand_as(squares)))
    for (batch, members), momentum in zip(due, unrotated, strict=True):
        batch.exp_avg[members] = rotated(momentum, batch.bases_of(members))


def due_members(count: int, step: int, frequency: int, *, spread: bool) -> slice | None:
    """Which members of a batch are refreshed at this step: all of them at once, or a share at every step."""
    phase = step % frequency
    if not spread:
        return slice(0, count) if phase == 0 else None
    first, last = phase * count // frequency, (phase + 1) * count // frequency
    return slice(first, last) if last > first else None


def _merged(shape: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """`shape` with neighbouring dimensions multiplied as long as their product stays within `limit`."""
    merged, current = [], 1
    for size in shape:
        if current * size <= limit:
            current *= size
        elif current > 1:
            merged.append(current)
            current = size
        else:
            merged.append(size)
    return tuple([*merged, current] if current > 1 or not merged else merged)


def _stacked(tensors: list[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present) if present else None


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
