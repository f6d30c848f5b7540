"""Attention of degree 1 in O(N d^2): s (q k^T) v = s q (k^T v), and in chunks where a row sees the keys up to its own.

Causal rows are cut into chunks. A row reads the sum of k^T v over the chunks before its own, and its own chunk key by
key. The sums are taken by doubling, in an order that is always the same. All in float32 at least.

Shapes: B inputs, H heads of queries, K of keys and values with H = G K, N queries, M keys, heads d wide, T chunks of C.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.attention.eager import as_written, per_head

_CHUNK = 64


def linear_attention(
    q_BHNd: Tensor,
    k_BKMd: Tensor,
    v_BKMd: Tensor,
    *,
    scale: float | Tensor | None = None,
    logit_scale: float,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The o (B, H, N, d) of `wellposed.attention.eager.eager_attention` with phi="power1", whose arguments these are.

    Example:
        >>> q = k = torch.tensor([[[[1.0], [2.0]]]])
        >>> linear_attention(q, k, torch.ones(1, 1, 2, 1), logit_scale=1.0, causal=True).flatten()
        tensor([1.0000, 4.2426])
    """
    (n, m), kv_heads = (q_BHNd.shape[2], k_BKMd.shape[2]), k_BKMd.shape[1]
    precise = torch.promote_types(q_BHNd.dtype, torch.float32)
    if key_mask is not None:
        k_BKMd, v_BKMd = (x.masked_fill(~key_mask[:, None, :, None], 0.0) for x in (k_BKMd, v_BKMd))
    k, v = k_BKMd.to(precise)[:, :, None], v_BKMd.to(precise)[:, :, None]
    q = q_BHNd.to(precise).unflatten(1, (kv_heads, -1))  # B K G N d
    with as_written(q_BHNd):
        if not causal or n == 1:
            o = q @ (k.mT @ v)
        else:
            before, blind = max(m - n, 0), max(n - m, 0)
            o = _square_causal(q[..., blind:, :], k[..., before:, :], v[..., before:, :])
            o = o + q[..., blind:, :] @ (k[..., :before, :].mT @ v[..., :before, :])
            o = F.pad(o, (0, 0, blind, 0))
    o_BHNd = o.flatten(1, 2) * logit_scale
    if scale is None:
        seen = keys_seen(n, m, q.device, causal=causal, key_mask=key_mask)
        o_BHNd = o_BHNd * seen.clamp(min=1).to(precise).rsqrt()[:, None, :, None]
    else:
        o_BHNd = o_BHNd * per_head(scale)
    return o_BHNd.to(v_BKMd.dtype)


def keys_seen(n: int, m: int, device: torch.device, *, causal: bool, key_mask: Tensor | None) -> Tensor:
    """How many of `m` keys each of `n` rows can see, (B, n) or (1, n), without the n x m mask.

    Example:
        >>> keys_seen(2, 3, torch.device("cpu"), causal=True, key_mask=torch.tensor([[False, True, True]]))
        tensor([[1, 2]])
    """
    if key_mask is None:
        every = (
            torch.arange(m - n + 1, m + 1, device=device).clamp(min=0) if causal else torch.full((n,), m, device=device)
        )
        return every[None]
    if not causal:
        return key_mask.sum(1, keepdim=True).expand(-1, n)
    up_to = key_mask.cumsum(1)  # of integers: the same on every run
    return up_to[:, m - n :] if n <= m else F.pad(up_to, (n - m, 0))


def _square_causal(q_BKGNd: Tensor, k_BK1Nd: Tensor, v_BK1Nd: Tensor) -> Tensor:
    """The sum over j <= i of (q_i . k_j) v_j, (B, K, G, N, d)."""
    n = q_BKGNd.shape[-2]
    short = -n % _CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, short)).unflatten(-2, (-1, _CHUNK)) for x in (q_BKGNd, k_BK1Nd, v_BK1Nd))
    before_BK1Tdd = F.pad(_running_sums(k.mT @ v)[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
    o = q @ before_BK1Tdd + (q @ k.mT).tril() @ v
    return o.flatten(-3, -2)[..., :n, :]


def _running_sums(x_Tdd: Tensor) -> Tensor:
    """Sums of x over the chunks up to each, (..., T, d, d), in log2(T) additions."""
    step = 1
    while step < x_Tdd.shape[-3]:
        x_Tdd = x_Tdd + F.pad(x_Tdd[..., :-step, :, :], (0, 0, 0, 0, step, 0))
        step *= 2
    return x_Tdd
