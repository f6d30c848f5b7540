"""The singular values of a function's Jacobian: all of them when it is small, its extremes and density when it is not.

Large Jacobians are never formed. Golub-Kahan bidiagonalization with full reorthogonalization takes products J v and
J^T u; the small bidiagonal matrix it builds has singular values that approach the largest of J from below, a smallest
one that lies above that of J, and, from random starts, the nodes and weights of stochastic Lanczos quadrature for J's
density.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed.errors import InvalidArgumentError

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class JacobianSpectrum:
    """What is known about the singular values of a Jacobian of the given shape."""

    shape: tuple[int, int]
    largest: Tensor
    """The k largest, the largest first."""
    errors: Tensor
    """A bound on the distance of each to the nearest singular value; 0 where all were computed."""
    smallest: float
    """The smallest, or an upper bound on it."""
    is_exact: bool
    """Whether all singular values were computed."""
    nodes: Tensor
    """Singular values that stand for the whole spectrum ..."""
    weights: Tensor
    """... each with its share of it; they add up to 1."""

    @property
    def condition_number(self) -> float:
        """The largest over the smallest; a lower bound where the spectrum is not exact."""
        return float(self.largest[0]) / self.smallest if self.smallest else float("inf")


def jacobian_spectrum(
    function: Function,
    x: Tensor,
    k: int = 8,
    *,
    steps: int | None = None,
    starts: int = 4,
    dense_entries: int = 2**22,
    generator: torch.Generator | None = None,
) -> JacobianSpectrum:
    """The spectrum of the Jacobian of `function`, such as a sub-block of a model, at the input `x`.

    Args:
        function: differentiable, from a tensor like `x` to a tensor. A module should be in eval mode.
        x: a floating-point tensor; everything is computed in its type.
        k: how many of the largest singular values to return.
        steps: of the bidiagonalization, at least k; 4 k + 24 if None.
        starts: random vectors that the density is estimated from; the extremes are the best of all of them.
        dense_entries: a Jacobian with at most so many entries is formed and decomposed.
        generator: of the random vectors, on the device of `x`.
    """
    if not x.is_floating_point() or not x.isfinite().all():
        raise InvalidArgumentError(f"x is {x.dtype} with NaN, Inf or no floating point: expected finite numbers")
    if k < 1 or starts < 1 or (steps is not None and steps < k):
        raise InvalidArgumentError(f"k={k}, steps={steps}, starts={starts}: expected at least 1, and steps at least k")
    x = x.detach()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        # The fused kernels have no forward-mode derivative, and torch warns of itself when it first takes one.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        output = function(x)
        rows, columns = output.numel(), x.numel()
        if rows * columns <= dense_entries:
            return _dense(function, x, min(k, rows, columns))
        count = min(steps or 4 * k + 24, rows, columns)
        return _by_lanczos(function, x, output, min(k, count), count, starts, generator)


def _dense(function: Function, x: Tensor, k: int) -> JacobianSpectrum:
    jacobian = torch.func.jacrev(function)(x).reshape(-1, x.numel())
    values = torch.linalg.svdvals(jacobian.double()).to(x.dtype)
    share = torch.full_like(values, 1 / len(values))
    shape = (jacobian.shape[0], jacobian.shape[1])
    return JacobianSpectrum(shape, values[:k], torch.zeros_like(values[:k]), float(values[-1]), True, values, share)


def _by_lanczos(
    function: Function, x: Tensor, output: Tensor, k: int, steps: int, starts: int, generator: torch.Generator | None
) -> JacobianSpectrum:
    def forward(v: Tensor) -> Tensor:
        return torch.func.jvp(function, (x,), (v,))[1]

    backward = torch.func.vjp(function, x)[1]
    shape = (output.numel(), x.numel())
    # Seen from its smaller side, so that no vector lies where the Jacobian is 0 for want of rows.
    products: tuple[Function, Function] = forward, lambda u: backward(u)[0]
    near, far = (x, output) if shape[1] <= shape[0] else (output, x)
    products = products if near is x else products[::-1]
    best: tuple[Tensor, Tensor] | None = None
    smallest, nodes, weights = float("inf"), [], []
    for _ in range(starts):
        start = torch.randn(near.shape, dtype=x.dtype, device=x.device, generator=generator)
        bidiagonal, remainder = _bidiagonalize(*products, start, far, steps)
        left, values, right = torch.linalg.svd(bidiagonal)
        errors = (remainder * left[-1].abs())[:k]
        if best is None or values[0] > best[0][0]:
            best = values[:k], errors
        smallest = min(smallest, float(values[-1]))
        nodes.append(values)
        weights.append(right[:, 0].square() / starts)
    assert best is not None
    found = [part.to(x.dtype) for part in (*best, torch.cat(nodes), torch.cat(weights))]
    return JacobianSpectrum(shape, found[0], found[1], smallest, False, found[2], found[3])


def _bidiagonalize(
    forward: Function, backward: Function, start: Tensor, output: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """B, upper bidiagonal in float64, with J V = U B and J^T U = V B^T + remainder v u^T; and the remainder."""
    vectors_v = start.new_zeros(steps, start.numel())
    vectors_u = output.new_zeros(steps, output.numel())
    bidiagonal = torch.zeros(steps, steps, dtype=torch.float64, device=start.device)
    v = start.flatten() / start.norm()
    remainder = torch.zeros((), dtype=torch.float64, device=start.device)
    for j in range(steps):
        vectors_v[j] = v
        u = forward(v.view(start.shape)).flatten()
        if j:
            u = u - remainder.to(u.dtype) * vectors_u[j - 1]
        u = _orthogonal(u, vectors_u[:j])
        alpha = u.norm()
        bidiagonal[j, j] = alpha
        vectors_u[j] = u / alpha if alpha > 0 else u
        v = backward(vectors_u[j].view(output.shape)).flatten() - alpha * v
        v = _orthogonal(v, vectors_v[: j + 1])
        remainder = v.norm().double()
        if remainder <= 8 * torch.finfo(start.dtype).eps * bidiagonal.max():  # an invariant subspace: all is found
            return bidiagonal[: j + 1, : j + 1], remainder
        if j + 1 < steps:
            bidiagonal[j, j + 1] = remainder
        v = v / remainder.to(v.dtype)
    return bidiagonal, remainder


def _orthogonal(vector: Tensor, basis: Tensor) -> Tensor:
    """`vector` without its part in the span of `basis`, taken out twice against rounding."""
    for _ in range(2):
        vector = vector - basis.T @ (basis @ vector)
    return vector
