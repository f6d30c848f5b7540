# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="import-untyped"
"""What the kernels of element-wise attention share: tiles, the function phi, and how many keys a row can see.

A weight is factor * phi(S) with S = q k^T. What is the same for all keys of a row is multiplied in after the loop over
keys: a tile costs no more than phi itself. Keys and queries past the end are read as zeros, and so are masked keys. In
power and ReLU a logit of 0 has a weight of 0; in sigmoid its value is 0. Only the causal mask needs a comparison, on
the blocks that the diagonal crosses.
"""

import triton
import triton.language as tl


@triton.jit
def tile(descriptor, batch, head, start, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows from `start` on of one head, (ROWS, D), with zeros past the end."""
    return descriptor.load([batch, head, start, 0]).reshape(ROWS, D)


@triton.jit
def put(descriptor, batch, head, start, values, ROWS: tl.constexpr, D: tl.constexpr):
    """Write (ROWS, D) where `tile` reads; what is past the end is dropped."""
    descriptor.store([batch, head, start, 0], values.reshape(1, 1, ROWS, D))


@triton.jit
def in_registers(x, PRECISION: tl.constexpr):
    """The same values, of 16 bits, where a product reads them from registers rather than from shared memory."""
    if PRECISION == "interpreted":
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """The product a b in float32. The interpreter would take the bits of a bfloat16 for an integer."""
    if PRECISION == "interpreted":
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def logits(a, b, pre, PRESCALED: tl.constexpr, PRECISION: tl.constexpr):
    """The product a b in float32, times `pre` if the weights would not fit into their type otherwise."""
    s = product(a, b, PRECISION)
    if PRESCALED:
        s *= pre
    return s


@triton.jit
def with_product(c, a, b, PRECISION: tl.constexpr):
    """The sum c + a b, with `a` rounded to the type of `b` first."""
    if PRECISION == "interpreted":
        return tl.dot(a.to(b.dtype).to(tl.float32), b.to(tl.float32), c)
    else:
        return tl.dot(a.to(b.dtype), b, c, input_precision=PRECISION)


@triton.jit
def keys_seen(counts, rows, n_q, n_k, COUNTED: tl.constexpr):
    """How many keys each of the rows can see, at least 1, as float32: from `counts`, or those up to its own."""
    if COUNTED:  # noqa: SIM108  # known when it is compiled
        seen = tl.load(counts + rows, mask=rows < n_q, other=1.0)
    else:
        seen = (rows + (1 + n_k - n_q)).to(tl.float32)
    return tl.maximum(seen, 1.0)


@triton.jit
def key_ranges(first, n_q, n_k, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Up to which key all queries of the block at `first` see whole tiles, and up to which any of them sees one."""
    if CAUSAL:
        return tl.maximum(first + 1 + n_k - n_q, 0) // BN * BN, tl.minimum(first + BM + n_k - n_q, n_k)
    else:
        return n_k, n_k


@triton.jit
def by_rule(seen, PHI: tl.constexpr):
    """The factor of a row that sees so many keys, n: 1 / n for ReLU and 1 / sqrt(n) for powers. Sigmoid has none."""
    if PHI == "relu":
        return 1.0 / seen
    else:
        return tl.rsqrt(seen)


@triton.jit
def phi(s, slope, bias, PHI: tl.constexpr):
    """The weights up to constant factors; sigmoid's of S - log n by slope = logit_scale log2(e), bias = log2(n)."""
    if PHI == "power3":
        return s * s * s
    elif PHI == "power2":
        return s * s
    elif PHI == "relu":
        return tl.maximum(s, 0.0)
    else:
        return 1.0 / (1.0 + tl.exp2(bias - slope * s))


@triton.jit
def phi_and_slope(s, slope, bias, PHI: tl.constexpr):
    """The weights and their derivative by S, both up to constant factors."""
    if PHI == "power3":
        square = s * s
        return square * s, square
    elif PHI == "power2":
        return s * s, s
    elif PHI == "relu":
        return tl.maximum(s, 0.0), tl.where(s > 0.0, 1.0, 0.0)
    else:
        p = phi(s, slope, bias, PHI)
        return p, p - p * p
