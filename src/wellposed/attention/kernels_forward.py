# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="import-untyped"
"""The forward kernel of element-wise attention: o_i = factor_i * sum over j of phi(q_i . k_j) v_j.

Without a row maximum and a normaliser there is nothing to carry from one block of keys to the next but the sum itself.

Shapes: BM queries and BN keys in a tile, D the width of a head, rounded up.
"""

import triton
import triton.language as tl

from wellposed.attention.kernels_pieces import (
    by_rule,
    in_registers,
    key_ranges,
    keys_seen,
    logits,
    phi,
    put,
    tile,
    with_product,
)


@triton.jit
def _over_keys(
    acc,
    q,
    k_desc,
    v_desc,
    batch,
    kv_head,
    own,
    low,
    high,
    all_see,
    pre,
    slope,
    bias,
    PHI: tl.constexpr,
    CROSSED: tl.constexpr,
    PRESCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
):
    """The sum with keys from `low` to `high` added; CROSSED by the diagonal, those from `all_see` on, or not."""
    for start in tl.range(low, high, BN):
        k = tile(k_desc, batch, kv_head, start, BN, D)
        v = tile(v_desc, batch, kv_head, start, BN, D)
        p = phi(logits(q, k.T, pre, PRESCALED, PRECISION), slope, bias, PHI)
        if CROSSED:  # noqa: SIM102  # known when it is compiled, unlike the other
            if start >= all_see:
                p = tl.where(own >= start + tl.arange(0, BN)[None, :], p, 0.0)
        acc = with_product(acc, p, v, PRECISION)
    return acc


@triton.jit
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    counts,
    head_scale,
    factor,
    pre,
    slope,
    bias,
    heads,
    n_q,
    n_k,
    PHI: tl.constexpr,
    CAUSAL: tl.constexpr,
    COUNTED: tl.constexpr,
    PER_ROW: tl.constexpr,
    PER_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    PRESCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
):
    """One block of queries of one head; the blocks that see the most keys come first."""
    blocks = tl.cdiv(n_q, BM)
    block = blocks - 1 - tl.program_id(0) % blocks
    batch = tl.program_id(0) // blocks // heads
    head = tl.program_id(0) // blocks % heads
    first = block * BM
    rows = first + tl.arange(0, BM)
    weight = factor
    if PER_HEAD:
        weight *= tl.load(head_scale + head)
    seen = tl.full([BM], 1.0, tl.float32)
    if PER_ROW:
        seen = keys_seen(counts + batch * n_q, rows, n_q, n_k, COUNTED)
        if PHI == "sigmoid":
            bias = tl.log2(seen)[:, None]
    q = tile(q_desc, batch, head, first, BM, D)
    if IN_REGISTERS:
        q = in_registers(q, PRECISION)
    acc = tl.zeros([BM, D], tl.float32)
    own = rows[:, None] + (n_k - n_q)
    all_see, end = key_ranges(first, n_q, n_k, CAUSAL, BM, BN)
    acc = _over_keys(
        *(acc, q, k_desc, v_desc, batch, head // GROUP, own, 0, end if ONE_LOOP else all_see, all_see),
        *(pre, slope, bias, PHI, ONE_LOOP, PRESCALED, PRECISION, D, BN),
    )
    if CAUSAL and not ONE_LOOP:
        acc = _over_keys(
            *(acc, q, k_desc, v_desc, batch, head // GROUP, own, all_see, end, all_see),
            *(pre, slope, bias, PHI, True, PRESCALED, PRECISION, D, BN),
        )
    if PER_ROW and PHI != "sigmoid":
        acc *= by_rule(seen, PHI)[:, None]
    put(o_desc, batch, head, first, (acc * weight).to(q.dtype), BM, D)
