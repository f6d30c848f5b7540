"""The Triton kernels of element-wise attention against its definition in float64.

Most of these run on a GPU, or on the CPU in Triton's interpreter. It has to be asked for before Triton is imported, so
`test_in_the_interpreter` runs this file again in a process of its own.
"""

import logging
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from wellposed.attention import ops
from wellposed.attention.eager import eager_attention
from wellposed.attention.kernels_tiles import INTERPRETED, Kernel, Span, candidates, registers_are_safe, span_of
from wellposed.attention.ops import elementwise_attention
from wellposed.errors import UnsuitableModelError

GPU = torch.cuda.is_available() and not ops.INTERPRETED
DEVICE = "cuda" if GPU else "cpu"
PHIS = ("power2", "power3", "relu", "sigmoid")
ERRORS = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Largest errors, as shares of the largest value."""
with_kernels = pytest.mark.skipif(not GPU and not ops.INTERPRETED, reason="run by test_in_the_interpreter")


@dataclass
class Case:
    """One attention, its inputs with gradients, and what comes in from above."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    arguments: dict[str, Any]

    @property
    def inputs(self) -> list[Tensor]:
        scale = self.arguments.get("scale")
        return [self.q, self.k, self.v, *([scale] if isinstance(scale, Tensor) else [])]

    def results(self, how: Any) -> list[Tensor]:
        o = how(self.q, self.k, self.v, **self.arguments)
        return [o, *torch.autograd.grad(o, self.inputs, self.do)]

    def exact(self) -> list[Tensor]:
        """The definition in float64."""

        def doubled(x: Any) -> Any:
            return x.detach().double().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x

        arguments = {name: doubled(value) for name, value in self.arguments.items()}
        q, k, v = map(doubled, (self.q, self.k, self.v))
        return Case(q, k, v, self.do.double(), arguments).results(eager_attention)


def case(
    b: int,
    heads: int,
    kv_heads: int,
    n: int,
    m: int,
    d: int,
    dtype: torch.dtype,
    *,
    size: float = 1.0,
    **arguments: Any,
) -> Case:
    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).mul(size).to(dtype).requires_grad_()

    q, k = noise(b, heads, n, d), noise(b, kv_heads, m, d)
    if arguments.get("phi") == "relu":  # on a grid: rounding may not decide on which side of 0 a logit lies
        for x in (q, k):
            x.data.mul_(8).round_().div_(8)
    v, do = noise(b, kv_heads, m, d), noise(b, heads, n, d).detach()
    return Case(q, k, v, do, {"logit_scale": d**-0.5, **arguments})


def assert_equal_to_definition(given_case: Case) -> None:
    ours, exact = given_case.results(elementwise_attention), given_case.exact()
    sizes = [right.abs().max().item() for right in exact[:4]]
    if len(exact) == 5:  # the gradient of the scale, a sum of many terms that may cancel
        plain = Case(*(x.double() for x in (given_case.q, given_case.k, given_case.v, given_case.do)), {})
        o = eager_attention(plain.q, plain.k, plain.v, **{**given_case.arguments, "scale": 1.0})
        sizes.append((o * plain.do).abs().sum((0, 2, 3)).max().item())
    for mine, right, size in zip(ours, exact, sizes, strict=True):
        torch.testing.assert_close(mine.double(), right.double(), rtol=0.0, atol=ERRORS[given_case.q.dtype] * size)
    assert ours[0].dtype == given_case.q.dtype


def test_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if ops.INTERPRETED:
        pytest.skip("this is the process it starts")
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not interpreter"]
    here = Path(__file__)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(here), *options],
        cwd=here.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "run by test_in_the_interpreter" not in done.stdout


