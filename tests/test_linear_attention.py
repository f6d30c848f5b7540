"""Degree 1 by associativity against the definition that writes out every weight."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from wellposed.attention.eager import eager_attention, visible_keys
from wellposed.attention.linear import keys_seen, linear_attention


def tensors(b: int, heads: int, kv_heads: int, n: int, m: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((b, heads, n, d), (b, kv_heads, m, d), (b, kv_heads, m, d))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_the_definition(data: st.DataObject) -> None:
    b, kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    n, m, d = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 200)), data.draw(st.integers(1, 9))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    q, k, v = tensors(b, kv_heads * group, kv_heads, n, m, d, torch.float64)
    scale = data.draw(st.sampled_from([None, 0.3, torch.rand(kv_heads * group, dtype=torch.float64).requires_grad_()]))
    arguments: dict[str, Any] = {"scale": scale, "logit_scale": d**-0.5, "causal": data.draw(st.booleans())}
    arguments["key_mask"] = torch.rand(b, m) > 0.4 if data.draw(st.booleans()) else None
    wanted = [q, k, v, *([scale] if isinstance(scale, Tensor) else [])]
    ours, theirs = linear_attention(q, k, v, **arguments), eager_attention(q, k, v, phi="power1", **arguments)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    do = torch.randn_like(ours)
    for mine, right in zip(torch.autograd.grad(ours, wanted, do), torch.autograd.grad(theirs, wanted, do), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


@given(n=st.integers(1, 12), m=st.integers(1, 12), causal=st.booleans(), masked=st.booleans())
def test_counts_are_those_of_the_mask(n: int, m: int, causal: bool, masked: bool) -> None:
    key_mask = torch.rand(2, m) > 0.5 if masked else None
    device = torch.device("cpu")
    visible = visible_keys(n, m, device, causal=causal, key_mask=key_mask)
    whole = torch.ones(2, 1, n, m, dtype=torch.bool) if visible is None else visible.expand(2, 1, n, m)
    # One causal row is the last key's, whatever it is called.
    seen = keys_seen(n, m, device, causal=causal, key_mask=key_mask)
    torch.testing.assert_close(seen.expand(2, n), whole.sum(-1)[:, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_is_rounded_once(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = tensors(1, 2, 2, 300, 300, 16, dtype)
    exact = eager_attention(q.double(), k.double(), v.double(), phi="power1", logit_scale=0.25, causal=causal)
    o = linear_attention(q, k, v, logit_scale=0.25, causal=causal)
    assert o.dtype == dtype
    torch.testing.assert_close(o.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_large_sums_do_not_overflow_float16() -> None:
    q = k = v = torch.full((1, 1, 4096, 8), 8.0, dtype=torch.float16)
    o = linear_attention(q, k, v, logit_scale=2**-8)
    torch.testing.assert_close(o, torch.full_like(o, 1024.0))  # 512 2^-8 / 64 for each of 4096 values of 8


def test_rows_that_see_nothing_are_zero() -> None:
    q, k, v = tensors(2, 1, 1, 5, 3, 4, torch.float32)
    o = linear_attention(q, k, v, logit_scale=1.0, causal=True, key_mask=torch.tensor([[True] * 3, [False] * 3]))
    assert o[0, :, :2].eq(0).all()
    assert o[1].eq(0).all()
    assert o[0, :, 2:].ne(0).all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(o.sum(), (q, k, v)))


def test_second_derivatives() -> None:
    q, k, v = tensors(1, 2, 1, 5, 5, 2, torch.float64)
    assert torch.autograd.gradgradcheck(lambda *x: linear_attention(*x, logit_scale=0.5, causal=True), (q, k, v))


class _Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.entries = max(self.entries, *(x.numel() for x in [result] if isinstance(x, Tensor)), 0)
        return result


@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_the_number_of_tokens(causal: bool) -> None:
    n, d = 4096, 8
    q, k, v = tensors(1, 1, 1, n, n, d, torch.float32)
    with _Largest() as largest:
        linear_attention(q, k, v, logit_scale=1.0, causal=causal).sum().backward()
    assert n * d <= largest.entries <= 64 * n


def test_compiles_to_one_graph() -> None:
    q, k, v = tensors(1, 2, 1, 70, 90, 4, torch.float32)

    def work(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, logit_scale=0.5, causal=True)

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), work(q, k, v))
