"""The products of per-sample gradients of layers that are linear in their parameters.

A layer y_t = W a_t + b of T tokens has, by W and b, the gradient sum over t of g_t (a_t, 1)^T, with g the gradient by
y: what it has seen, a, and g stand for it. Any other parameter is a layer of one token whose input is 1.

Shapes: N samples, Q rows of gradients per sample. A layer is S maps, the groups of a convolution, of T tokens with I
features to O features.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOVED = 64.0
"""Operations in the time that a number takes which is written to memory and read again; measured on a CPU."""


class Size(NamedTuple):
    """How large a layer is for one sample."""

    S: int
    T: int
    I: int  # noqa: E741
    O: int  # noqa: E741
    is_lookup: bool = False
    """Whether its input is one of I ids, which are compared instead of multiplied."""

    def costs(self, N: int, Q: int) -> tuple[float, float]:
        """Of the two forms of `Layer.products`: gradients written down, and pairs of tokens."""
        S, T, I, O = self[:4]  # noqa: E741
        written = S * I * O * N * Q * (2.0 * (T + N * Q) + MOVED)
        paired = S * (N * T) ** 2 * ((1.0 if self.is_lookup else 2.0 * I) + Q**2 * (2.0 * O + MOVED))
        return written, paired


class Layer(NamedTuple):
    """Where parameters enter: the output of a module that is linear in them or, without a module, they themselves."""

    names: tuple[str, ...]
    size: Size
    module: Any = None

    def shifted(self, output: Tensor, shift_STO: Tensor) -> Tensor:
        """The module's output plus a shift, whose gradient is that of the output."""
        if isinstance(self.module, nn.Conv2d):
            shift_STO = shift_STO.unflatten(1, (len(output), -1)).permute(1, 0, 3, 2)
        return output + shift_STO.reshape(output.shape)

    def inputs(self, seen: Tensor) -> Tensor:
        """What the module has `seen` (N, ...), as a_NSTI with a 1 beside it for a bias, or as ids_NST."""
        n, module = len(seen), self.module
        if module is None:
            return seen.view(n, 1, 1, 1)
        if isinstance(module, nn.Embedding):
            ids = seen.reshape(n, 1, -1)
            return ids if module.padding_idx is None else ids.masked_fill(ids == module.padding_idx, -1)
        if isinstance(module, nn.Conv2d):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            padded = F.pad(seen.flatten(0, 1), module._reversed_padding_repeated_twice, mode)
            patches = F.unfold(padded, module.kernel_size, module.dilation, stride=module.stride)
            a = patches.unflatten(0, (n, -1)).unflatten(2, (module.groups, -1)).permute(0, 2, 1, 4, 3).flatten(2, 3)
        else:
            a = seen.reshape(n, 1, -1, seen.shape[-1])
        factors = [a] if module.weight.requires_grad else []
        if module.bias is not None and module.bias.requires_grad:
            factors.append(torch.ones_like(a[..., :1]))
        return torch.cat(factors, -1)

    def products(self, seen: Tensor, g_NQSTO: Tensor, memory: int) -> Tensor:
        """The products of the rows of gradients, (N Q, N Q), by the form of fewer operations.

        Gradients are written down and multiplied, or (g_t . g_s) (a_t . a_s) is added up over pairs of tokens.
        """
        a = self.inputs(seen)
        written, paired = self.size._replace(O=g_NQSTO.shape[-1]).costs(*g_NQSTO.shape[:2])
        if written > paired:
            return _of_pairs(a, g_NQSTO, memory)
        if self.size.is_lookup:
            a = (a[..., None] == torch.arange(self.size.I, device=a.device)).to(g_NQSTO.dtype)
        return _of_written(a, g_NQSTO, memory)


def _of_written(a_NSTI: Tensor, g_NQSTO: Tensor, memory: int) -> Tensor:
    N, Q, S = g_NQSTO.shape[:3]
    total = torch.zeros(N * Q, N * Q, dtype=torch.float64, device=g_NQSTO.device)
    # Of more than some megabytes, nothing is left in the caches when it is to be multiplied.
    step = max(1, min(memory, 2**24) // (N * Q * S * a_NSTI.shape[-1] * a_NSTI.itemsize))
    for part in g_NQSTO.split(step, -1):
        rows = (part.mT @ a_NSTI[:, None]).view(N * Q, -1)
        total += rows @ rows.T
    return total


def _of_pairs(a: Tensor, g_NQSTO: Tensor, memory: int) -> Tensor:
    """With a_NSTI, or ids_NST of which only equal ones, and none below 0, have products."""
    N, Q, S, T, _ = g_NQSTO.shape
    total = torch.zeros(N * Q, N * Q, dtype=torch.float64, device=g_NQSTO.device)
    a = a.transpose(0, 1).flatten(1, 2)
    g_SRO = g_NQSTO.permute(2, 0, 1, 3, 4).flatten(1, 3)
    step = max(1, memory // (S * N * (Q * T) ** 2 * g_SRO.itemsize))
    for start in range(0, N, step):
        stop = min(start + step, N)
        some = a[:, start * T : stop * T]
        of_a = some @ a.mT if a.ndim == 3 else (some[:, :, None] == a[:, None]) & (some[:, :, None] >= 0)
        of_g = g_SRO[:, start * Q * T : stop * Q * T] @ g_SRO.mT
        pairs = of_g.view(S, -1, Q, T, N, Q, T) * of_a.view(S, -1, 1, T, N, 1, T)
        total[start * Q : stop * Q] = pairs.sum((0, 3, 6)).view(-1, N * Q)
    return total
