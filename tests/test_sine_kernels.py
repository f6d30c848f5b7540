"""The Triton kernels against the definition in float64: in Triton's interpreter on the CPU, and compiled on a GPU.

The interpreter has to be chosen before triton is imported, so `test_in_the_interpreter` runs this file once more in a
process of its own, where the tests marked `interpreted` are not skipped.
"""

import logging
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from interpreter import assert_passes_in_the_interpreter, compiled, interpreted
from wellposed.lowrank import passes
from wellposed.lowrank.functional import sine_linear

pytest.importorskip("triton", reason="Triton is not installed")

HALVES = [torch.bfloat16, torch.float16]


@compiled
def test_in_the_interpreter() -> None:
    assert_passes_in_the_interpreter(__file__)


def factors(rows: int, cols: int, r: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(r, cols).to(dtype), torch.randn(rows, r).to(dtype)


def argument(a: Tensor, b: Tensor, omega: float) -> tuple[Tensor, Tensor]:
    """omega B A in float64, and what float32 may be off by in it: a few units of the last place of its terms."""
    a, b = a.double(), b.double()
    return omega * (b @ a), 8 * 2.0**-24 * omega * (b.abs() @ a.abs())


def last_bit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbours in `dtype` at each entry."""
    smallest = torch.finfo(dtype).smallest_normal
    return torch.finfo(dtype).eps * torch.exp2(x.double().abs().clamp(min=smallest).log2().floor())


@interpreted
@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 150),
    cols=st.integers(1, 150),
    r=st.integers(1, 40),
    omega=st.floats(0.01, 30),
    dtype=st.sampled_from([torch.float32, *HALVES]),
    of_factors=st.sampled_from([torch.float32, *HALVES]),
)
def test_the_update_alone(
    rows: int, cols: int, r: int, omega: float, dtype: torch.dtype, of_factors: torch.dtype
) -> None:
    from wellposed.lowrank.kernels import sine_weight

    a, b = factors(rows, cols, r, of_factors)
    z, unsure = argument(a, b, omega)
    error = (sine_weight(None, a, b, omega, 0.7, dtype).double() - 0.7 * z.sin()).abs()
    # The interpreter cuts off what bfloat16 does not hold where a GPU rounds.
    bits = {torch.float32: 0, torch.float16: 0.5, torch.bfloat16: 1}[dtype]
    assert (error <= 0.7 * unsure + 3e-7 + bits * last_bit(0.7 * z.sin(), dtype)).all()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_with_a_base(dtype: torch.dtype) -> None:
    from wellposed.lowrank.kernels import sine_weight

    a, b = factors(70, 90, 5)
    z, unsure = argument(a, b, 3.0)
    for base in (torch.randn(70, 90), torch.randn(90, 70).T, torch.randn(70, 180)[:, ::2]):
        weight0 = base.to(dtype)
        right = weight0.double() + 0.01 * z.sin()
        error = (sine_weight(weight0, a, b, 3.0, 0.01, dtype).double() - right).abs()
        assert (error <= last_bit(right, dtype) * 1.0001 + 0.01 * unsure).all()
    assert sine_weight(weight0, a, torch.zeros_like(b), 3.0, 0.01, dtype).equal(weight0)
    if dtype == torch.float16:  # to bfloat16 the interpreter does not round
        assert sine_weight(base, a, torch.zeros_like(b), 3.0, 0.01, dtype).equal(weight0)


@interpreted
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("part", [0.02, 0.7])
def test_that_part_of_the_entries_is_rounded_up_which_is_right(dtype: torch.dtype, part: float) -> None:
    from wellposed.lowrank.kernels import sine_weight

    rows, cols, step = 300, 400, torch.finfo(dtype).eps
    a, b = torch.full((1, cols), torch.pi / 2), torch.ones(rows, 1)
    for base, up in ((1.0, 1.0 + step), (-1.0, -1.0 + step / 2)):
        bit = abs(up - base)
        weight0 = torch.full((rows, cols), base, dtype=dtype)
        weight = sine_weight(weight0, a, b, 1.0, part * bit, dtype).float()
        assert ((weight == base) | (weight == up)).all()
        moved = (weight == up).double()
        sigma = (part * (1 - part)) ** 0.5
        assert moved.mean() == pytest.approx(part, abs=4 * sigma / (rows * cols) ** 0.5)
        # Rows, columns and diagonal steps know nothing of one another.
        assert moved.mean(0).std() == pytest.approx(sigma / rows**0.5, rel=0.2)
        assert moved.mean(1).std() == pytest.approx(sigma / cols**0.5, rel=0.2)
        centred = (moved - part) / sigma
        for shift in ((0, 1), (1, 0), (1, 1), (7, 64)):
            assert abs(float((centred * centred.roll(shift, (0, 1))).mean())) < 5 / (rows * cols) ** 0.5
        second = centred - centred.roll(1, 0) - centred.roll(1, 1) + centred.roll((1, 1), (0, 1))
        assert second.square().mean() == pytest.approx(4, rel=0.05)


@interpreted
@pytest.mark.parametrize("dtype", HALVES)
def test_large_updates_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    from wellposed.lowrank.kernels import sine_weight

    a, b = torch.rand(1, 90) + 0.5, torch.ones(70, 1)
    weight0 = torch.rand(70, 90).to(dtype)
    right = weight0.double() + a.double().sin()
    error = (sine_weight(weight0, a, b, 1.0, 1.0, dtype).double() - right).abs()
    assert (error <= last_bit(right, dtype) / 2 + 1e-6).all()


@interpreted
@pytest.mark.parametrize("dtype", HALVES)
def test_an_update_below_the_last_bit_survives(dtype: torch.dtype) -> None:
    from wellposed.lowrank.kernels import sine_weight

    a, b = factors(128, 256, 4)
    x, weight0 = torch.randn(512, 256).to(dtype), torch.randn(128, 256).to(dtype)
    scale = 0.2 * torch.finfo(dtype).eps
    delta = scale * argument(a, b, 1.0)[0].sin()
    true = x.double() @ delta.T
    two_products = (x.double() @ delta.to(dtype).double().T).to(dtype).double()

    def share(weight: Tensor) -> float:
        change = x.double() @ (weight.double() - weight0.double()).T
        return float((change * two_products).sum() / true.square().sum())

    assert share((weight0.double() + delta).to(dtype)) < 0.6
    assert share(sine_weight(weight0, a, b, 1.0, scale, dtype)) == pytest.approx(1, abs=0.1)


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, within the interpreter
def test_large_arguments_and_what_is_no_number() -> None:
    from wellposed.lowrank.kernels import sine_weight

    z = torch.cat([torch.linspace(-700, 700, 999), torch.tensor([0.0, 1e-6, 3e5, 1e6])])
    weight = sine_weight(None, z[None], torch.ones(1, 1), 1.0, 1.0, torch.float32)[0]
    assert ((weight.double() - z.double().sin()).abs() <= 3e-7 + 3e-7 * z.abs()).all()
    beyond = sine_weight(None, torch.tensor([[1e9, -1e30]]), torch.ones(1, 1), 1.0, 1.0, torch.float32)
    assert (beyond.abs() <= 1).all()
    for dtype in (torch.float32, *HALVES):
        nowhere = torch.tensor([[torch.inf, torch.nan, 0.0]])
        base = torch.zeros(1, 3, dtype=dtype)
        assert sine_weight(base, nowhere, torch.ones(1, 1), 1.0, 1.0, dtype).isnan().tolist() == [[True, True, False]]
        base = torch.tensor([[torch.inf, -torch.inf, torch.nan]], dtype=dtype)
        kept = sine_weight(base, torch.ones(1, 3), torch.ones(1, 1), 1.0, 1.0, dtype)
        torch.testing.assert_close(kept, base, equal_nan=True)


@interpreted
@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(1, 150),
    cols=st.integers(1, 150),
    r=st.integers(1, 40),
    omega=st.floats(0.01, 30),
    of_p=st.sampled_from([torch.float32, torch.bfloat16]),
    of_factors=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_gradients_of_the_factors(
    rows: int, cols: int, r: int, omega: float, of_p: torch.dtype, of_factors: torch.dtype
) -> None:
    check_gradients(rows, cols, r, omega, of_p, of_factors)


@interpreted
@pytest.mark.parametrize(("rows", "cols", "r"), [(300, 70, 33), (40, 300, 130), (33, 35, 256)])
def test_gradients_of_large_factors(rows: int, cols: int, r: int) -> None:
    check_gradients(rows, cols, r, 2.0, torch.bfloat16, torch.float32)


def check_gradients(
    rows: int, cols: int, r: int, omega: float, of_p: torch.dtype, of_factors: torch.dtype, device: str = "cpu"
) -> None:
    from wellposed.lowrank.kernels import factor_gradients

    a, b = factors(rows, cols, r, of_factors)
    p = torch.randn(rows, cols).to(of_p)
    z, unsure = argument(a, b, omega)
    g, off = p.double() * z.cos() * omega * 0.7, p.double().abs() * omega * 0.7 * (unsure + 3e-7)
    da, db = (each.cpu() for each in factor_gradients(p.to(device), a.to(device), b.to(device), omega, 0.7))
    step = torch.finfo(of_factors).eps + (1e-6 if device == "cpu" or of_p == torch.float32 else 2e-3)
    for given_, right, terms, allowed in (
        (da, b.double().T @ g, b.double().abs().T @ g.abs(), b.double().abs().T @ off),
        (db, g @ a.double().T, g.abs() @ a.double().abs().T, off @ a.double().abs().T),
    ):
        assert given_.dtype == of_factors
        assert given_.is_contiguous()
        assert ((given_.double() - right).abs() <= allowed + step * terms).all()


@interpreted
def test_sums_are_in_float32_whatever_torch_makes_by_default() -> None:
    from wellposed.lowrank.kernels import factor_gradients

    a, b = factors(140, 70, 3)
    p, before = torch.randn(140, 70), torch.get_default_dtype()
    expected = factor_gradients(p, a, b, 2.0, 0.5)
    try:
        torch.set_default_dtype(torch.bfloat16)
        again = factor_gradients(p, a, b, 2.0, 0.5)
    finally:
        torch.set_default_dtype(before)
    assert all(map(torch.equal, again, expected))


SIZES = [(4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (77, 99), (9, 10**6)]


@compiled
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_programs_end_together(rows: int, cols: int) -> None:
    from wellposed.lowrank import kernels

    blocks, tiles = -(-rows // kernels._HIGH), -(-cols // kernels._NARROW)
    each = kernels._tiles_each(blocks, tiles)
    rounds = -(-blocks * -(-tiles // each) // kernels._AT_A_TIME)
    assert 1 <= each <= tiles
    assert rounds * each <= max(1.25 * blocks * tiles / kernels._AT_A_TIME, 1)


@interpreted
def test_nothing_to_do() -> None:
    from wellposed.lowrank.kernels import factor_gradients, sine_weight

    a, b = factors(0, 5, 3)
    assert sine_weight(None, a, b, 1.0, 1.0, torch.float32).shape == (0, 5)
    da, db = factor_gradients(torch.zeros(0, 5), a, b, 1.0, 1.0)
    assert da.equal(torch.zeros(3, 5))
    assert db.shape == (0, 3)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_layer_by_kernels_is_the_layer(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from wellposed.lowrank import kernels

    def inputs() -> list[Tensor]:
        torch.manual_seed(0)
        x, weight0, bias = torch.randn(2, 40, 60).to(dtype), torch.randn(50, 60).to(dtype), torch.randn(50).to(dtype)
        a, b = factors(50, 60, 4)
        return [x.requires_grad_(), weight0, bias.requires_grad_(), a.requires_grad_(), b.requires_grad_()]

    def outcome() -> list[Tensor]:
        given_ = inputs()
        y = sine_linear(*given_, 2.0, 0.5)
        return [y, *torch.autograd.grad(y, [given_[0], *given_[2:]], torch.ones_like(y))]

    expected = outcome()
    monkeypatch.setattr(passes, "kernels_for", lambda *_: kernels)
    for by_kernels, right in zip(outcome(), expected, strict=True):
        assert by_kernels.dtype == right.dtype
        error = (by_kernels.detach().double() - right.detach().double()).norm() / right.detach().double().norm()
        assert error < (1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)


@compiled
def test_kernels_are_left_alone_where_they_cannot_win(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        """As much of a tensor on a GPU as is asked about."""

        def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
            self.shape, self.dtype, self.device = shape, dtype, torch.device("cuda")

        def __len__(self) -> int:
            return self.shape[0]

    kernels = object()
    monkeypatch.setattr(passes, "_working_kernels", lambda _: kernels)

    def chosen(a: object, b: object, dtype: torch.dtype = torch.bfloat16) -> bool:
        return passes.kernels_for(a, b, dtype) is kernels  # type: ignore[arg-type, comparison-overlap]

    a, b = Elsewhere(8, 1024), Elsewhere(1024, 8)
    assert chosen(a, b)
    assert not chosen(a, b, torch.float64)
    assert not chosen(Elsewhere(8, 64), Elsewhere(64, 8))
    assert not chosen(Elsewhere(300, 1024), Elsewhere(1024, 300))
    assert not chosen(*factors(1024, 1024, 8))
    with passes.kernels_allowed(False):
        assert not chosen(a, b)
    assert chosen(a, b)


@compiled
def test_kernels_that_do_not_work_here_cost_one_line(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("they do work here")
    passes._working_kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert passes._working_kernels(torch.device("cpu")) is None
    passes._working_kernels.cache_clear()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "sine layers on cpu go without their Triton kernels"
    ]


@compiled
def test_nobody_pays_for_triton_unasked() -> None:
    code = "import wellposed.lowrank, sys; print('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@compiled
@pytest.mark.parametrize(("r", "forward", "backward"), [(4, 4, 10), (40, 4, 14)])
def test_a_layer_asks_torch_for_little(r: int, forward: int, backward: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches and operations: on a GPU asking for them may be what takes the time."""
    from wellposed.lowrank import kernels
    from wellposed.spectrum import launch

    asked: list[str] = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            asked.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(passes, "kernels_for", lambda *_: kernels)
    monkeypatch.setattr(launch.Launch, "__call__", lambda *_: asked.append("launch"))
    x, weight0 = torch.randn(6, 60, requires_grad=True), torch.randn(50, 60)
    a, b = (each.requires_grad_() for each in factors(50, 60, r))
    dy = torch.ones(6, 50)
    with Listen():
        y = sine_linear(x, weight0, None, a, b, 2.0, 0.5)
        ahead = len(asked)
        dx, da, db = torch.autograd.grad(y, (x, a, b), dy)
    assert (dx.shape, da.shape, db.shape) == (x.shape, a.shape, b.shape)
    assert asked[:ahead].count("launch") == 1
    assert asked[ahead:].count("launch") == (2 if r <= 32 else 3)
    assert ahead <= forward
    assert len(asked) - ahead <= backward
    assert not {"clone", "copy_", "_to_copy"} & set(asked)


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize(("rows", "cols", "r"), [(4096, 1024, 8), (1000, 4099, 32), (777, 1025, 3), (1024, 1024, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_on_a_gpu(rows: int, cols: int, r: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 500, cols, device="cuda").to(dtype).requires_grad_()
    weight0 = (torch.randn(rows, cols, device="cuda") / cols**0.5).to(dtype)
    a, b = (each.cuda().requires_grad_() for each in factors(rows, cols, r))
    dy = torch.randn(2, 500, rows, device="cuda").to(dtype)
    omega, scale = 3 / r**0.5, cols**-0.5

    def outcome() -> list[Tensor]:
        y = sine_linear(x, weight0, None, a, b, omega, scale)
        return [y, *torch.autograd.grad(y, [x, a, b], dy)]

    assert passes.kernels_for(a, b, dtype) is not None
    by_kernels, again = outcome(), outcome()
    assert all(map(torch.equal, by_kernels, again))
    weight = (weight0.double() + scale * (omega * (b.double() @ a.double())).sin()).detach()
    g = (dy.flatten(0, 1).double().T @ x.detach().flatten(0, 1).double()) * (omega * (b.double() @ a.double())).cos()
    g = (g * omega * scale).detach()
    right = [x.double() @ weight.T, dy.double() @ weight, b.double().T @ g, g @ a.double().T]
    for each, expected in zip(by_kernels, right, strict=True):
        error = (each.double() - expected).norm() / expected.norm()
        assert error < (1e-3 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("r", [8, 40, 256])
@pytest.mark.parametrize("of_p", [torch.float32, torch.bfloat16])
def test_gradients_on_a_gpu(r: int, of_p: torch.dtype) -> None:
    check_gradients(700, 900, r, 2.0, of_p, torch.float32, device="cuda")


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("r", [8, 40])
def test_wherever_tensors_start_on_a_gpu(r: int) -> None:
    """Triton compiles for tensors that start at multiples of 16 bytes, and others may not get that kernel."""
    from wellposed.lowrank.kernels import factor_gradients, sine_weight

    def elsewhere(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    a, b = (each.cuda() for each in factors(700, 900, r))
    weight0 = torch.randn(700, 900, device="cuda").bfloat16()
    right = [sine_weight(weight0, a, b, 2.0, 0.5, torch.bfloat16), *factor_gradients(weight0, a, b, 2.0, 0.5)]
    for place in (elsewhere, torch.clone, elsewhere, torch.clone):
        placed = [place(each) for each in (weight0, a, b)]
        assert placed[0].data_ptr() % 16 == (0 if place is torch.clone else 2)
        again = [sine_weight(*placed, 2.0, 0.5, torch.bfloat16), *factor_gradients(*placed, 2.0, 0.5)]
        for given_, expected in zip(again, right, strict=True):
            assert (given_.double() - expected.double()).norm() < 1e-3 * expected.double().norm()


@pytest.mark.gpu
@compiled
def test_a_gpu_keeps_no_matrix_and_needs_room_for_one() -> None:
    cols, rows, mib = 4096, 4096, 2**20
    x = torch.randn(1024, cols, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight0 = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    a, b = (each.cuda().requires_grad_() for each in factors(rows, cols, 8))
    for turn in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = sine_linear(x, weight0, None, a, b, 1.0, 1.0)
        kept = torch.cuda.memory_allocated() - before
        y.backward(torch.ones_like(y))
        peak = torch.cuda.max_memory_allocated() - before
        x.grad = a.grad = b.grad = None
        if turn:  # the first one also allocates cuBLAS's workspace
            assert kept <= 8 * mib + mib  # y
            assert peak <= 32 * mib + 3 * 8 * mib + 12 * mib  # a weight; y, dy and dx; partial sums
        del y


@pytest.mark.gpu
@compiled
def test_merged_and_not_on_a_gpu() -> None:
    cols, rows = 1024, 2048
    x = torch.randn(64, cols, device="cuda", dtype=torch.bfloat16)
    weight0 = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    a, b = (each.cuda() for each in factors(rows, cols, 8))
    delta = 0.1 * (b.double() @ a.double()).sin()
    merged = F.linear(x.double(), weight0.double() + delta)
    y = sine_linear(x, weight0, None, a, b, 1.0, 0.1)
    assert (y.double() - merged).norm() / merged.norm() < torch.finfo(torch.bfloat16).eps
    with torch.autocast("cuda", torch.bfloat16):
        start = sine_linear(x.float(), weight0.float() * 1.0001, None, a, torch.zeros_like(b), 1.0, 0.1)
        assert start.equal(F.linear(x.float(), weight0.float() * 1.0001))
