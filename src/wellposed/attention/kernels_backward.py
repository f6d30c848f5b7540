# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="import-untyped"
"""The backward kernels of element-wise attention, with the tiles of S computed again.

    P = phi(S);   dP = dO V^T;   dS = phi'(S) * dP
    dV = P^T (factor dO);   dK = dS^T (factor Q);   dQ = factor dS K

One kernel goes over the queries and keeps dK and dV, one goes over the keys and keeps dQ: each sum has one owner and
one order, and the result is the same bits every time.

By Euler's rule for a homogeneous phi, S phi'(S) = p phi(S), the derivative by a row's factor is q . (dS K) up to a
constant: the factor of a head gets its gradient from the sum that dQ is made of. Sigmoid's needs a sum of its own.

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
    phi_and_slope,
    product,
    put,
    tile,
    with_product,
)


@triton.jit
def _onto_queries(
    acc,
    derivative,
    q,
    do,
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
    PER_HEAD: tl.constexpr,
    PRESCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
):
    """The dQ of one block with keys from `low` to `high` added; CROSSED by the diagonal, those from `all_see` on."""
    for start in tl.range(low, high, BN):
        k = tile(k_desc, batch, kv_head, start, BN, D)
        v = tile(v_desc, batch, kv_head, start, BN, D)
        s = logits(q, k.T, pre, PRESCALED, PRECISION)
        dp = product(do, v.T, PRECISION)
        if CROSSED:  # noqa: SIM102  # known when it is compiled, unlike the other
            if start >= all_see:
                dp = tl.where(own >= start + tl.arange(0, BN)[None, :], dp, 0.0)
        p, ds = phi_and_slope(s, slope, bias, PHI)
        if PER_HEAD and PHI == "sigmoid":
            derivative += tl.sum(p * dp, 1)
        acc = with_product(acc, ds * dp, k, PRECISION)
    return acc, derivative


@triton.jit
def queries_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dq_desc,
    by_factor,
    counts,
    head_scale,
    factor,
    factor_slope,
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
    """The dQ of one block of queries, and with PER_HEAD the derivative by each row's factor."""
    blocks = tl.cdiv(n_q, BM)
    block = blocks - 1 - tl.program_id(0) % blocks
    batch = tl.program_id(0) // blocks // heads
    head = tl.program_id(0) // blocks % heads
    first = block * BM
    rows = first + tl.arange(0, BM)
    seen = tl.full([BM], 1.0, tl.float32)
    if PER_ROW:
        seen = keys_seen(counts + batch * n_q, rows, n_q, n_k, COUNTED)
        if PHI == "sigmoid":
            bias = tl.log2(seen)[:, None]
    q = tile(q_desc, batch, head, first, BM, D)
    do = tile(do_desc, batch, head, first, BM, D)
    if IN_REGISTERS:
        q = in_registers(q, PRECISION)
        do = in_registers(do, PRECISION)
    acc = tl.zeros([BM, D], tl.float32)
    derivative = tl.zeros([BM], tl.float32)
    own = rows[:, None] + (n_k - n_q)
    all_see, end = key_ranges(first, n_q, n_k, CAUSAL, BM, BN)
    acc, derivative = _onto_queries(
        *(acc, derivative, q, do, k_desc, v_desc, batch, head // GROUP, own, 0, end if ONE_LOOP else all_see, all_see),
        *(pre, slope, bias, PHI, ONE_LOOP, PER_HEAD, PRESCALED, PRECISION, D, BN),
    )
    if CAUSAL and not ONE_LOOP:
        acc, derivative = _onto_queries(
            *(acc, derivative, q, do, k_desc, v_desc, batch, head // GROUP, own, all_see, end, all_see),
            *(pre, slope, bias, PHI, True, PER_HEAD, PRESCALED, PRECISION, D, BN),
        )
    weight = factor_slope
    if PER_HEAD:
        if PHI != "sigmoid":
            derivative = tl.sum(tile(q_desc, batch, head, first, BM, D).to(tl.float32) * acc, 1)
        by_factor += (batch * heads + head).to(tl.int64) * n_q
        tl.store(by_factor + rows, derivative * factor, mask=rows < n_q)
        weight *= tl.load(head_scale + head)
    if PER_ROW and PHI != "sigmoid":
        acc *= by_rule(seen, PHI)[:, None]
    put(dq_desc, batch, head, first, (acc * weight).to(q.dtype), BM, D)


@triton.jit
def _onto_keys(
    dk,
    dv,
    k,
    v,
    q_desc,
    do_desc,
    counts,
    batch,
    head,
    first,
    low,
    crossed,
    n_q,
    n_k,
    weight,
    pre,
    slope,
    bias,
    PHI: tl.constexpr,
    CAUSAL: tl.constexpr,
    COUNTED: tl.constexpr,
    PER_ROW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PRESCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The dK and dV of one block of keys with queries from `low` on added; the diagonal crosses those up to `crossed`.

    One loop with a branch in it keeps its loads under way where two loops would start anew.
    """
    for start in tl.range(low, n_q, BM):
        q = tile(q_desc, batch, head, start, BM, D)
        do = tile(do_desc, batch, head, start, BM, D)
        rows = start + tl.arange(0, BM)
        shift = bias
        if PER_ROW:
            seen = keys_seen(counts, rows, n_q, n_k, COUNTED)
            if PHI == "sigmoid":
                shift = tl.log2(seen)[None, :]
        s_t = logits(k, q.T, pre, PRESCALED, PRECISION)
        dp_t = product(v, do.T, PRECISION)
        p_t, ds_t = phi_and_slope(s_t, slope, shift, PHI)
        if WEIGHTED:
            p_t *= weight
            ds_t *= weight
        if PER_ROW and PHI != "sigmoid":
            rule = by_rule(seen, PHI)[None, :]
            p_t *= rule
            ds_t *= rule
        ds_t *= dp_t
        if CAUSAL:  # noqa: SIM102  # known when it is compiled, unlike the other
            if start < crossed:
                visible = rows[None, :] + (n_k - n_q) >= first + tl.arange(0, BN)[:, None]
                p_t = tl.where(visible, p_t, 0.0)
                ds_t = tl.where(visible, ds_t, 0.0)
        dv = with_product(dv, p_t, do, PRECISION)
        dk = with_product(dk, ds_t, q, PRECISION)
    return dk, dv


@triton.jit
def keys_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dk_desc,
    dv_desc,
    counts,
    head_scale,
    factor,
    factor_slope,
    pre,
    slope,
    bias,
    kv_heads,
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
):
    """The dK and dV of one block of keys, from all the heads that read it."""
    blocks = tl.cdiv(n_k, BN)
    first = tl.program_id(0) % blocks * BN
    batch = tl.program_id(0) // blocks // kv_heads
    kv_head = tl.program_id(0) // blocks % kv_heads
    counts += batch * n_q
    k = tile(k_desc, batch, kv_head, first, BN, D)
    v = tile(v_desc, batch, kv_head, first, BN, D)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    low = 0
    crossed = 0
    if CAUSAL:
        low = tl.maximum(first - (n_k - n_q), 0) // BM * BM
        crossed = tl.maximum(first + BN - 1 - (n_k - n_q), 0)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        weight = 1.0
        if PER_HEAD:
            weight = tl.load(head_scale + head)
        dk, dv = _onto_keys(
            *(dk, dv, k, v, q_desc, do_desc, counts, batch, head, first),
            *(low, crossed, n_q, n_k, weight, pre, slope, bias),
            *(PHI, CAUSAL, COUNTED, PER_ROW, PER_HEAD, PRESCALED, PRECISION, D, BM, BN),
        )
    put(dk_desc, batch, kv_head, first, (dk * factor_slope).to(v.dtype), BN, D)
    put(dv_desc, batch, kv_head, first, (dv * factor).to(v.dtype), BN, D)
