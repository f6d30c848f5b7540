"""Element-wise attention by the fastest way there is, in O(N) memory where there are kernels.

Degree 1 goes by associativity. The other functions are, on a GPU, two operations of torch's own registry, one each way,
whatever is inside: torch.compile, autocast and FSDP see no more than their shapes. Elsewhere the eager definition is
used as it is.

Shapes: B inputs, H heads of queries, K of keys and values with H a multiple of K, N queries, M keys, heads d wide.
"""

import os
from functools import cache
from logging import getLogger
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.attention.eager import eager_attention
from wellposed.attention.linear import keys_seen, linear_attention
from wellposed.errors import UnsuitableModelError
from wellposed.spectrum.direct import direct, filled

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels, on the CPU."""
_log = getLogger(__name__)
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 128


def elementwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    phi: str,
    scale: float | Tensor | None = None,
    logit_scale: float,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The o (B, H, N, d) of `wellposed.attention.eager.eager_attention`, whose arguments these are, already checked.

    On a GPU, in bfloat16, float16 and float32 and with heads of up to 128, "power2", "power3", "relu" and "sigmoid" are
    Triton kernels: logits in float32, weights rounded to the type of `v` for the product with it, the same bits in each
    run. They have first derivatives only.

    Args:
        q: queries, (B, H, N, d).
        k: keys, (B, K, M, d).
        v: values, (B, K, M, d).
        phi: one of `wellposed.attention.eager.PHIS`.
        scale: the factor of the weights, a number or one for each head, (H,), which gets a gradient; by the rule if
            None.
        logit_scale: the factor of q k^T.
        causal: each row sees the keys up to its own, the last row all of them.
        key_mask: (B, M), True for the keys that can be seen at all.
    """
    if phi == "power1":
        return linear_attention(q, k, v, scale=scale, logit_scale=logit_scale, causal=causal, key_mask=key_mask)
    if not _has_kernels(q, v, logit_scale):
        return eager_attention(q, k, v, phi=phi, scale=scale, logit_scale=logit_scale, causal=causal, key_mask=key_mask)
    n, m, d = q.shape[2], k.shape[2], q.shape[3]
    causal = causal and n > 1
    counts = None
    if key_mask is not None:
        # A key of zeros has logits of 0 and a value of zeros: it counts for nothing, forward and backward.
        k, v = (x.masked_fill(~key_mask[:, None, :, None], 0.0) for x in (k, v))
        counts = keys_seen(n, m, q.device, causal=causal, key_mask=key_mask).float()
    missing = -d % (16 // q.element_size())
    if missing:
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
    head_scale = scale.expand(q.shape[1]) if isinstance(scale, Tensor) else None
    number = None if scale is None or isinstance(scale, Tensor) else float(scale)
    o = _direct(q, k, v, counts, head_scale, phi, number, logit_scale, causal)
    return o[..., :d] if missing else o


def _has_kernels(q: Tensor, v: Tensor, logit_scale: float) -> bool:
    """Whether there are kernels for these."""
    fits = q.shape[-1] == v.shape[-1] <= _WIDEST and q.numel() > 0 and v.numel() > 0
    known = q.dtype in _TYPES and logit_scale > 0 and isfinite(logit_scale) and q.device.type in {"cpu", "cuda"}
    if not (fits and known):
        return False
    if torch.compiler.is_compiling():
        return q.device.type == "cuda" or INTERPRETED  # torch.compile itself needs Triton on a GPU
    return _kernels_work(q.device)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor | None,
    head_scale: Tensor | None,
    phi: str,
    scale: float | None,
    logit_scale: float,
    causal: bool,
) -> Tensor:
    from wellposed.attention import kernels
    from wellposed.attention.kernels_settings import Problem

    problem = Problem(phi, logit_scale, scale, head_scale, causal, counts)
    o = _token_major(q)
    kernels.forward(o, kernels.aligned(q), kernels.aligned(k), kernels.aligned(v), problem)
    return o


