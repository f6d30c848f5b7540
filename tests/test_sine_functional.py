"""sine_linear against torch's own autograd of the definition, and what it keeps, rounds and refuses."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from wellposed.errors import InvalidArgumentError, UnsuitableModelError
from wellposed.lowrank import passes
from wellposed.lowrank.eager import rank_product, sine_delta
from wellposed.lowrank.functional import sine_linear


def layer(
    tokens: int = 6, cols: int = 13, rows: int = 9, r: int = 3, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """x, weight0, bias, a and b, all but weight0 asking for gradients; the factors never in less than float32."""
    whole = torch.promote_types(dtype, torch.float32)
    x, weight0, bias = (torch.randn(shape, dtype=dtype) for shape in ((2, tokens, cols), (rows, cols), (rows,)))
    a, b = torch.randn(r, cols, dtype=whole), torch.randn(rows, r, dtype=whole)
    return [x.requires_grad_(), weight0, bias.requires_grad_(), a.requires_grad_(), b.requires_grad_()]


def by_definition(
    x: Tensor, weight0: Tensor | None, bias: Tensor | None, a: Tensor, b: Tensor, omega: float, scale: float
) -> Tensor:
    delta = scale * torch.sin(omega * (b.double() @ a.double()))
    y = x.double() @ (delta if weight0 is None else weight0.double() + delta).T
    return y if bias is None else y + bias.double()


BOTH = (sine_linear, by_definition)


def gradients(y: Tensor, inputs: list[Tensor], seed: int = 1) -> list[Tensor]:
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return list(torch.autograd.grad(y, inputs, dy.to(y.dtype)))


def relative(given: Tensor, expected: Tensor) -> float:
    given, expected = given.detach().double(), expected.detach().double()
    return float((given - expected).norm() / expected.norm())


@pytest.mark.parametrize("without", [(), (1,), (2,), (1, 2)])
def test_gradients_are_those_of_finite_differences(without: tuple[int, ...]) -> None:
    inputs = [None if index in without else each for index, each in enumerate(layer())]
    assert torch.autograd.gradcheck(partial(sine_linear, omega=2.0, scale=0.5), inputs)


def test_weight0_gets_a_gradient_if_it_asks_for_one() -> None:
    inputs = layer()
    y = sine_linear(*inputs, 2.0, 0.5)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(y.sum(), inputs[1])
    inputs[1].requires_grad_()
    assert torch.autograd.gradcheck(partial(sine_linear, omega=2.0, scale=0.5), inputs)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 9),
    cols=st.integers(1, 40),
    rows=st.integers(1, 40),
    r=st.integers(1, 12),
    omega=st.floats(0.01, 300),
    scale=st.floats(-2, 2),
    together=st.booleans(),
)
def test_any_shape_equals_the_definition(
    tokens: int, cols: int, rows: int, r: int, omega: float, scale: float, together: bool
) -> None:
    inputs = layer(tokens, cols, rows, r)
    before = passes._ROWS_OF
    passes._ROWS_OF = before if together else 3 * cols
    try:
        y = sine_linear(*inputs, omega, scale)
        given = gradients(y, [inputs[0], *inputs[2:]])
    finally:
        passes._ROWS_OF = before
    expected = by_definition(*inputs, omega, scale)
    assert y.shape == (2, tokens, rows)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(given, gradients(expected, [inputs[0], *inputs[2:]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("factors", [torch.bfloat16, torch.float32])
def test_every_type(dtype: torch.dtype, factors: torch.dtype) -> None:
    x, weight0, bias, a, b = layer(32, 70, 50, 4, dtype)
    a, b = (each.detach().to(factors).requires_grad_() for each in (a, b))
    inputs = [x, weight0, bias, a, b]
    y = sine_linear(*inputs, 20.0, 0.7)
    given = gradients(y, [x, bias, a, b])
    expected = by_definition(*inputs, 20.0, 0.7)
    step = max(torch.finfo(dtype).eps, 3e-6)
    assert y.dtype == dtype
    assert relative(y, expected) < step
    for each, of, right in zip(given, (x, bias, a, b), gradients(expected, [x, bias, a, b]), strict=True):
        assert each.dtype == of.dtype
        assert each.shape == of.shape
        assert relative(each, right) < 2 * max(step, torch.finfo(of.dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_update_below_the_last_bit_survives(dtype: torch.dtype) -> None:
    x, weight0, _, a, b = (each.detach() for each in layer(256, 512, 64, 4, dtype))
    scale = 0.1 * torch.finfo(dtype).eps
    delta = sine_delta(a, b, 1.0, scale, torch.float64)
    rounded = (weight0.double() + delta).to(dtype).double() - weight0.double()
    true = x.double() @ delta.T

    def share(difference: Tensor) -> float:
        """Of the true change, what is there."""
        return float((difference * true).sum() / true.square().sum())

    assert share(x.double() @ rounded.T) < 0.5
    change = sine_linear(x, weight0, None, a, b, 1.0, scale).double() - F.linear(x, weight0).double()
    noise = F.linear(x, weight0).abs().double().mean() * torch.finfo(dtype).eps / true.std() / true.numel() ** 0.5
    assert share(change) == pytest.approx(1, abs=5 * float(noise))
    assert noise < 0.1


def test_the_update_is_exactly_nothing_at_the_start() -> None:
    x, weight0, bias, a, b = (each.detach() for each in layer(dtype=torch.bfloat16))
    start = (a, torch.zeros_like(b), 100.0, 2.0)
    assert sine_linear(x, weight0, None, *start).equal(F.linear(x, weight0))
    assert sine_linear(x, weight0, bias, *start).equal(F.linear(x, weight0) + bias)
    whole = (x.float(), weight0.float(), bias.float())
    assert sine_linear(*whole, *start).equal(F.linear(*whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_matrix_is_kept_between_the_passes(dtype: torch.dtype) -> None:
    x, weight0, bias, a, b = layer(dtype=dtype)
    assert kept_by(x, weight0, bias, a, b) == {each.data_ptr() for each in (x, weight0, a, b)}
    assert x.data_ptr() not in kept_by(x, weight0, bias, a.detach(), b.detach())


def kept_by(*inputs: Tensor) -> set[int]:
    """Where the tensors are that the backward pass holds on to."""
    kept: list[Tensor] = []

    def keep(each: Tensor) -> Tensor:
        kept.append(each)
        return each

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        y = sine_linear(*inputs, 2.0, 0.5)
    assert y.grad_fn is not None
    return {each.data_ptr() for each in kept}


def test_autocast_casts_the_product_and_leaves_the_sine() -> None:
    inputs = layer(16, 64, 48, 4, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = sine_linear(*inputs, 100.0, 1.0)
        given = gradients(y, inputs[2:])
    expected = by_definition(*inputs, 100.0, 1.0)
    assert (omega_std := 100.0 * float(rank_product(inputs[3], inputs[4]).detach().std())) > 100
    assert y.dtype == torch.bfloat16, omega_std
    assert relative(y, expected) < 0.01
    for each, right in zip(given, gradients(expected, inputs[2:]), strict=True):
        assert each.dtype == torch.float32
        assert relative(each, right) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_as_one_operation(dtype: torch.dtype) -> None:
    inputs = layer(dtype=dtype)
    compiled = torch.compile(sine_linear, fullgraph=True, backend="aot_eager")
    for tokens in (6, 7, 11):
        inputs[0] = torch.randn(2, tokens, 13, dtype=dtype, requires_grad=True)
        asking = [inputs[0], *inputs[2:]]
        y, expected = compiled(*inputs, 2.0, 0.5), sine_linear(*inputs, 2.0, 0.5)
        assert y.equal(expected)
        assert all(map(torch.equal, gradients(y, asking), gradients(expected, asking)))
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own
def test_the_operations_are_registered_as_torch_wants_them() -> None:
    inputs = layer(dtype=torch.float32)
    torch.library.opcheck(torch.ops.wellposed.sine_linear.default, (*inputs, 2.0, 0.5))
    x, _, _, a, b = (each.detach() for each in inputs)
    torch.library.opcheck(torch.ops.wellposed.sine_linear.default, (x, None, None, a, b, 2.0, 0.5))
    dy = torch.randn(2, 6, 9)
    for asked in ((True, True, True), (True, False, False), (False, False, True)):
        arguments = (dy, x, inputs[1], a, b, 2.0, 0.5, *asked)
        torch.library.opcheck(torch.ops.wellposed.sine_linear_backward.default, arguments)
    across = (a.T.contiguous().T, b.T.contiguous().T)
    arguments = (dy, x, inputs[1], *across, 2.0, 0.5, True, True, True)
    torch.library.opcheck(torch.ops.wellposed.sine_linear_backward.default, arguments)


def test_without_dispatch_it_is_the_same_operation() -> None:
    inputs = layer(dtype=torch.bfloat16)
    asking = [inputs[0], *inputs[2:]]
    ways = [function(*inputs, 2.0, 0.5) for function in (sine_linear, torch.ops.wellposed.sine_linear)]
    assert ways[0].equal(ways[1])
    assert all(map(torch.equal, *(gradients(y, asking) for y in ways)))
    fakes = [FakeTensorMode().from_tensor(inputs[0])]
    fakes += [fakes[0].fake_mode.from_tensor(each) for each in inputs[1:]]
    y = sine_linear(*fakes, 2.0, 0.5)
    assert isinstance(y, FakeTensor)
    assert y.shape == ways[0].shape


def test_checkpointing_gives_the_same_gradients() -> None:
    inputs = layer(dtype=torch.bfloat16)
    asking = [inputs[0], *inputs[2:]]
    again = checkpoint(sine_linear, *inputs, 2.0, 0.5, use_reentrant=False)
    assert all(map(torch.equal, gradients(again, asking), gradients(sine_linear(*inputs, 2.0, 0.5), asking)))


@pytest.mark.usefixtures("process_group")
def test_sharded_parameters() -> None:
    from torch.distributed.fsdp import fully_shard

    class Layer(torch.nn.Module):
        def __init__(self, weight0: Tensor, a: Tensor, b: Tensor) -> None:
            super().__init__()
            self.weight0 = torch.nn.Parameter(weight0, requires_grad=False)
            self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)

        def forward(self, x: Tensor) -> Tensor:
            return sine_linear(x, self.weight0, None, self.a, self.b, 2.0, 0.5)

    x, weight0, _, a, b = layer(dtype=torch.float32)
    expected = sine_linear(x, weight0, None, a, b, 2.0, 0.5)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    sharded = Layer(weight0.clone(), a.detach().clone(), b.detach().clone())
    fully_shard(sharded, mesh=mesh)
    y = sharded(x)
    assert y.equal(expected)
    y.sum().backward()
    right = torch.autograd.grad(expected.sum(), (a, b))
    assert sharded.a.grad.full_tensor().equal(right[0])  # type: ignore[union-attr, operator]
    assert sharded.b.grad.full_tensor().equal(right[1])  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("without", [(), (1, 2)])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own, in jvp
def test_transforms_of_torch_func(dtype: torch.dtype, without: tuple[int, ...]) -> None:
    """jvp would take the registered operation for a constant, without a word; the others raise."""
    inputs = [None if index in without else each for index, each in enumerate(layer(dtype=dtype))]
    x, weight0, bias, a, b = (None if each is None else each.detach() for each in inputs)
    loose = {} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.1}
    close = partial(torch.testing.assert_close, check_dtype=False, **loose)

    def of(function: Any) -> Any:
        return lambda x, a, b: function(x, weight0, bias, a, b, 2.0, 0.5)

    tangents = tuple(torch.randn_like(each) for each in (x, a, b))
    close(*(torch.func.jvp(of(each), (x, a, b), tangents) for each in BOTH))
    close(*(torch.func.jacrev(of(each), argnums=(0, 1, 2))(x[0, :1], a, b) for each in BOTH))
    close(*(torch.func.vmap(of(each), (0, None, None))(x, a, b) for each in BOTH))


def test_second_derivatives_are_refused() -> None:
    inputs = layer()
    (da,) = torch.autograd.grad(sine_linear(*inputs, 2.0, 0.5).sum(), inputs[3], create_graph=True)
    with pytest.raises(UnsuitableModelError, match=r"no second derivatives: use .*sine_delta"):
        da.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(4, 13)}, r"a \(4, 13\), b \(9, 3\): expected x \(\.\.\., in\)"),
        ({"x": torch.zeros(2, 12)}, r"x \(2, 12\)"),
        ({"weight0": torch.zeros(13, 9)}, r"expected weight0 \(out, in\) = \(9, 13\)"),
        ({"weight0": torch.zeros(9 * 13 // 2, 1, dtype=torch.uint8)}, "uint8.*quantized weight pass None"),
        ({"bias": torch.zeros(13)}, r"expected bias \(out,\) = \(9,\)"),
        ({"x": torch.zeros(2, 13, dtype=torch.long)}, "x is torch.int64"),
        ({"weight0": torch.zeros(9, 13).bfloat16()}, "x is torch.float32 and weight0 torch.bfloat16"),
        ({"bias": torch.zeros(9).half()}, "bias torch.float16: expected one type"),
        ({"omega": 0.0}, "omega=0.0"),
        ({"omega": -1.0}, "omega=-1.0"),
        ({"omega": math.nan}, "omega=nan"),
        ({"scale": math.inf}, "scale=inf"),
    ],
)
def test_bad_input(change: dict[str, object], message: str) -> None:
    names = ("x", "weight0", "bias", "a", "b", "omega", "scale")
    arguments = dict(zip(names, (*layer(dtype=torch.float32), 1.0, 1.0), strict=True))
    with pytest.raises(InvalidArgumentError, match=message):
        sine_linear(**(arguments | change))  # type: ignore[arg-type]


def test_the_definition_can_be_differentiated_in_any_type() -> None:
    *_, a, b = layer()
    assert torch.autograd.gradgradcheck(partial(sine_delta, omega=2.0, scale=0.5), (a, b))
    assert sine_delta(a.bfloat16(), b.bfloat16(), 2.0, 0.5).dtype == torch.bfloat16
    assert sine_delta(a.bfloat16(), b.bfloat16(), 2.0, 0.5, torch.float32).dtype == torch.float32


def test_the_parts_of_a_factor_are_tf32_numbers_and_add_up() -> None:
    from wellposed.lowrank.eager import _cut

    x = torch.randn(50, 20, requires_grad=True)
    first, rest = _cut(x)
    assert (first + rest).equal(x)
    assert ((first.detach().view(torch.int32) & (2**13 - 1)) == 0).all()
    assert (rest.abs() <= 2.0**-10 * x.abs()).all()
    first.sum().backward()
    assert x.grad is not None
    assert x.grad.eq(1).all()
