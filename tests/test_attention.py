"""Attention without softmax, as functions, against loops over its entries."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wellposed.attention import (
    Polynomial,
    polynomial_attention,
    relu_attention,
    sigmoid_attention,
    softmax_attention,
)
from wellposed.attention.eager import attention_weights, eager_attention
from wellposed.attention.functional import attend
from wellposed.attention.specs import from_json, phi_of
from wellposed.errors import InvalidArgumentError

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "power1": lambda *a, **o: polynomial_attention(*a, degree=1, **o),
    "power2": lambda *a, **o: polynomial_attention(*a, degree=2, **o),
    "power3": polynomial_attention,
    "relu": relu_attention,
    "sigmoid": sigmoid_attention,
    "softmax": softmax_attention,
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)
every_power = pytest.mark.parametrize("degree", [1, 2, 3])


def weight_of(name: str, x: float, row: list[float], scale: float | None) -> float:
    """What the logit `x` among those of its row becomes."""
    n = len(row)
    if name == "softmax":
        weight, rule = math.exp(x) / sum(map(math.exp, row)), 1.0
    elif name == "sigmoid":
        weight, rule = 1 / (1 + math.exp(math.log(n) - x)), 1.0
    elif name == "relu":
        weight, rule = max(x, 0.0), 1 / n
    else:
        weight, rule = x ** int(name[-1]), 1 / math.sqrt(n)
    return weight * (rule if scale is None else scale)


def by_loops(
    name: str, q: Tensor, k: Tensor, v: Tensor, sees: Callable[[int, int, int, int], bool], scale: float | None = None
) -> Tensor:
    """The definition, entry by entry."""
    (b, h, n, d), m = q.shape, k.shape[2]
    o = torch.zeros(b, h, n, v.shape[-1], dtype=torch.float64)
    for i in range(b):
        for j in range(h):
            shared = j // (h // k.shape[1])
            for row in range(n):
                seen = [key for key in range(m) if sees(i, j, row, key)]
                x = {key: float(q[i, j, row].double() @ k[i, shared, key].double()) / math.sqrt(d) for key in seen}
                for key in seen:
                    weight = weight_of(name, x[key], list(x.values()), scale)
                    o[i, j, row] += weight * v[i, shared, key].double()
    return o


def random_qkv(
    b: int, h: int, shared: int, n: int, m: int, d: int, seed: int = 0, **options: Any
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (b, h, n, d), (b, h // shared, m, d), (b, h // shared, m, d)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(**options) for shape in shapes)


@given(
    name=st.sampled_from(list(FUNCTIONS)),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
    d=st.integers(1, 4),
    causal=st.booleans(),
    masked=st.sampled_from([None, "keys", "all", "broadcast"]),
    scale=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 99),
)
@settings(max_examples=120, deadline=None)
def test_is_the_definition(
    name: str, sizes: tuple[int, ...], d: int, causal: bool, masked: str | None, scale: float | None, seed: int
) -> None:
    b, groups, shared, n, m = sizes
    h = groups * shared
    q, k, v = random_qkv(b, h, shared, n, m, d, seed)
    shape = {"keys": (b, m), "all": (b, h, n, m), "broadcast": (1, 1, n, m), None: ()}[masked]
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4 if masked else None

    def sees(i: int, j: int, row: int, key: int) -> bool:
        if causal and key > row + m - n:
            return False
        if mask is None:
            return True
        if mask.ndim == 2:
            return bool(mask[i, key])
        return bool(mask.expand(b, h, n, m)[i, j, row, key])

    o = FUNCTIONS[name](q, k, v, causal=causal, mask=mask, scale=scale)
    torch.testing.assert_close(o, by_loops(name, q, k, v, sees, scale), rtol=1e-9, atol=1e-10)


def test_the_papers_x_cubed_over_14() -> None:
    q, k, v = random_qkv(1, 1, 1, 196, 196, 8)
    expected = (q @ k.mT / math.sqrt(8)) ** 3 / 14 @ v
    torch.testing.assert_close(polynomial_attention(q, k, v), expected)


@every_function
def test_padding_changes_nothing(name: str) -> None:
    q, k, v = random_qkv(1, 4, 2, 5, 5, 4)
    alone = FUNCTIONS[name](q, k, v, causal=True)
    padded = [torch.cat([torch.full_like(x, 7.0), x, torch.full_like(x, -9.0)], 2) for x in (q, k, v)]
    mask = torch.tensor([[False] * 5 + [True] * 5 + [False] * 5])
    for given_mask in (mask, mask[:, None, None], mask[:, None, None].expand(1, 4, 15, 15)):
        o = FUNCTIONS[name](*padded, causal=True, mask=given_mask)
        torch.testing.assert_close(o[:, :, 5:10], alone)


@every_function
def test_decoding_with_a_cache_is_the_whole_at_once(name: str) -> None:
    q, k, v = random_qkv(2, 2, 1, 6, 6, 4)
    whole = FUNCTIONS[name](q, k, v, causal=True)
    for first, last in ((0, 1), (1, 4), (4, 5), (5, 6)):
        step = FUNCTIONS[name](q[:, :, first:last], k[:, :, :last], v[:, :, :last], causal=True)
        torch.testing.assert_close(step, whole[:, :, first:last])


@every_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_sees_nothing_is_zero(name: str, dtype: torch.dtype) -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(2, 2, 1, 3, 3, 4, dtype=dtype))
    by_row = torch.ones(2, 2, 3, 3, dtype=torch.bool)
    by_row[0, :, 1] = False
    for mask, blind in ((by_row, (0, slice(None), 1)), (torch.tensor([[True] * 3, [False] * 3]), (1,))):
        o = FUNCTIONS[name](q, k, v, mask=mask)
        assert not o[blind].any()
        assert o.isfinite().all()
        gradients = torch.autograd.grad(o.float().square().sum(), (q, k, v))
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert not gradients[0][blind].any()


@every_function
def test_gradients(name: str) -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(1, 2, 2, 3, 4, 3))
    mask = torch.tensor([[True, False, True, True]])
    scale = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: FUNCTIONS[name](q, k, v, scale=s, causal=True, mask=mask), (q, k, v, scale)
    )


@every_power
def test_a_scale_for_each_head(degree: int) -> None:
    q, k, v = random_qkv(1, 3, 1, 4, 4, 2)
    scale = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64, requires_grad=True)
    o = polynomial_attention(q, k, v, degree=degree, scale=scale)
    unscaled = (q @ k.mT / math.sqrt(2)) ** degree @ v
    torch.testing.assert_close(o, unscaled * torch.tensor([1.0, 2.0, -3.0]).view(3, 1, 1))
    (slope,) = torch.autograd.grad(o.sum(), scale)
    torch.testing.assert_close(slope, unscaled.sum((0, 2, 3)))


@every_function
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_types_lose_no_more_than_the_last_rounding(name: str, dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = (x.to(dtype) for x in random_qkv(1, 2, 1, 33, 33, 16))
    o = FUNCTIONS[name](q, k, v)
    assert o.dtype == dtype
    exact = FUNCTIONS[name](q.double(), k.double(), v.double())
    # torch's fused softmax rounds its weights too
    slack = 4 * tolerance if name == "softmax" else 1.05 * tolerance
    torch.testing.assert_close(o.double(), exact, rtol=slack, atol=slack * (1 if name == "softmax" else 1e-3))


def test_under_autocast_types_may_differ() -> None:
    q, k, v = (x.float() for x in random_qkv(1, 2, 1, 5, 5, 8))
    with torch.autocast("cpu", torch.bfloat16):
        o = polynomial_attention(q, k, v.bfloat16())
        weights = attention_weights(q.bfloat16(), k.bfloat16(), phi="power3", logit_scale=1.0)
    assert o.dtype == torch.bfloat16
    assert weights.dtype == torch.float32
    assert torch.equal(o, polynomial_attention(*(x.bfloat16() for x in (q, k, v))))


@pytest.mark.parametrize("causal", [False, True])
@every_function
def test_compiles_whole(name: str, causal: bool) -> None:
    q, k, v = (x.float().requires_grad_() for x in random_qkv(2, 2, 1, 6, 6, 4))
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    compiled = torch.compile(FUNCTIONS[name], backend="aot_eager", fullgraph=True)
    expected, o = (f(q, k, v, causal=causal, mask=mask) for f in (FUNCTIONS[name], compiled))
    torch.testing.assert_close(o, expected)
    ours, theirs = (torch.autograd.grad(each.square().sum(), (q, k, v)) for each in (o, expected))
    torch.testing.assert_close(ours, theirs)


def test_bias_and_dropout() -> None:
    q, k, v = random_qkv(2, 2, 1, 40, 40, 4)
    bias = torch.randn(1, 2, 40, 40, dtype=torch.float64)
    how: dict[str, Any] = {"phi": "power3", "logit_scale": 0.5}
    expected = (q @ k.mT * 0.5 + bias) ** 3 / math.sqrt(40)
    torch.testing.assert_close(attend(q, k, v, bias=bias, **how), expected @ v)
    torch.testing.assert_close(
        attend(q, k, v, bias=bias, phi="softmax", logit_scale=0.5), (q @ k.mT * 0.5 + bias).softmax(-1) @ v
    )
    eye = torch.eye(40, dtype=torch.float64).expand(2, 2, 40, 40)
    kept = attend(q, k, eye, bias=bias, dropout=0.25, **how) / expected
    assert set(kept.round(decimals=9).unique().tolist()) == {0.0, round(4 / 3, 9)}
    assert (kept == 0).double().mean() == pytest.approx(0.25, abs=0.03)


def test_more_queries_than_keys() -> None:
    q, k, v = random_qkv(1, 1, 1, 5, 2, 3)
    o = polynomial_attention(q, k, v, causal=True)
    assert not o[:, :, :3].any(), "rows before the first key see nothing"
    torch.testing.assert_close(o[:, :, 3:], polynomial_attention(q[:, :, 3:], k, v, causal=True))


# --- refusals


@pytest.mark.parametrize("degree", [0, 4, -1, 1.5, "3", True, None])
def test_degrees_that_are_none(degree: Any) -> None:
    q, k, v = random_qkv(1, 1, 1, 2, 2, 2)
    with pytest.raises(InvalidArgumentError, match="expected 1, 2 or 3"):
        polynomial_attention(q, k, v, degree=degree)
    with pytest.raises(InvalidArgumentError, match="expected 1, 2 or 3"):
        Polynomial(degree)


def test_a_degree_is_a_whole_number_whatever_it_is_written_as() -> None:
    assert phi_of(Polynomial(2.0)) == "power2"  # type: ignore[arg-type]


@every_function
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 4), "float32: expected a tensor of torch.bool"),
        (torch.ones(2, 4, dtype=torch.int64), "int64: expected a tensor of torch.bool"),
        ([[True] * 4] * 2, "list: expected a tensor of torch.bool"),
        (torch.ones(3, 4, dtype=torch.bool), r"\(3, 4\): expected \(B, M\) = \(2, 4\)"),
        (torch.ones(4, dtype=torch.bool), r"\(4,\): expected"),
        (torch.ones(2, 3, 4, dtype=torch.bool), r"\(2, 3, 4\): expected"),
        (torch.ones(2, 1, 3, 1, dtype=torch.bool), r"\(2, 1, 3, 1\): expected"),
        (torch.ones(2, 2, 4, 4, dtype=torch.bool), r"\(B, H, N, M\) = \(2, 2, 3, 4\)"),
        (torch.ones(2, 4, dtype=torch.bool, device="meta"), "mask is on meta"),
    ],
    ids=str,
)
def test_masks_that_do_not_fit(name: str, mask: Any, message: str) -> None:
    q, k, v = random_qkv(2, 2, 1, 3, 4, 2)
    with pytest.raises(InvalidArgumentError, match=message):
        FUNCTIONS[name](q, k, v, mask=mask)


@every_function
def test_tensors_that_do_not_belong_together(name: str) -> None:
    q, k, v = random_qkv(2, 4, 2, 3, 5, 4)
    for arguments, message in (
        ((q.float(), k, v), "q torch.float32, k torch.float64, v torch.float64: expected one dtype"),
        ((q, k.to("meta"), v), "k meta, v cpu: expected one device"),
        ((q.int(), k.int(), v.int()), "int32: expected a floating-point type"),
        ((q[0], k, v), r"q is of shape \(4, 3, 4\)"),
        ((q, k, "v"), "v is a str"),
        ((q[:1], k, v), "one batch size"),
        ((q[..., :3], k, v), "queries as wide as keys"),
        ((q, k[:, :, :4], v), "as many keys as values"),
        ((q[:, :3], k, v), "a multiple of the keys' 2 heads"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            FUNCTIONS[name](*arguments)


@pytest.mark.parametrize("scale", [math.nan, math.inf, "1", True, torch.ones(3), torch.ones(2, dtype=torch.int64)])
def test_scales_that_are_none(scale: Any) -> None:
    q, k, v = random_qkv(1, 2, 1, 2, 2, 2)
    with pytest.raises(InvalidArgumentError, match="scale"):
        polynomial_attention(q, k, v, scale=scale)


def test_specs_that_are_none() -> None:
    for arguments, message in (
        ({"scale": 0}, "scale=0"),
        ({"scale": math.nan}, "scale=nan"),
        ({"learnable": 1}, "learnable=1"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            Polynomial(3, **arguments)
    with pytest.raises(InvalidArgumentError, match="kind='elu': expected polynomial, relu"):
        from_json("elu")
    with pytest.raises(InvalidArgumentError, match="no such arguments"):
        from_json("relu", degree=3)
    q, k, v = random_qkv(1, 1, 1, 2, 2, 2)
    with pytest.raises(InvalidArgumentError, match="phi='power4'"):
        attend(q, k, v, phi="power4")


@pytest.mark.gpu
@every_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in random_qkv(2, 4, 2, 65, 65, 32))
    mask = torch.rand(2, 65) > 0.3
    mask[:, 0] = True
    o = FUNCTIONS[name](*(x.cuda() for x in (q, k, v)), causal=True, mask=mask.cuda())
    exact = FUNCTIONS[name](q.double(), k.double(), v.double(), causal=True, mask=mask)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(o.cpu().double(), exact, rtol=tolerance, atol=tolerance)


def test_eager_is_what_the_functions_compute() -> None:
    q, k, v = random_qkv(1, 2, 1, 4, 4, 4)
    torch.testing.assert_close(eager_attention(q, k, v, phi="relu", logit_scale=0.5), relu_attention(q, k, v))
