"""x (W0 + s sin(omega B A))^T at LoRA's memory: the sine is computed anew in the backward pass (arXiv 2403.19243).

    D = sin(omega B A)
    y = x (W0 + s D)^T + bias
    dx = dy (W0 + s D);   G = (dy^T x) * cos(omega B A) * omega s;   dB = G A^T;   dA = B^T G

Between the passes only x, W0, A and B are kept. torch.compile sees one operation each way, so that it cannot decide to
keep the sine after all.

Operations of multiplication and addition for T tokens: 6 T in out, three products of full size where LoRA has two, and
two passes over the weight. Where W0 and s D are kept apart (`wellposed.lowrank.passes`), 10 T in out.
"""

from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import InvalidArgumentError, UnsuitableModelError
from wellposed.lowrank.eager import sine_delta
from wellposed.lowrank.passes import factor_gradients, sine_weights
from wellposed.spectrum.direct import direct, filled
from wellposed.spectrum.modes import within_transform


def sine_linear(
    x: Tensor, weight0: Tensor | None, bias: Tensor | None, a: Tensor, b: Tensor, omega: float, scale: float
) -> Tensor:
    """The layer y = x (W0 + scale sin(omega B A))^T + bias, of the type of `x`, or autocast's.

    The rank product, the sine and the cosine are computed in float32 at least, whatever autocast says; an update below
    the last bit of a bfloat16 or float16 W0 is not rounded away. Works under torch.compile and gradient checkpointing;
    `weight0` gets a gradient only if it asks for one. Within torch.func's transforms the out x in matrices are kept.

    Args:
        x: (..., in).
        weight0: W0, (out, in), of the type of `x` unless autocast is on; no such term if None.
        bias: (out,), or None.
        a: A, (r, in), of any floating-point type.
        b: B, (out, r).
        omega: the frequency, above 0.
        scale: s.

    Raises:
        InvalidArgumentError: shapes or types that do not belong together, or an omega or scale that cannot be.
        UnsuitableModelError: in the backward pass, if second derivatives are asked for.

    Example:
        >>> a, b = torch.tensor([[0.5, 1.0]]), torch.tensor([[torch.pi]])
        >>> sine_linear(torch.eye(2), torch.ones(1, 2), None, a, b, 0.5, 2.0)
        tensor([[2.4142],
                [3.0000]])
    """
    autocast = _is_autocast(x)
    if autocast and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    _check(x, weight0, bias, a, b, autocast)
    if not torch.compiler.is_compiling() and not (isfinite(omega) and omega > 0 and isfinite(scale)):
        raise InvalidArgumentError(f"omega={omega!r}, scale={scale!r}: expected finite numbers, omega above 0")
    if within_transform():
        return _by_definition(x, weight0, bias, a, b, omega, scale)
    return _direct(x, weight0, bias, a, b, omega, scale)


def _check(x: Tensor, weight0: Tensor | None, bias: Tensor | None, a: Tensor, b: Tensor, autocast: bool) -> None:
    """InvalidArgumentError unless the shapes and types belong together."""
    if a.ndim != 2 or b.ndim != 2 or x.ndim < 1 or a.shape[0] != b.shape[1] or x.shape[-1] != a.shape[1]:
        raise InvalidArgumentError(f"{_shapes(x, weight0, bias, a, b)}: expected x (..., in), a (r, in) and b (out, r)")
    rows, cols = b.shape[0], a.shape[1]
    if weight0 is not None and weight0.shape != (rows, cols) and weight0.is_floating_point():
        raise InvalidArgumentError(f"{_shapes(x, weight0, bias, a, b)}: expected weight0 (out, in) = ({rows}, {cols})")
    if bias is not None and bias.shape != (rows,):
        raise InvalidArgumentError(f"{_shapes(x, weight0, bias, a, b)}: expected bias (out,) = ({rows},)")
    for name, each in (("x", x), ("weight0", weight0), ("bias", bias), ("a", a), ("b", b)):
        if each is None:
            continue
        if not each.dtype.is_floating_point:
            hint = ": for a quantized weight pass None and add its own layer's output" if name == "weight0" else ""
            raise InvalidArgumentError(f"{name} is {each.dtype}: expected a floating-point type{hint}")
        if each.dtype != x.dtype and not autocast and name in {"weight0", "bias"}:
            raise InvalidArgumentError(f"x is {x.dtype} and {name} {each.dtype}: expected one type, or torch.autocast")


def _by_definition(
    x: Tensor, weight0: Tensor | None, bias: Tensor | None, a: Tensor, b: Tensor, omega: float, scale: float
) -> Tensor:
    """The same in float32 at least, as torch's own operations, which every transform knows."""
    if _is_autocast(x):
        with torch.autocast(x.device.type, enabled=False):
            return _by_definition(x, weight0, bias, a, b, omega, scale)
    precise = torch.promote_types(x.dtype, torch.float32)
    weight_OI = sine_delta(a, b, omega, scale, precise)
    weight_OI = weight_OI if weight0 is None else weight_OI + weight0.to(precise)
    return F.linear(x.to(precise), weight_OI, None if bias is None else bias.to(precise)).to(x.dtype)


