"""Attention with an element-wise function in place of softmax, as it is defined (arXiv 2410.18613).

    S = logit_scale q k^T,    o = A v

    A = s S^p                   "power1", "power2", "power3"    s = 1 / sqrt(n)
        s max(S, 0)             "relu"                          s = 1 / n
        s sigmoid(S - log n)    "sigmoid"                       s = 1

where n is the number of keys that the row can see. Entries of A that a row cannot see are 0, and a row that sees
nothing is 0. S and A are computed in float32 at least: rounded to bfloat16, the third power of S is off by three times
what S is.

Shapes: B inputs, H heads of queries, K of keys and values with H a multiple of K, N queries, M keys, heads d wide.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

POWERS = ("power1", "power2", "power3")
PHIS = (*POWERS, "relu", "sigmoid")


def eager_attention(
    q_BHNd: Tensor,
    k_BKMd: Tensor,
    v_BKMd: Tensor,
    *,
    phi: str,
    scale: float | Tensor | None = None,
    logit_scale: float,
    causal: bool = False,
    key_mask: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The o (B, H, N, d) of the definition, of the type of `v_BKMd`; every weight is written out.

    Args:
        q_BHNd: queries; query head j reads the keys and values of head j // (H / K).
        k_BKMd: keys.
        v_BKMd: values.
        phi: one of PHIS.
        scale: s, a number or one for each head, (H,); as above if None.
        logit_scale: the factor of q k^T.
        causal: each row sees the keys up to its own, the last row all of them.
        key_mask: (B, M), True for the keys that can be seen at all.
        mask: True for what can be seen, to be broadcast to (B, H, N, M).
        bias: added to S, to be broadcast to (B, H, N, M).
        dropout: the share of weights that are set to 0, the others grow by 1 / (1 - dropout).
    """
    weights_BHNM = attention_weights(
        q_BHNd,
        k_BKMd,
        phi=phi,
        scale=scale,
        logit_scale=logit_scale,
        causal=causal,
        key_mask=key_mask,
        mask=mask,
        bias=bias,
    )
    if dropout:
        weights_BHNM = F.dropout(weights_BHNM, dropout)
    with as_written(q_BHNd):
        o_BHNd = weights_BHNM @ spread(v_BKMd, q_BHNd.shape[1]).to(weights_BHNM.dtype)
    return o_BHNd.to(v_BKMd.dtype)


def attention_weights(
    q_BHNd: Tensor,
    k_BKMd: Tensor,
    *,
    phi: str,
    scale: float | Tensor | None = None,
    logit_scale: float,
    causal: bool = False,
    key_mask: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The A (B, H, N, M) of the definition in float32, or in float64 if `q_BHNd` is; arguments as `eager_attention`'s.

    Example:
        >>> q = k = torch.ones(1, 1, 2, 1)
        >>> attention_weights(q, k, phi="power3", logit_scale=2.0, causal=True)
        tensor([[[[8.0000, 0.0000],
                  [5.6569, 5.6569]]]])
    """
    s = logits(q_BHNd, k_BKMd, logit_scale, bias)
    (n, m), device = s.shape[-2:], s.device
    visible = visible_keys(n, m, device, causal=causal, key_mask=key_mask, mask=mask)
    count = torch.full((1,), m, device=device) if visible is None else visible.sum(-1, keepdim=True).clamp(min=1)
    count = count.to(s.dtype)
    if phi == "sigmoid":
        a, by_rule = (s - count.log()).sigmoid(), torch.ones_like(count)
    elif phi == "relu":
        a, by_rule = s.relu(), count.reciprocal()
    else:
        a, by_rule = s ** int(phi.removeprefix("power")), count.rsqrt()
    a = a * (by_rule if scale is None else per_head(scale))
    return a if visible is None else a.masked_fill(~visible, 0.0)


def logits(q_BHNd: Tensor, k_BKMd: Tensor, logit_scale: float, bias: Tensor | None = None) -> Tensor:
    """The S (B, H, N, M), in float32 at least."""
    precise = torch.promote_types(q_BHNd.dtype, torch.float32)
    with as_written(q_BHNd):
        s = q_BHNd.to(precise) @ spread(k_BKMd, q_BHNd.shape[1]).to(precise).mT * logit_scale
    return s if bias is None else s + bias


def visible_keys(
    n: int,
    m: int,
    device: torch.device,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor | None:
    """True for the keys that each of `n` rows can see, to be broadcast to (B, H, n, m); None where all see all."""
    visible = mask
    if key_mask is not None:
        keys = key_mask[:, None, None, :]
        visible = keys if visible is None else visible & keys
    if causal and n != 1:
        rows = torch.arange(m - n, m, device=device)
        up_to_own = torch.arange(m, device=device) <= rows[:, None]
        visible = up_to_own if visible is None else visible & up_to_own
    return visible


def spread(x_BKMd: Tensor, heads: int) -> Tensor:
    """(B, heads, M, d), each head of keys or values as often as there are query heads that read it."""
    group = heads // x_BKMd.shape[1]
    return x_BKMd if group == 1 else x_BKMd.repeat_interleave(group, 1)


def per_head(scale: float | Tensor) -> float | Tensor:
    """A number as it is, one for each head as (H, 1, 1)."""
    return scale[:, None, None] if isinstance(scale, Tensor) and scale.ndim else scale


def as_written(x: Tensor) -> AbstractContextManager[Any]:
    """Each product in the type that it is written in, also where autocast is on."""
    return nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)
