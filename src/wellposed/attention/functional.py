"""Polynomial attention (arXiv 2410.18613) and what it is compared with, as functions of queries, keys and values.

All of them take (q, k, v, scale, causal, mask), and a row counts the keys that it can see: see `wellposed.attention.
eager` for the definition.

Shapes: B inputs, H heads of queries, K of keys and values with H a multiple of K, N queries, M keys, heads d wide.
"""

from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.attention.eager import PHIS, eager_attention, per_head, spread, visible_keys
from wellposed.attention.ops import elementwise_attention
from wellposed.errors import InvalidArgumentError
from wellposed.spectrum.modes import within_transform

DEGREES = (1, 2, 3)


def polynomial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    degree: int = 3,
    scale: float | Tensor | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Polynomial attention, s (q k^T / sqrt(d))^p v: no softmax, no row sums, no positivity.

    Args:
        q: queries, (B, H, N, d).
        k: keys, (B, K, M, d); query head j reads head j // (H / K).
        v: values, (B, K, M, d), of the type and on the device of `q` and `k`. Under autocast all become its type.
        degree: p, 1, 2 or 3; above, models do not train.
        scale: s, a number or one for each head, (H,), that may be a parameter; 1 / sqrt(n) if None, with n the number
            of keys that a row can see.
        causal: each row sees the keys up to its own. Of fewer queries than keys the last one is the last key's, as in
            decoding with a cache.
        mask: True for what can be seen: (B, M), the keys that are no padding, or (B, H, N, M), where B, H and N may
            be 1. A row that sees nothing is 0.

    Returns:
        (B, H, N, d), of the type of `v`.

    Raises:
        InvalidArgumentError: an argument that is none of these.

    Example:
        >>> q = k = torch.tensor([[[[1.0], [2.0]]]])
        >>> polynomial_attention(q, k, v=torch.ones(1, 1, 2, 1), degree=3, causal=True).flatten()
        tensor([ 1.0000, 50.9117])
    """
    return attend(q, k, v, phi=f"power{checked_degree(degree)}", scale=scale, causal=causal, mask=mask)


def relu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | Tensor | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """ReLU attention, s max(q k^T / sqrt(d), 0) v, with s = 1 / n if `scale` is None.

    Arguments as `polynomial_attention`'s.
    """
    return attend(q, k, v, phi="relu", scale=scale, causal=causal, mask=mask)


def sigmoid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | Tensor | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Sigmoid attention, s sigmoid(q k^T / sqrt(d) - log n) v, with s = 1 if `scale` is None.

    Arguments as `polynomial_attention`'s.
    """
    return attend(q, k, v, phi="sigmoid", scale=scale, causal=causal, mask=mask)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | Tensor | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention, s softmax(q k^T / sqrt(d)) v, by torch's fused kernels, with s = 1 if `scale` is None.

    Arguments as `polynomial_attention`'s.
    """
    return attend(q, k, v, phi="softmax", scale=scale, causal=causal, mask=mask)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    phi: str,
    scale: float | Tensor | None = None,
    logit_scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention with this phi, "softmax" or one of PHIS, by the fastest way that can do what is asked.

    Beyond `polynomial_attention`'s arguments: `logit_scale`, 1 / sqrt(d) if None; `bias`, added to the logits and
    broadcast like `mask`; and `dropout` of the weights. With a bias, a dropout or a mask that is not about keys alone,
    every weight is written out, in O(N M) memory; so it is within torch.func's transforms, which kernels do not know.
    """
    q, k, v = _in_autocast_type(q, k, v)
    check_tensors(q, k, v)
    check_scale(scale, q)
    key_mask, mask = split_mask(mask, q, k)
    shared: dict[str, Any] = {"causal": causal, "key_mask": key_mask}
    shared["logit_scale"] = q.shape[-1] ** -0.5 if logit_scale is None else logit_scale
    if phi == "softmax":
        return _fused_softmax(q, k, v, scale=scale, mask=mask, bias=bias, dropout=dropout, **shared)
    if phi not in PHIS:
        raise InvalidArgumentError(f"phi={phi!r}: expected 'softmax' or one of {', '.join(PHIS)}")
    if mask is None and bias is None and not dropout and not within_transform():
        return elementwise_attention(q, k, v, phi=phi, scale=scale, **shared)
    return eager_attention(q, k, v, phi=phi, scale=scale, mask=mask, bias=bias, dropout=dropout, **shared)