@with_kernels
@settings(
    max_examples=60 if GPU else 16,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    b, kv_heads, group = data.draw(st.integers(1, 2)), 1, data.draw(st.integers(1, 2))
    n, m = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    d, dtype = data.draw(st.sampled_from([5, 20, 32, 40])), data.draw(st.sampled_from(list(ERRORS)))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    scale = data.draw(st.sampled_from([None, 0.3, torch.rand(group, device=DEVICE).requires_grad_()]))
    key_mask = torch.rand(b, m, device=DEVICE) > 0.3 if data.draw(st.booleans()) else None
    arguments = {"phi": data.draw(st.sampled_from(PHIS)), "causal": data.draw(st.booleans())}
    heads = group * kv_heads
    assert_equal_to_definition(case(b, heads, kv_heads, n, m, d, dtype, scale=scale, key_mask=key_mask, **arguments))


@with_kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("phi", PHIS)
def test_every_function(phi: str, causal: bool) -> None:
    scale = torch.tensor([0.5, -2.0], device=DEVICE).requires_grad_()
    assert_equal_to_definition(case(1, 2, 1, 40, 50, 32, torch.float32, phi=phi, causal=causal, scale=scale))
    assert_equal_to_definition(case(1, 1, 1, 40, 50, 32, torch.bfloat16, phi=phi, causal=causal))


@with_kernels
@pytest.mark.parametrize("d", [64, 128])
def test_wider_heads(d: int) -> None:
    assert_equal_to_definition(case(1, 1, 1, 33, 17, d, torch.float16, phi="power3", causal=True))


@with_kernels
@pytest.mark.parametrize("phi", PHIS)
def test_rows_that_see_nothing_are_zero(phi: str) -> None:
    key_mask = torch.tensor([[False] * 4, [False, True, True, False]], device=DEVICE)
    given_case = case(2, 1, 1, 6, 4, 8, torch.float32, phi=phi, causal=True, key_mask=key_mask)
    o, dq, dk, dv = given_case.results(elementwise_attention)
    assert o[0].eq(0).all()
    assert o[1, :, :3].eq(0).all()  # two rows before the first key, and one that sees a masked key only
    assert o[1, :, 3:].ne(0).all()
    for gradient in (dq, dk, dv):
        assert gradient.isfinite().all()
        assert gradient[0].eq(0).all()
    assert dk[1, :, 3].eq(0).all()
    assert dv[1, :, 3].eq(0).all()


@with_kernels
def test_a_scale_of_zero_gets_its_gradient() -> None:
    scale = torch.zeros(1, device=DEVICE).requires_grad_()
    given_case = case(1, 1, 1, 20, 20, 16, torch.float32, phi="power3", scale=scale)
    assert_equal_to_definition(given_case)
    assert given_case.results(elementwise_attention)[-1].abs() > 1e-3


@with_kernels
def test_float16_holds_weights_larger_than_itself() -> None:
    """Cubes of logits of 100 do not fit; over the root of the number of keys, as they are used, they do."""
    given_case = case(1, 1, 1, 8, 2048 if GPU else 256, 16, torch.float16, phi="power3")
    given_case.q.data.fill_(10.0)
    given_case.k.data.fill_(2.5)
    given_case.v.data.mul_(0.01)
    given_case.do.mul_(0.01)
    s = 16 * 25.0 * given_case.arguments["logit_scale"]
    assert s**3 > torch.finfo(torch.float16).max
    assert_equal_to_definition(given_case)


@with_kernels
def test_inputs_as_layers_lay_them_out() -> None:
    b, n, h, d = 1, 20, 2, 16
    qkv = torch.randn(b, n, 3, h, d, device=DEVICE)
    views = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    how: dict[str, Any] = {"phi": "power3", "logit_scale": 0.25}
    o = elementwise_attention(*views, **how)
    assert o.transpose(1, 2).is_contiguous()
    for strange in (views, [x.mT.contiguous().mT for x in views], [x[:, :1].expand(-1, h, -1, -1) for x in views]):
        torch.testing.assert_close(
            elementwise_attention(*strange, **how), elementwise_attention(*[x.contiguous() for x in strange], **how)
        )
    odd = torch.randn(1 + 3 * n * d, device=DEVICE)[1:].view(3, 1, 1, n, d).requires_grad_()
    (whole,) = torch.autograd.grad(elementwise_attention(*odd, **how).sum(), odd)  # the gradient of a sum is expanded
    (right,) = torch.autograd.grad(eager_attention(*odd, **how).sum(), odd)
    torch.testing.assert_close(whole, right, rtol=1e-4, atol=1e-4)


@with_kernels
def test_same_bits_each_time() -> None:
    scale = torch.rand(4, device=DEVICE).requires_grad_()
    shape = (2, 4, 2, 1000, 1000, 64) if GPU else (1, 4, 2, 40, 40, 8)
    given_case = case(*shape, torch.bfloat16, phi="power3", causal=True, scale=scale)
    first, second = (given_case.results(elementwise_attention) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)


@with_kernels
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by opcheck itself
@pytest.mark.parametrize("masked", [False, True])
def test_is_a_good_operation_of_torch(masked: bool) -> None:
    one = case(1, 2, 1, 5, 6, 8, torch.float32)
    scale = None if masked else torch.rand(2, device=DEVICE).requires_grad_()
    counts = torch.full((1, 5), 3.0, device=DEVICE) if masked else None
    given_inputs = (one.q, one.k, one.v, counts, scale, "power3", None, 0.3, True)
    torch.library.opcheck(ops._attention, given_inputs)
    plain = [x.detach() for x in (one.do, one.q, one.k, one.v)]
    wanted = (True, True, scale is not None)
    torch.library.opcheck(
        ops._attention_backward,
        (*plain, counts, None if scale is None else scale.detach(), "power3", None, 0.3, True, *wanted),
        test_utils=("test_schema", "test_faketensor"),
    )


@with_kernels
def test_compiles_to_one_graph() -> None:
    scale = torch.rand(2, device=DEVICE).requires_grad_()
    key_mask = torch.tensor([[True] * 7 + [False]], device=DEVICE)
    given_case = case(1, 2, 1, 8, 8, 12, torch.float32, phi="sigmoid", causal=True, scale=scale, key_mask=key_mask)
    torch.compiler.reset()
    compiled = torch.compile(elementwise_attention, backend="inductor" if GPU else "aot_eager", fullgraph=True)
    for mine, right in zip(given_case.results(compiled), given_case.results(elementwise_attention), strict=True):
        torch.testing.assert_close(mine, right)


@with_kernels
def test_only_what_is_asked_for_is_computed() -> None:
    one = case(1, 1, 1, 6, 6, 8, torch.float32, phi="relu")
    one.q.requires_grad_(False)
    o = elementwise_attention(one.q, one.k, one.v, **one.arguments)
    right = eager_attention(one.q, one.k, one.v, **one.arguments)
    torch.testing.assert_close(torch.autograd.grad(o, one.v, one.do), torch.autograd.grad(right, one.v, one.do))
    with torch.no_grad():
        assert not elementwise_attention(one.q, one.k, one.v, **one.arguments).requires_grad


@with_kernels
def test_second_derivatives_are_refused() -> None:
    one = case(1, 1, 1, 4, 4, 8, torch.float32, phi="power2")
    o = elementwise_attention(one.q, one.k, one.v, **one.arguments)
    (dq,) = torch.autograd.grad(o.sum(), one.q, create_graph=True)
    with pytest.raises(UnsuitableModelError, match="eager_attention"):
        torch.autograd.grad(dq.sum(), one.k)


@pytest.mark.parametrize(
    ("d", "dtype", "logit_scale"), [(8, torch.float64, 1.0), (130, torch.float32, 1.0), (8, torch.float32, -1.0)]
)
def test_what_has_no_kernel_goes_by_the_definition(d: int, dtype: torch.dtype, logit_scale: float) -> None:
    q, k, v = (torch.randn(1, 1, 3, d, dtype=dtype, device=DEVICE) for _ in range(3))
    how: dict[str, Any] = {"phi": "relu", "logit_scale": logit_scale}
    assert torch.equal(elementwise_attention(q, k, v, **how), eager_attention(q, k, v, **how))
    assert elementwise_attention(q[:, :, :0], k, v, **how).shape == (1, 1, 0, d)
    assert elementwise_attention(q, k[:, :, :0], v[:, :, :0], **how).eq(0).all()
    degree_1 = elementwise_attention(q, k, v, phi="power1", logit_scale=logit_scale)
    right = eager_attention(q, k, v, phi="power1", logit_scale=logit_scale)
    torch.testing.assert_close(degree_1, right, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(ops.INTERPRETED, reason="the interpreter has the kernels on the CPU")
def test_one_line_says_that_there_is_no_gpu(caplog: pytest.LogCaptureFixture) -> None:
    ops._kernels_work.cache_clear()
    x = torch.randn(1, 1, 3, 8)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            o = elementwise_attention(x, x, x, phi="power3", logit_scale=1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "attention on cpu is computed by its definition: its Triton kernels need a GPU"
    ]
    assert torch.equal(o, eager_attention(x, x, x, phi="power3", logit_scale=1.0))


def test_one_line_says_that_triton_is_missing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("wellposed.attention.kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("wellposed.attention.kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(ops, "INTERPRETED", True)  # a device that has kernels
    ops._kernels_work.cache_clear()
    x = torch.randn(1, 1, 3, 8)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            o = elementwise_attention(x, x, x, phi="power3", logit_scale=1.0)
    ops._kernels_work.cache_clear()
    (record,) = caplog.records
    assert "without its Triton kernels" in record.getMessage()
    assert torch.equal(o, eager_attention(x, x, x, phi="power3", logit_scale=1.0))


@pytest.mark.skipif(ops.INTERPRETED, reason="the interpreter multiplies in float32")
@pytest.mark.parametrize(("wanted", "product"), [("tf32", "tf32"), ("ieee", "tf32x3")])
def test_products_of_float32_are_as_exact_as_torchs(wanted: str, product: str) -> None:
    module = pytest.importorskip("wellposed.attention.kernels_settings", reason="Triton is not installed")
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = wanted
        assert module._precision() == product
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_triton_is_imported_when_it_is_used() -> None:
    code = "import sys, wellposed.attention.ops; print('triton' in sys.modules, 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", list(ERRORS))
@pytest.mark.parametrize("d", [32, 64, 80, 128])
@pytest.mark.parametrize("phi", PHIS)
def test_real_sizes(phi: str, d: int, dtype: torch.dtype, causal: bool) -> None:
    assert_equal_to_definition(case(2, 4, 2, 1000, 1031, d, dtype, phi=phi, causal=causal))
    key_mask = torch.arange(197, device=DEVICE) < torch.tensor([[197], [131]], device=DEVICE)
    scale = torch.rand(3, device=DEVICE).requires_grad_()
    assert_equal_to_definition(
        case(2, 3, 3, 197, 197, d, dtype, phi=phi, causal=causal, key_mask=key_mask, scale=scale)
    )


@pytest.mark.gpu
def test_memory_grows_with_the_number_of_tokens() -> None:
    one = case(1, 2, 2, 16384, 16384, 64, torch.bfloat16, phi="power3")
    one.results(elementwise_attention)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one.results(elementwise_attention)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 8 * one.q.numel() * one.q.element_size()


@pytest.mark.gpu
def test_fsdp_and_autocast(process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(64, 192)
            self.scale = torch.nn.Parameter(torch.full((2,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4).unbind(0)
            o = elementwise_attention(q, k, v, phi="power3", scale=self.scale, logit_scale=0.2)
            return o.transpose(1, 2).flatten(2)

    plain = Layer().cuda()
    x = torch.randn(2, 50, 64, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        right = plain(x)
    assert right.dtype == torch.bfloat16
    right.float().sum().backward()
    sharded = Layer().cuda()
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o = sharded(x)
    o.float().sum().backward()
    assert torch.equal(o, right)
    for mine, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("kernel", ["forward", "queries", "keys"])
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_the_span_only_changes_which_tiles_come_first(kernel: Any, width: int, causal: bool) -> None:
    middle = candidates(kernel, width, single=False, causal=causal, span="middle")
    assert len(set(middle)) == len(middle)
    assert {tiles for tiles in middle if not tiles.one_loop} == set(
        candidates(kernel, width, single=False, causal=False, span="middle")
    )
    for span in get_args(Span):
        others = candidates(kernel, width, single=False, causal=causal, span=span)
        assert (set(others), len(others), others[-1]) == (set(middle), len(middle), middle[-1])
    assert middle[-1] == candidates(kernel, width, single=True, causal=False, span="middle")[-1], "the smallest is last"


def test_spans_of_sequences() -> None:
    assert [span_of(tokens) for tokens in (1, 256, 257, 2047, 2048)] == ["short", "short", "middle", "middle", "long"]
    first = [candidates("forward", 64, single=False, causal=True, span=span)[0] for span in get_args(Span)]
    assert len(set(first)) == 3


@with_kernels
@pytest.mark.skipif(GPU, reason="a GPU has tiles of its own, in test_all_tiles_on_a_gpu")
@pytest.mark.parametrize("phi", PHIS)
def test_one_loop_is_as_good_as_two(phi: str) -> None:
    from wellposed.attention.kernels import with_tiles

    tiles = replace(INTERPRETED, one_loop=True)
    for n, m in ((70, 70), (50, 83), (83, 50), (1, 40), (50, 64), (66, 64)):
        with with_tiles("forward", tiles), with_tiles("queries", tiles):
            assert_equal_to_definition(case(1, 2, 1, n, m, 16, torch.float32, phi=phi, causal=True))


@pytest.mark.parametrize(("version", "safe"), [("3.6.1", True), ("3.7.0", False)])
def test_registers_are_used_where_they_were_seen_right(
    version: str, safe: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(registers_are_safe.cache_clear)
    for capability in ((9, 0), (8, 6)):
        registers_are_safe.cache_clear()
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        used = safe and capability == (9, 0)
        for kernel, width in (("forward", 64), ("forward", 128), ("queries", 64), ("queries", 128)):
            found = candidates(kernel, width, single=False, causal=True, span="middle")
            assert any(tiles.in_registers for tiles in found) is used
        assert found[0].one_loop is not used


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kernel", get_args(Kernel))
def test_all_tiles_on_a_gpu(kernel: Any, width: int) -> None:
    from wellposed.attention.kernels import with_tiles

    for causal in (False, True):
        for tiles in candidates(kernel, width, single=False, causal=causal, span="middle"):
            for phi in PHIS if tiles.in_registers or tiles.one_loop else ("power3",):
                for dtype in (torch.bfloat16, torch.float16) if tiles.in_registers else (torch.bfloat16,):
                    with with_tiles(kernel, tiles):
                        assert_equal_to_definition(case(1, 2, 1, 300, 331, width, dtype, phi=phi, causal=causal))