_attention = torch.library.custom_op("wellposed::elementwise_attention", _forward, mutates_args=())


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor | None,
    head_scale: Tensor | None,
    phi: str,
    scale: float | None,
    logit_scale: float,
    causal: bool,
) -> Tensor:
    return _token_major(q)


def _gradients(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor | None,
    head_scale: Tensor | None,
    phi: str,
    scale: float | None,
    logit_scale: float,
    causal: bool,
    for_q: bool,
    for_kv: bool,
    for_scale: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of q, k, v and head_scale, each None where it is not asked for."""
    from wellposed.attention import kernels
    from wellposed.attention.kernels_settings import Problem

    problem = Problem(phi, logit_scale, scale, head_scale, causal, counts)
    do, q, k, v = kernels.aligned(do), kernels.aligned(q), kernels.aligned(k), kernels.aligned(v)
    dq = dk = dv = dscale = None
    if for_q or for_scale:
        dq = _token_major(q)
        by_head = kernels.backward_queries(dq, do, q, k, v, problem)
        if for_scale and head_scale is not None:
            dscale = by_head.to(head_scale.dtype)
    if for_kv:
        dk, dv = _token_major(k), _token_major(v)
        kernels.backward_keys(dk, dv, do, q, k, v, problem)
    return dq if for_q else None, dk, dv, dscale


_attention_backward = torch.library.custom_op(
    "wellposed::elementwise_attention_backward", filled(_gradients), mutates_args=()
)


@_attention_backward.register_fake
def _(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor | None,
    head_scale: Tensor | None,
    phi: str,
    scale: float | None,
    logit_scale: float,
    causal: bool,
    for_q: bool,
    for_kv: bool,
    for_scale: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        _token_major(q) if for_q else q.new_empty(0),
        _token_major(k) if for_kv else q.new_empty(0),
        _token_major(v) if for_kv else q.new_empty(0),
        head_scale.new_empty(head_scale.shape) if for_scale and head_scale is not None else q.new_empty(0),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, counts, head_scale, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, counts, head_scale)


def _backward(ctx: Any, do: Tensor, gradients: Any = _attention_backward) -> tuple[Tensor | None, ...]:
    for_q, for_k, for_v, _, for_scale = ctx.needs_input_grad[:5]
    dq, dk, dv, dscale = gradients(do, *ctx.saved_tensors, *ctx.settings, for_q, for_k or for_v, for_scale)
    return (
        dq if for_q else None,
        dk if for_k else None,
        dv if for_v else None,
        None,
        dscale if for_scale else None,
        *(None for _ in ctx.settings),
    )


def _refuse(ctx: Any, *gradients: Tensor) -> Any:
    raise UnsuitableModelError(
        "the kernels of attention have no second derivatives: use wellposed.attention.eager.eager_attention, which "
        "writes out all weights and can be differentiated twice"
    )


_attention.register_autograd(_backward, setup_context=_keep)
_attention_backward.register_autograd(_refuse)
_direct = direct(_attention, _forward, _gradients, keep=_keep, backward=_backward, refuse=_refuse)


def _token_major(like_BHNd: Tensor) -> Tensor:
    """Room for a tensor of this shape in which the heads of a token lie side by side, as layers around have them."""
    b, h, n, d = like_BHNd.shape
    return like_BHNd.new_empty(b, n, h, d).transpose(1, 2)


@cache
def _kernels_work(device: torch.device) -> bool:
    """Whether the kernels run on `device` at all; if not, one line in the log says why."""
    if device.type != "cuda" and not INTERPRETED:
        _log.warning("attention on %s is computed by its definition: its Triton kernels need a GPU", device)
        return False
    try:
        from wellposed.attention import kernels

        kernels.try_on(device)
    except Exception as error:
        _log.warning("attention on %s is computed by its definition, without its Triton kernels: %s", device, error)
        return False
    return True
