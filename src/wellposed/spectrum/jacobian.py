"""The singular values of a function's Jacobian: all of them when it is small, its extremes and density when it is not.

Large Jacobians are never formed. Block Golub-Kahan bidiagonalization multiplies a few vectors at a time by J and J^T
and builds orthonormal U and V with J V = U B. The i-th largest singular value of the small matrix B lies below that of
J and approaches it, the i-th smallest lies above that of J; and as V starts from random vectors, the singular values of
B are the nodes of stochastic Lanczos quadrature for the density of those of J.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed.errors import InvalidArgumentError
from wellposed.spectrum.modes import in_eval_mode

Which = Literal["both", "largest", "smallest"]
_Rows = Callable[[Tensor], Tensor]

_ROUNDING = 32
"""What rounding does to a singular value, in units of the type's precision times the largest; by trial, at most 20."""


@dataclass(frozen=True)
class JacobianSpectrum:
    """What is known about the min(shape) singular values of a Jacobian of the given shape."""

    shape: tuple[int, int]
    largest: Tensor
    """The k largest, the largest first; those found matrix-free are lower bounds. Empty if not asked for."""
    largest_errors: Tensor
    """Within such a distance of each there is a singular value of the Jacobian."""
    smallest: Tensor
    """The k smallest, the smallest first; those found matrix-free are upper bounds. Empty if not asked for."""
    smallest_errors: Tensor
    """Within such a distance of each there is a singular value of the Jacobian; a still smaller one may be missed."""
    is_exact: bool
    """Whether all singular values were computed, to rounding."""
    nodes: Tensor
    """Singular values that stand for the whole spectrum, the largest first ..."""
    shares: Tensor
    """... and for each random start, (starts, nodes), the share of the spectrum at each node; each row adds up to 1."""
    products: int
    """How many products J v and J^T u it took."""

    @property
    def weights(self) -> Tensor:
        """The share of the spectrum at each node, over all starts: `plt.hist(s.nodes, weights=s.weights)`."""
        return self.shares.mean(0)

    @property
    def condition_number(self) -> float:
        """The largest over the smallest, infinite if that is lost in rounding; NaN unless both were asked for.

        A lower bound where the spectrum is not exact.
        """
        if not len(self.largest) or not len(self.smallest):
            return float("nan")
        lost = self.smallest[0] <= _ROUNDING * torch.finfo(self.nodes.dtype).eps * self.largest[0]
        return float("inf") if lost else float(self.largest[0] / self.smallest[0])

    def mean(self, function: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        """The mean of `function` over all singular values, and its standard error over the starts, NaN if only one.

        Example:
            >>> spectrum = jacobian_spectrum(torch.nn.Identity(), torch.ones(5))
            >>> spectrum.mean(torch.square)  # ||J||_F^2 / 5
            (1.0, 0.0)
        """
        means = self.shares @ function(self.nodes).to(self.shares.dtype)
        if self.is_exact:
            return float(means), 0.0
        error = float(means.std()) / len(means) ** 0.5 if len(means) > 1 else float("nan")
        return float(means.mean()), error


def jacobian_spectrum(
    module: Callable[[Tensor], Any],
    x: Tensor,
    k: int = 8,
    which: Which = "both",
    *,
    tol: float = 1e-3,
    steps: int | None = None,
    starts: int | None = None,
    dense_entries: int = 2**22,
    generator: torch.Generator | None = None,
) -> JacobianSpectrum:
    """The singular values of the Jacobian of `module`, such as a sub-block of a model, at the input `x`.

    Args:
        module: twice differentiable in torch, from a tensor like `x` to a tensor; of a tuple, as attention in
            HuggingFace models returns, the first element counts. An nn.Module is measured in eval mode and left in the
            mode it was in; another function has to give the same output each time.
        x: of float32 or float64, in which everything is computed, outside any autocast. For a model in half precision
            pass `model.float()` and `x.float()`.
        k: how many singular values to return from each end that is asked for.
        which: "largest" takes the products that the k largest need and no more; "smallest" and "both" take the same
            ones, all steps of them. There is no way to be sure of the smallest from products alone.
        tol: "largest" stops once the errors of all k are below `tol` times the largest.
        steps: of the bidiagonalization, at least k; 2 k + 24 if None, and for "largest" up to four times as many.
        starts: random vectors to start from, each with one product of either kind a step; 1 for "largest" and otherwise
            4 if None. The density is a mean over them. A multiple singular value may be found so many times only.
        dense_entries: a Jacobian with at most so many entries is formed and decomposed; a larger one only if the
            vectors of all steps would fill its smaller side.
        generator: of the random vectors, on the device of `x`.

    Example:
        >>> spectrum = jacobian_spectrum(torch.sin, torch.tensor([0.0, torch.pi / 3]))
        >>> spectrum.largest, spectrum.smallest
        (tensor([1.0000, 0.5000]), tensor([0.5000, 1.0000]))
    """
    if which not in ("both", "largest", "smallest"):
        raise InvalidArgumentError(f"which={which!r}: expected 'both', 'largest' or 'smallest'")
    starts = (1 if which == "largest" else 4) if starts is None else starts
    if k < 1 or starts < 1 or (steps is not None and steps < k):
        raise InvalidArgumentError(f"k={k}, steps={steps}, starts={starts}: expected at least 1, and steps at least k")
    if not 0 < tol < 1:
        raise InvalidArgumentError(f"tol={tol}: expected a number between 0 and 1")
    steps = steps or (2 * k + 24) * (4 if which == "largest" else 1)
    x = _checked(x, "x", {torch.float32, torch.float64}).detach()
    with torch.inference_mode(False):
        x = x.clone() if x.is_inference() else x  # such a tensor takes part in no derivative

    def settled(bidiagonal: Tensor) -> bool:
        values, errors, _ = _decomposed(bidiagonal, starts)
        return len(values) >= k and float(errors[:k].max()) <= tol * float(values[0])

    # The fused kernels of attention can be differentiated only once.
    attention, full_precision = sdpa_kernel(SDPBackend.MATH), torch.autocast(x.device.type, enabled=False)
    with torch.inference_mode(False), torch.no_grad(), full_precision, attention, in_eval_mode(module):
        forward, backward, shape = _products(module, x)
        # Seen from its smaller side, so that no vector lies where the Jacobian is 0 for want of rows.
        near, far = min(shape), max(shape)
        ahead, back = (forward, backward) if shape[1] == near else (backward, forward)
        is_exact = near * far <= dense_entries or near <= starts * steps
        if is_exact:
            eye = torch.eye(near, dtype=x.dtype, device=x.device)
            values = torch.linalg.svdvals(torch.cat([ahead(part) for part in eye.split(64)]).double())
            errors, shares, products = torch.zeros_like(values), torch.full_like(values, 1 / near)[None], near
        else:
            start = torch.randn(starts, near, dtype=x.dtype, device=x.device, generator=generator)
            stop = settled if which == "largest" else None
            bidiagonal = _bidiagonalize(ahead, back, start, far, steps, generator, stop)
            values, errors, shares = _decomposed(bidiagonal, starts)
            products = 2 * len(bidiagonal)
    errors = errors + _ROUNDING * torch.finfo(x.dtype).eps * values[0]
    values, errors, shares = (part.to(x) for part in (values, errors, shares))
    high, low = (k if which in ("both", end) else 0 for end in ("largest", "smallest"))
    return JacobianSpectrum(
        shape=shape,
        largest=values[:high],
        largest_errors=errors[:high],
        smallest=values.flip(0)[:low],
        smallest_errors=errors.flip(0)[:low],
        is_exact=is_exact,
        nodes=values,
        shares=shares,
        products=products,
    )


def _products(module: Callable[[Tensor], Any], x: Tensor) -> tuple[_Rows, _Rows, tuple[int, int]]:
    """The functions v -> J v and u -> J^T u, on the rows of a matrix, and the shape of J.

    J^T u is linear in u, and J v is the derivative of that, transposed: a pass backward through a recorded graph, as
    J^T u itself is, where forward-mode differentiation would run the module anew for every product.
    """

    def function(x: Tensor) -> Tensor:
        output = module(x)
        if isinstance(output, Tensor):
            return output
        try:
            return output[0]
        except (TypeError, LookupError) as error:
            raise InvalidArgumentError(
                f"the module returns {type(output).__name__}: expected a tensor, or a tuple whose first element counts"
            ) from error

    def transposed(u: Tensor) -> Tensor:
        return torch.func.vjp(function, x)[1](u)[0]

    output = _checked(function(x), "the module's output", {x.dtype})
    again, backward, *_ = torch.func.vjp(function, x)
    if not torch.allclose(output, again, rtol=0, atol=1e-3 * float(output.abs().max())):
        raise InvalidArgumentError(
            "the module gives another output each time, as dropout does in training mode: pass the nn.Module itself, "
            "which is measured in eval mode, or call eval() on it first"
        )
    _, forward, *_ = torch.func.vjp(transposed, torch.zeros_like(output))
    return _on_rows(forward, x.shape), _on_rows(backward, output.shape), (output.numel(), x.numel())


def _on_rows(product: Callable[[Tensor], tuple[Tensor]], shape: torch.Size) -> _Rows:
    batched = torch.func.vmap(product)
    return lambda rows: batched(rows.view(-1, *shape))[0].reshape(len(rows), -1)


def _bidiagonalize(
    forward: _Rows,
    backward: _Rows,
    start: Tensor,
    far: int,
    steps: int,
    generator: torch.Generator | None,
    settled: Callable[[Tensor], bool] | None = None,
) -> Tensor:
    """[B, r^T]: B is block upper bidiagonal, J V = U B, and J^T U = V B^T + w r with one block w of vectors more.

    U and V are orthonormal, and V begins with what the rows of `start` span. Nothing here waits for a GPU, unless
    `settled` is to look at [B, r^T] every eighth step and may end it.
    """
    size, near = start.shape
    vectors_v = start.new_empty((steps + 1) * size, near)
    vectors_u = start.new_empty(steps * size, far)
    bidiagonal = start.new_zeros(steps * size, (steps + 1) * size)
    vectors_v[:size] = torch.linalg.qr(start.T).Q.T
    for begin in range(0, steps * size, size):
        end, beyond = begin + size, begin + 2 * size
        onto_u = forward(vectors_v[begin:end])
        scale = torch.maximum(bidiagonal.abs().max(), onto_u.norm(dim=1).max())
        vectors_u[begin:end], diagonal = _orthonormal(onto_u, vectors_u[:begin], scale, generator)
        onto_v = backward(vectors_u[begin:end])
        vectors_v[end:beyond], above = _orthonormal(onto_v, vectors_v[:end], scale, generator)
        bidiagonal[begin:end, begin:end] = diagonal
        bidiagonal[begin:end, end:beyond] = above.T
        if settled is not None and end // size % 8 == 0 and settled(bidiagonal[:end, :beyond]):
            return bidiagonal[:end, :beyond]
    return bidiagonal


def _orthonormal(
    rows: Tensor, basis: Tensor, scale: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Q and R with rows^T = Q^T R but for what `basis` spans; the rows of Q are orthonormal and orthogonal to `basis`.

    Where `rows` holds nothing new, Q goes on in random directions at R = 0. That takes noise as large as the rounding
    errors of a Jacobian of norm `scale`: those errors themselves would lie within `basis`.
    """
    noise = torch.randn(rows.shape, dtype=rows.dtype, device=rows.device, generator=generator)
    level = 4 * torch.finfo(rows.dtype).eps / rows.shape[1] ** 0.5
    # But for rounding, only the last block of `basis` has a part in `rows`.
    rows = _without(rows, basis[-len(rows) :]) + level * scale * noise
    triangle = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    for _ in range(2):
        q, r = torch.linalg.qr(_without(rows, basis).T)
        rows, triangle = q.T, r @ triangle
    return rows, triangle


def _without(rows: Tensor, basis: Tensor) -> Tensor:
    return torch.addmm(rows, rows @ basis.T, basis, alpha=-1)


def _decomposed(bidiagonal: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The singular values of B, their errors and shares, from [B, r^T], in float64 on the CPU.

    With p, s, q of B, J (V q) = s (U p) and J^T (U p) = s (V q) + w r p: ||r p|| bounds the distance from s to the
    nearest singular value of J.
    """
    whole = bidiagonal.cpu().double()
    left, values, right = torch.linalg.svd(whole[:, :-size])
    errors = (whole[:, -size:].T @ left).norm(dim=0)
    return values, errors, right[:, :size].square().T


def _checked(tensor: Tensor, name: str, dtypes: set[torch.dtype]) -> Tensor:
    """`tensor`, once it is sure that it has a Jacobian, or one at it."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
        given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        expected = " or ".join(sorted(map(str, dtypes)))
        raise InvalidArgumentError(f"{name} is of {given}: expected {expected}; .float() converts modules and tensors")
    if not tensor.numel():
        raise InvalidArgumentError(f"{name} has shape {tuple(tensor.shape)}: an empty tensor has no Jacobian")
    if not tensor.isfinite().all():
        raise InvalidArgumentError(f"{name} holds NaN or Inf: expected finite numbers")
    return tensor