def _shapes(*given: Tensor | None) -> str:
    names = ("x", "weight0", "bias", "a", "b")
    return ", ".join(f"{name} {tuple(each.shape)}" for name, each in zip(names, given, strict=True) if each is not None)


def _forward(
    x: Tensor, weight0: Tensor | None, bias: Tensor | None, a: Tensor, b: Tensor, omega: float, scale: float
) -> Tensor:
    if _is_autocast(x):
        with torch.autocast(x.device.type, enabled=False):
            return _forward(x, weight0, bias, a, b, omega, scale)
    x = x.contiguous()
    bias = None if bias is None else bias.to(x.dtype)
    first, *others = sine_weights(weight0, a, b, omega, scale, x.dtype)
    if not others:
        return F.linear(x, first, bias)
    y = x @ first.T
    for other in others:
        y.view(-1, b.shape[0]).addmm_(x.view(-1, a.shape[1]), other.T)
    return y if bias is None else y.add_(bias)


_sine_linear = torch.library.custom_op("wellposed::sine_linear", _forward, mutates_args=())


@_sine_linear.register_fake
def _(
    x: Tensor, weight0: Tensor | None, bias: Tensor | None, a: Tensor, b: Tensor, omega: float, scale: float
) -> Tensor:
    return x.new_empty(*x.shape[:-1], b.shape[0])


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight0: Tensor | None,
    a: Tensor,
    b: Tensor,
    omega: float,
    scale: float,
    for_x: bool,
    for_weight0: bool,
    for_factors: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, W0, A and B, each None where it is not asked for."""
    if _is_autocast(x):
        with torch.autocast(x.device.type, enabled=False):
            return _gradients(dy, x, weight0, a, b, omega, scale, for_x, for_weight0, for_factors)
    dy = dy.contiguous()
    dy_TO, x_TI = _flat(dy), _flat(x)
    dx = dweight0 = da = db = None
    if for_x:
        first, *others = sine_weights(weight0, a, b, omega, scale, dy.dtype)
        dx = dy @ first
        for other in others:
            dx.view(-1, a.shape[1]).addmm_(dy_TO, other)
        del first, others
    if for_weight0 and weight0 is not None:
        dweight0 = (dy_TO.T @ x_TI).to(weight0.dtype)
    if for_factors:
        da, db = factor_gradients(dy_TO, x_TI, a, b, omega, scale)
    return dx, dweight0, da, db


def _flat(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


_sine_linear_backward = torch.library.custom_op("wellposed::sine_linear_backward", filled(_gradients), mutates_args=())


@_sine_linear_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weight0: Tensor | None,
    a: Tensor,
    b: Tensor,
    omega: float,
    scale: float,
    for_x: bool,
    for_weight0: bool,
    for_factors: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        dy.new_empty(*dy.shape[:-1], a.shape[1]) if for_x else dy.new_empty(0),
        weight0.new_empty(weight0.shape) if for_weight0 and weight0 is not None else dy.new_empty(0),
        a.new_empty(a.shape) if for_factors else dy.new_empty(0),
        b.new_empty(b.shape) if for_factors else dy.new_empty(0),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight0, _, a, b, ctx.omega, ctx.scale = inputs
    _, for_weight0, _, for_a, for_b = ctx.needs_input_grad[:5]
    ctx.save_for_backward(x if for_weight0 or for_a or for_b else None, weight0, a, b)


def _backward(ctx: Any, dy: Tensor, gradients: Any = _sine_linear_backward) -> tuple[Tensor | None, ...]:
    x, weight0, a, b = ctx.saved_tensors
    for_x, for_weight0, for_bias, for_a, for_b = ctx.needs_input_grad[:5]
    dbias = dy.reshape(-1, dy.shape[-1]).sum(0) if for_bias else None
    dx, dweight0, da, db = gradients(
        dy,
        dy.new_empty(0, a.shape[1]) if x is None else x,
        weight0,
        a,
        b,
        ctx.omega,
        ctx.scale,
        for_x,
        for_weight0,
        for_a or for_b,
    )
    return (
        dx if for_x else None,
        dweight0 if for_weight0 else None,
        dbias,
        da if for_a else None,
        db if for_b else None,
        None,
        None,
    )


def _refuse(ctx: Any, *gradients: Tensor) -> Any:
    raise UnsuitableModelError(
        "sine_linear has no second derivatives: use x @ (weight0 + wellposed.lowrank.sine_delta(a, b, omega, scale)).T "
        "+ bias, which keeps the out x in matrices and can be differentiated as often as torch.sin"
    )


_sine_linear.register_autograd(_backward, setup_context=_keep)
_sine_linear_backward.register_autograd(_refuse)
_direct = direct(_sine_linear, _forward, _gradients, keep=_keep, backward=_backward, refuse=_refuse)


def _is_autocast(x: Tensor) -> bool:
    """Whether autocast is on, which the products here have to be kept from: each is in the type it is written in."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)
