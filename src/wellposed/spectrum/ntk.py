"""The empirical neural tangent kernel of a model on a batch, by the cheapest contraction (arXiv 2206.08720).

Theta[(n, k), (m, l)] = sum over the trained parameters p of df_k(x_n)/dp df_l(x_m)/dp. Two ways to it:

* "structured": one forward pass and K backward passes to the outputs of the layers. Layer by layer the samples'
  gradients are then written down and multiplied, which is the Jacobian contraction without ever a whole Jacobian, or
  multiplied token by token without writing them down, which is cheaper where tokens are few.
* "products": Theta e for every unit vector e, a backward pass followed by a forward-mode one over the batch. These
  N^2 K passes are cheaper than N^2 K^2 products of gradients where the outputs outnumber the tokens.

Shapes: N samples of K outputs; Q rows of the matrix per sample. Layers have S groups, T tokens, O output features.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgumentError
from wellposed.spectrum.layer_gradients import Found, Run, Values, evaluated, find_layers, outputs_of, run_per_sample
from wellposed.spectrum.layer_products import MOVED, Layer, Size

Outputs = Literal["trace", "all"]
Method = Literal["auto", "structured", "products"]
Group = list[tuple[int, slice]]


@dataclass(frozen=True)
class NTK:
    """The kernel of a batch."""

    gram: Tensor
    """(N, N), the mean over outputs of their kernels, or (N K, N K) with the outputs of a sample side by side."""
    eigenvalues: Tensor
    """Of the Gram matrix, the largest first."""
    method: str
    """Which contraction was used."""
    costs: dict[str, float]
    """What each of them was expected to cost, in floating-point operations."""
    dtype: torch.dtype
    """In which derivatives were taken; their products are added up in float64."""

    @property
    def condition_number(self) -> float:
        """The largest eigenvalue over the smallest; infinity where the smallest is no more than rounding errors."""
        largest, smallest = float(self.eigenvalues[0]), float(self.eigenvalues[-1])
        rounding = len(self.eigenvalues) * torch.finfo(self.dtype).eps
        return largest / smallest if smallest > rounding * largest else math.inf


def ntk(
    model: nn.Module, x: Tensor, *, outputs: Outputs = "trace", method: Method = "auto", memory: int = 2**30
) -> NTK:
    """The Gram matrix of the gradients of a model's outputs on a batch, over the parameters that require gradients.

    The model is looked at in eval mode and left as it was. Derivatives are taken in its own type, or in float32 where
    that is of 16 bits.

    Args:
        model: from a batch to (N, ...), or to an object with such `logits`; all but the first dimension are outputs.
            Its samples must not depend on each other, nor what it does on their values: it runs under `vmap`.
        x: the batch, of images or token ids for example.
        outputs: "trace" for the mean over the K outputs of each one's (N, N) kernel, "all" for the (N K, N K) one.
        method: "structured" or "products", or "auto" for the one of fewer operations.
        memory: bytes for what the model keeps for backward passes, for gradients and for their products, each. With
            less, more is computed again.

    Example:
        >>> line = nn.Linear(2, 1, dtype=torch.float64)
        >>> ntk(line, torch.eye(2)).gram  # x . x' + 1, the 1 for the bias
        tensor([[2., 1.],
                [1., 2.]], dtype=torch.float64)
    """
    if outputs not in get_args(Outputs) or method not in get_args(Method) or memory < 1:
        raise InvalidArgumentError(
            f"outputs={outputs!r}, method={method!r}, memory={memory}: expected one of {get_args(Outputs)}, one of "
            f"{get_args(Method)} and at least one byte"
        )
    if not isinstance(x, Tensor) or x.ndim == 0 or x.numel() == 0 or not x.isfinite().all():
        given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InvalidArgumentError(f"x is {given}: expected a tensor of at least one sample, without NaN or Inf")
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    if not trained:
        raise InvalidArgumentError("no parameter of the model requires gradients: call requires_grad_() on some")
    with evaluated(model) as values:
        dtype = values[trained[0]].dtype
        x = x.detach().clone().to(dtype if x.is_floating_point() else x.dtype)
        found = find_layers(model, values, trained, x[:1])
        sizes = [layer.size for layer in found.layers]
        plan = _plan(sizes, len(x), found.outputs, outputs, found.saved, memory, dtype.itemsize)
        costs = contraction_costs(sizes, found.operations, len(x), found.outputs, outputs, *plan.repeats(len(x)))
        chosen = min(costs, key=lambda name: costs[name]) if method == "auto" else method
        if chosen == "products":
            gram = _by_products(model, values, trained, x, found, outputs, memory)
        else:
            gram = _structured(model, values, found.layers, x, outputs, plan, memory)
    if not gram.isfinite().all():
        raise InvalidArgumentError("a gradient of the model on x is NaN or Inf: expected finite parameters and outputs")
    gram = (gram + gram.mT) / 2
    return NTK(gram, torch.linalg.eigvalsh(gram).flip(0), chosen, costs, dtype)


def contraction_costs(
    sizes: list[Size], forward: float, N: int, K: int, outputs: Outputs, forwards: int = 1, backwards: int = 1
) -> dict[str, float]:
    """The floating-point operations of each method; numbers that pass through memory count as `MOVED` each.

    With `forward` operations in a sample's forward pass, a backward pass to the outputs of the layers takes as many;
    one to the parameters, and a tangent that is carried forward, take twice as many. For want of memory the structured
    method may have to repeat its `forwards` and `backwards`.
    """
    Q, width = (1, K) if outputs == "trace" else (K, 1)
    contractions = sum(min(size._replace(O=size.O * width).costs(N, Q)) for size in sizes)
    directions = N * K * sum(size.S * size.I * size.O for size in sizes)
    return {
        "structured": N * forward * (forwards + backwards * K) + contractions,
        "products": N * forward * (1 + 2 * K) * (1 + (N + 1) / 2) + MOVED * directions,
    }


class _Plan(NamedTuple):
    """What the structured method holds in memory at once."""

    samples: int
    """That go through the model together."""
    pieces: list[range]
    """The outputs, in parts."""
    groups: list[Group]
    """The layers and which of their features, in parts."""

    def repeats(self, N: int) -> tuple[int, int]:
        return 1 if self.samples >= N else len(self.pieces) * len(self.groups), len(self.groups)


def _plan(sizes: list[Size], N: int, K: int, outputs: Outputs, saved: int, memory: int, itemsize: int) -> _Plan:
    of_output = itemsize * sum(size.S * size.T * size.O for size in sizes)
    at_once = K if outputs == "all" else min(K, max(1, memory // (N * of_output)))
    groups: list[Group] = [[]]
    room = memory
    for i, size in enumerate(sizes):
        of_feature = N * at_once * size.S * size.T * itemsize
        step = min(size.O, max(1, memory // of_feature))
        for start in range(0, size.O, step):
            part = slice(start, min(start + step, size.O))
            need = of_feature * (part.stop - part.start)
            if need > room and groups[-1]:
                groups.append([])
                room = memory
            groups[-1].append((i, part))
            room -= need
    pieces = [range(start, min(start + at_once, K)) for start in range(0, K, at_once)]
    return _Plan(max(1, memory // (saved + of_output)), pieces, groups)


def _structured(
    model: nn.Module, values: Values, layers: list[Layer], x: Tensor, outputs: Outputs, plan: _Plan, memory: int
) -> Tensor:
    whole = run_per_sample(model, values, layers, x) if plan.samples >= len(x) else None
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for piece, group in itertools.product(plan.pieces, plan.groups):
        gradients = [
            values[layers[i].names[0]].new_empty(len(x), len(piece), *layers[i].size[:2], part.stop - part.start)
            for i, part in group
        ]
        seen: list[list[Tensor]] = [[] for _ in group]
        for start in range(0, len(x), plan.samples):
            some = slice(start, start + plan.samples)
            run = whole or run_per_sample(model, values, layers, x[some])
            _fill([g_NKSTO[some] for g_NKSTO in gradients], run, piece, group)
            for of_layer, (i, _) in zip(seen, group, strict=True):
                of_layer.append(run.seen[i])
        for (i, _), of_layer, g_NKSTO in zip(group, seen, gradients, strict=True):
            g_NQSTO = g_NKSTO if outputs == "all" else g_NKSTO.permute(0, 2, 3, 1, 4).flatten(3)[:, None]
            total = total + layers[i].products(torch.cat(of_layer), g_NQSTO, memory)
    return total if outputs == "all" else total / plan.pieces[-1].stop


def _fill(gradients: list[Tensor], run: Run, piece: range, group: Group) -> None:
    """Writes the gradients (N, K, S, T, O) of a piece of the outputs by a group of layers."""
    leaves = [run.leaves[i] for i, _ in group]
    for column, k in enumerate(piece):
        of_k = torch.autograd.grad(run.outputs[:, k].sum(), leaves, retain_graph=True, materialize_grads=True)
        for g_NKSTO, g_NSTO, (_, part) in zip(gradients, of_k, group, strict=True):
            g_NKSTO[:, column] = g_NSTO[..., part]


def _by_products(
    model: nn.Module, values: Values, trained: list[str], x: Tensor, found: Found, outputs: Outputs, memory: int
) -> Tensor:
    params = {name: values[name] for name in trained}
    at_once = max(1, memory // (found.saved + sum(param.nbytes for param in params.values())))
    N, K, Q = len(x), found.outputs, 1 if outputs == "trace" else found.outputs
    gram_NQNQ = torch.zeros(N, Q, N, Q, dtype=torch.float64, device=x.device)

    def function(x: Tensor) -> Callable[[Values], Tensor]:
        return lambda params: outputs_of(model, values | params, x)

    def product(pull_back: Callable[[Tensor], tuple[Values]], x_M: Tensor, unit_K: Tensor) -> Tensor:
        return torch.func.jvp(function(x_M), (params,), pull_back(unit_K[None]))[1]

    samples = max(1, memory // max(1, found.saved))
    for n in range(N):
        output_1K, pull_back = torch.func.vjp(function(x[n : n + 1]), params)[:2]
        for start in range(n, N, samples):  # what comes before n is known by symmetry
            x_M = x[start : start + samples]
            theta_KMK = torch.func.vmap(partial(product, pull_back, x_M), chunk_size=at_once)(
                torch.eye(K).to(output_1K)
            )
            theta_QMQ = torch.einsum("kmk->m", theta_KMK / K)[None, :, None] if outputs == "trace" else theta_KMK
            gram_NQNQ[n, :, start : start + samples] = theta_QMQ
    gram = gram_NQNQ.view(N * Q, N * Q).triu()
    return gram + gram.triu(1).mT
