"""Parameters that are stepped together: how each is seen, and their stacked state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from wellposed.errors import InvalidArgumentError
from wellposed.optim.rotation import Bases

Tensors = list[Tensor] | tuple[Tensor, ...]


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
        dtype = torch.promote_types(self.dtype, torch.float32)
        stacked = torch.empty(len(params), *self.shape, dtype=dtype, device=params[0].device)
        copy_gradients_(self.views(stacked), params)
        return stacked

    def views(self, x: Tensor) -> Tensors:
        """A stack of tensors in this layout, one by one in the parameters' own shape."""
        if not self.channels_last:
            return x.view(len(x), *self.original).unbind()
        n, height, width, channels = self.original
        return x.view(len(x), n, channels, height, width).permute(0, 1, 3, 4, 2).unbind()


class Batch:
    """The state of parameters that are stepped together, stacked; each parameter's own state is a view into it.

    `work` holds their gradients before a step and their updates after it.
    """

    def __init__(self, layout: Layout, params: list[Tensor], state: dict[Tensor, Any]) -> None:
        for param in params:
            _check_state(state[param], layout)
        self.layout = layout
        self.params = params
        self.exp_avg = torch.stack([state[p]["exp_avg"] for p in params])
        self.exp_avg_sq = torch.stack([state[p]["exp_avg_sq"] for p in params])
        self.work = torch.empty_like(self.exp_avg)
        self.work_views = layout.views(self.work)
        dimensions = range(len(state[params[0]]["Q"]))
        self.factors: Bases = [_stacked([state[p]["GG"][i] for p in params]) for i in dimensions]
        self.bases: Bases = [_stacked([state[p]["Q"][i] for p in params]) for i in dimensions]
        for j, param in enumerate(params):
            state[param]["exp_avg"] = self.exp_avg[j]
            state[param]["exp_avg_sq"] = self.exp_avg_sq[j]
            state[param]["GG"] = [None if factor is None else factor[j] for factor in self.factors]
            state[param]["Q"] = [None if basis is None else basis[j] for basis in self.bases]
        self._states = [state[param] for param in params]
        self._views = [own["exp_avg"] for own in self._states]

    def is_current(self, state: dict[Tensor, Any]) -> bool:
        """Whether the parameters' states are still views into this batch."""
        held = zip(self.params, self._states, self._views, strict=True)
        return all(state[param] is own and own["exp_avg"] is view for param, own, view in held)

    def advance(self) -> int:
        for own in self._states:
            own["step"] += 1
        return int(self._states[0]["step"])

    def updates(self) -> Tensors:
        """The updates in `work`, one by one in the parameters' own shape and dtype."""
        if self.work.dtype == self.layout.dtype:
            return self.work_views
        return self.layout.views(self.work.to(self.layout.dtype))

    def due(self, group: dict[str, Any], offset: int) -> slice | None:
        """The members whose bases are refreshed at this step; spread ones `offset` steps before their turn."""
        if not any(self.layout.rotates):
            return None
        step, spread = self._states[0]["step"], group["spread_refresh"]
        step += offset if spread else 0
        return due_members(len(self.params), step, group["precondition_frequency"], spread=spread)

    def bases_of(self, members: slice) -> Bases:
        return [None if basis is None else basis[members] for basis in self.bases]


def copy_gradients_(views: Tensors, params: list[Tensor]) -> None:
    """Write the gradients of `params`, sharded ones gathered, into `views`."""
    torch._foreach_copy_(views, [_whole(param.grad) for param in params])


def due_members(count: int, step: int, frequency: int, *, spread: bool) -> slice | None:
    """Which members of a batch are refreshed at this step: all of them at once, or a share at every step."""
    phase = step % frequency
    if not spread:
        return slice(0, count) if phase == 0 else None
    first, last = phase * count // frequency, (phase + 1) * count // frequency
    return slice(first, last) if last > first else None


def _check_state(state: dict[str, Any], layout: Layout) -> None:
    """Raise where `state` is not that of a parameter seen in this `layout`."""
    present = tuple(factor is not None for factor in state["GG"])
    if tuple(state["exp_avg"].shape) != layout.shape or present != layout.rotates:
        raise InvalidArgumentError(
            f"SOAP's state for a parameter of shape {layout.original} is that of another: it is "
            f"{tuple(state['exp_avg'].shape)} with rotated dimensions {present}, expected {layout.shape} with "
            f"{layout.rotates}. Load the state of this model, and keep merge_dims, max_precond_dim and precondition_1d"
        )


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
