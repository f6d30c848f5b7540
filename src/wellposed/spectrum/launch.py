"""Launches of Triton kernels that cost the host little.

At every launch Triton looks at every argument, to find what it has compiled for such ones: most of the time that a
launch spends in Python. Here what it has found is kept.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_HERE = nullcontext()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Within this kernels start on `device`; otherwise on the current one, whatever tensors they are given."""
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _HERE if here else torch.cuda.device(device)


class Launch:
    """A kernel with all of its arguments but tensors and floating-point numbers, which come first.

    One of these is for tensors of one device and of the same types, shapes and strides. All that Triton looks at is the
    same then, but for whether a tensor starts at a multiple of 16 bytes: where one does not, Triton is asked. Tensors
    that are given by a descriptor always start at such a multiple, and may be of any shape; they come first.

    A kept launch does without the kernel's `pre_run_hooks` and Triton's check that no global variable has changed.

    Args:
        kernel: made by triton.jit.
        grid: programs along three axes.
        numbers: the arguments that follow, all whole numbers.
        constants: those that follow these, which the kernel is compiled for.
        options: what else Triton is told, such as `num_warps`.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        numbers: tuple[int, ...],
        constants: dict[str, Any],
        **options: Any,
    ) -> None:
        self.grid = grid
        self._kernel, self._numbers, self._named = kernel, numbers, constants | options
        self._always = (*numbers, *constants.values())
        self._found: Any = None

    def __call__(self, tensors: tuple[Tensor, ...], *factors: float, described: tuple[Any, ...] = ()) -> None:
        starts = 0
        for each in tensors:
            starts |= each.data_ptr()
        if starts % 16:
            self._by_triton(described + tensors, factors)
        elif self._found is None:
            found = self._by_triton(described + tensors, factors)
            # Triton's interpreter finds none. Found[...] would not do for what is still being compiled.
            self._found = None if found is None else found.__getitem__(self.grid)
        else:
            self._found(*described, *tensors, *factors, *self._always)

    def _by_triton(self, tensors: tuple[Any, ...], factors: tuple[float, ...]) -> Any:
        return self._kernel[self.grid](*tensors, *factors, *self._numbers, **self._named)