def checked_degree(degree: Any) -> int:
    """`degree`, if it is one."""
    if isinstance(degree, bool) or degree not in DEGREES:
        raise InvalidArgumentError(f"degree={degree!r}: expected 1, 2 or 3; higher powers do not train")
    return int(degree)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless queries, keys and values belong together."""
    given = {"q": q, "k": k, "v": v}
    for name, each in given.items():
        if not isinstance(each, Tensor) or each.ndim != 4:
            what = f"of shape {tuple(each.shape)}" if isinstance(each, Tensor) else f"a {type(each).__name__}"
            raise InvalidArgumentError(f"{name} is {what}: expected a tensor (batch, heads, tokens, width)")
    shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in given.items())
    if q.shape[0] != k.shape[0] or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        raise InvalidArgumentError(
            f"{shapes}: expected one batch size, queries as wide as keys, and as many keys as values"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InvalidArgumentError(f"{shapes}: expected a multiple of the keys' {k.shape[1]} heads in the queries")
    for what in ("dtype", "device"):
        kinds = {name: getattr(each, what) for name, each in given.items()}
        if len(set(kinds.values())) != 1:
            listed = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
            raise InvalidArgumentError(f"{listed}: expected one {what} for all three; convert them first")
    if not q.is_floating_point():
        raise InvalidArgumentError(f"q, k and v are {q.dtype}: expected a floating-point type")


def check_scale(scale: Any, q_BHNd: Tensor) -> None:
    """Raise unless `scale` is None, a number, or a tensor of one number or one for each head."""
    if isinstance(scale, Tensor):
        if scale.shape not in {(), (q_BHNd.shape[1],)} or not scale.is_floating_point():
            raise InvalidArgumentError(
                f"scale is {tuple(scale.shape)} of {scale.dtype}: expected one number for each head, "
                f"({q_BHNd.shape[1]},), of a floating-point type"
            )
        if scale.device != q_BHNd.device:
            raise InvalidArgumentError(f"scale is on {scale.device}, q on {q_BHNd.device}: expected one device")
    elif scale is not None and (isinstance(scale, bool) or not isinstance(scale, Real) or not isfinite(scale)):
        raise InvalidArgumentError(
            f"scale={scale!r}: expected a finite number, a tensor with one for each head, or None"
        )


def split_mask(mask: Any, q_BHNd: Tensor, k_BKMd: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """`mask` as one about keys alone, (B, M), and one about more, (B, H, N, M); either or both are None."""
    if mask is None:
        return None, None
    (b, h, n, _), m = q_BHNd.shape, k_BKMd.shape[2]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        what = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidArgumentError(f"mask is {what}: expected a tensor of torch.bool, True for what can be seen")
    if mask.device != q_BHNd.device:
        raise InvalidArgumentError(f"mask is on {mask.device}, q on {q_BHNd.device}: expected one device")
    if mask.shape == (b, m):
        return mask, None
    fits = mask.ndim == 4 and mask.shape[-1] == m
    if not fits or any(own not in {1, full} for own, full in zip(mask.shape, (b, h, n), strict=False)):
        raise InvalidArgumentError(
            f"mask is {tuple(mask.shape)}: expected (B, M) = ({b}, {m}), True for the keys that are no padding, or "
            f"(B, H, N, M) = ({b}, {h}, {n}, {m}), where the first three may be 1"
        )
    if mask.shape[1:3] == (1, 1):
        return mask[:, 0, 0].expand(b, m), None
    return None, mask


def _fused_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | Tensor | None,
    logit_scale: float,
    causal: bool,
    key_mask: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    n, m = q.shape[2], k.shape[2]
    by_flag = causal and n == m and key_mask is None and mask is None and bias is None
    visible = None if by_flag else visible_keys(n, m, q.device, causal=causal, key_mask=key_mask, mask=mask)
    blind = None
    if visible is not None:
        blind = ~visible.any(-1, keepdim=True)
        visible = visible | blind  # the softmax of nothing is not a number, in the backward pass too
        if bias is not None:
            visible = bias.to(q.dtype).masked_fill(~visible, -torch.inf)
    elif bias is not None:
        visible = bias.to(q.dtype)
    o = F.scaled_dot_product_attention(
        q,
        spread(k, q.shape[1]),
        spread(v, q.shape[1]),
        attn_mask=visible,
        dropout_p=dropout,
        is_causal=by_flag,
        scale=logit_scale,
    )
    if blind is not None:
        o = o.masked_fill(blind, 0.0)
    return o if scale is None else (o * per_head(scale)).to(v.dtype)


def _in_autocast_type(*tensors: Tensor) -> tuple[Tensor, ...]:
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "meta"
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    wanted = torch.get_autocast_dtype(kind)
    cast = (x.to(wanted) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
    return tuple(cast)
