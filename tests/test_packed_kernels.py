"""The kernels for packed factors against the definition: in Triton's interpreter on the CPU, and compiled on a GPU.

As in test_sine_kernels, `test_in_the_interpreter` runs this file once more in a process with the interpreter.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import wellposed as wp
from interpreter import assert_passes_in_the_interpreter, compiled, interpreted
from small_adapters import llama, logits
from small_packed import saved
from wellposed.compression import AdapterShelf, MergedShelf, PackedTensor, packed_weight, quantize, weights
from wellposed.compression.packed import packed_tensor, rows_of
from wellposed.errors import InvalidArgumentError, UnsuitableModelError

pytest.importorskip("triton", reason="Triton is not installed")

HALVES = [torch.bfloat16, torch.float16]


@compiled
def test_in_the_interpreter() -> None:
    assert_passes_in_the_interpreter(__file__)


def packed(tensor: Tensor, bits: int, *, by_column: bool, per_row: bool) -> PackedTensor:
    (found,) = quantize([rows_of(tensor, by_column, per_row)], bits)
    return packed_tensor(tensor, found, by_column)


def factors(
    rows: int, cols: int, r: int, bits: tuple[int, int], *, per_row: bool, dtype: torch.dtype = torch.float32
) -> tuple[PackedTensor, PackedTensor]:
    generator = torch.Generator().manual_seed(rows * cols + r)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((r, cols), (rows, r)))
    a, b = (0.01 * a).to(dtype), (30 * b).to(dtype)
    return (
        packed(a, bits[0], by_column=False, per_row=per_row),
        packed(b, bits[1], by_column=True, per_row=per_row),
    )


def last_bit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbours in `dtype` at each entry."""
    smallest = torch.finfo(dtype).smallest_normal
    return torch.finfo(dtype).eps * torch.exp2(x.double().abs().clamp(min=smallest).log2().floor())


def check(
    a: PackedTensor, b: PackedTensor, weight0: Tensor | None, omega: float | None, dtype: torch.dtype, device: str
) -> None:
    """The kernel against float64: within what float32 leaves unknown of the argument, and a last bit of the result."""
    from wellposed.compression import kernels

    out = torch.full((b.shape[0], a.shape[1]), torch.nan, dtype=dtype, device=device)
    base = None if weight0 is None else weight0.to(device)
    assert kernels.packed_weight(base, a.to(device), b.to(device), omega, 0.7, out) is out
    q_a, q_b = a.values().double(), b.values().double()
    z, unsure = q_b @ q_a, 8 * 2.0**-24 * (q_b.abs() @ q_a.abs())
    right = 0.7 * (z if omega is None else (omega * z).sin())
    right = right if weight0 is None else right + weight0.to(dtype).double()
    bits = 0.5 if dtype == torch.float32 else 1.0001
    allowed = 0.7 * (unsure * (omega or 1) + 3e-7) + bits * last_bit(right, dtype)
    assert ((out.cpu().double() - right).abs() <= allowed).all()


@interpreted
@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 150),
    cols=st.integers(1, 150),
    r=st.integers(1, 40),
    bits=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    per_row=st.booleans(),
    omega=st.sampled_from([None, 0.1, 7.0]),
    dtype=st.sampled_from([torch.float32, *HALVES]),
    added=st.booleans(),
)
def test_the_weight_by_the_kernel(
    rows: int, cols: int, r: int, bits: Any, per_row: bool, omega: float | None, dtype: torch.dtype, added: bool
) -> None:
    weight0 = torch.randn(rows, cols).to(dtype) if added else None
    check(*factors(rows, cols, r, bits, per_row=per_row), weight0, omega, dtype, "cpu")


@interpreted
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_number_of_bits(bits: int) -> None:
    pair = factors(40, 37, 5, (bits, 9 - bits), per_row=bits % 2 == 0)
    check(*pair, torch.randn(37, 40).T, 2.0, torch.float32, "cpu")


@interpreted
def test_values_are_rounded_as_the_adapter_was() -> None:
    _, b = factors(40, 50, 3, (8, 8), per_row=False)
    a = packed((1e-6 * torch.randn(3, 50)).half(), 2, by_column=False, per_row=False)
    check(a, b, None, 2e5, torch.float32, "cpu")
    assert not torch.equal(a.values().float(), PackedTensor(**{**vars(a), "dtype": torch.float32}).values())


@interpreted
def test_codes_by_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wellposed.compression import kernels, shelf

    for bits in (1, 3, 5, 8):
        tensors = [10.0 ** (3 * seed) * torch.randn(4, 24) for seed in range(3)]
        found = [packed(tensor, bits, by_column=False, per_row=True) for tensor in tensors]
        books = torch.cat([each.codebooks for each in found])
        exponents = torch.tensor([[each.exponent] for each in found for _ in range(4)], dtype=torch.int8)
        values = kernels.unpacked(torch.cat([each.codes for each in found]), books, exponents, bits, 24, torch.float32)
        assert torch.equal(values, torch.cat([each.values() for each in found]))
    wp.compress(saved(tmp_path / "plain", "dora"), bits=3, out=tmp_path / "packed", per="row", device="cpu")
    model = wp.load_adapter(llama(), tmp_path / "packed")
    expected = logits(model)
    monkeypatch.setattr(shelf, "working_kernels", lambda _: kernels)
    own = AdapterShelf(model)
    own.add("one", tmp_path / "packed")
    for place in own.places.values():
        place.detach().zero_()
    own.use("one")
    assert torch.equal(logits(model), expected)


@interpreted
def test_kernels_can_be_tried_and_may_have_nothing_to_do() -> None:
    from wellposed.compression import kernels

    kernels.try_on(torch.device("cpu"))
    a, b = factors(8, 8, 2, (3, 3), per_row=False)
    assert kernels.packed_weight(None, a, b, 1.0, 1.0, torch.empty(0, 8)).shape == (0, 8)


@compiled
@pytest.mark.parametrize("kind", ["lora", "rslora", "sine"])
def test_a_shelf_of_merged_adapters(kind: str, tmp_path: Path) -> None:
    for seed in range(2):
        wp.compress(saved(tmp_path / f"plain-{seed}", kind, seed), bits=4, out=tmp_path / f"{seed}", device="cpu")
    model = wp.load_adapter(llama(), tmp_path / "0")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    expected = [logits(wp.load_adapter(llama(), tmp_path / f"{seed}").merge_and_unload()) for seed in range(2)]
    shelf = MergedShelf(model)
    for seed in range(2):
        shelf.add(f"{seed}", tmp_path / f"{seed}")
    for seed in (1, 0, 1):
        shelf.use(f"{seed}")
        torch.testing.assert_close(logits(model), expected[seed], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected[0], expected[1], rtol=1e-3, atol=1e-3)
    with pytest.raises(UnsuitableModelError, match="has default merged"):
        MergedShelf(model)
    with pytest.raises(InvalidArgumentError, match="expected one of 0, 1"):
        shelf.use("2")
    shelf.leave()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    torch.testing.assert_close(logits(model), expected[0], rtol=1e-4, atol=1e-4)


@compiled
def test_what_cannot_be_merged_in_one_pass(tmp_path: Path) -> None:
    wp.compress(saved(tmp_path / "plain", "dora"), bits=4, out=tmp_path / "dora", device="cpu")
    with pytest.raises(UnsuitableModelError, match=r"has a DoRA adapter.*Use .*\.AdapterShelf"):
        MergedShelf(wp.load_adapter(llama(), tmp_path / "dora"))


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("omega", [None, 5.0])
def test_the_definition(dtype: torch.dtype, omega: float | None) -> None:
    a, b = factors(24, 40, 4, (3, 5), per_row=True)
    weight0 = torch.randn(24, 40).to(dtype)
    z = b.values().double() @ a.values().double()
    right = weight0.double() + 0.5 * (z if omega is None else (omega * z).sin())
    weight = packed_weight(weight0, a, b, omega, 0.5)
    assert weight.dtype == dtype
    assert ((weight.double() - right).abs() <= last_bit(right, dtype) / 2 + 2e-5).all()
    out = torch.empty_like(weight)
    assert packed_weight(weight0, a, b, omega, 0.5, out=out) is out
    assert torch.equal(out, weight)
    alone = packed_weight(None, a, b, omega, 0.5, torch.float64)
    torch.testing.assert_close(alone, right - weight0.double(), rtol=1e-5, atol=2e-5)


@compiled
def test_what_does_not_fit_is_refused() -> None:
    a, b = factors(24, 40, 4, (3, 3), per_row=False)
    for change, message in (
        ({"weight0": torch.zeros(40, 24)}, r"weight0 \(40, 24\): expected \(out, in\) = \(24, 40\)"),
        ({"out": torch.zeros(24, 41)}, r"out \(24, 41\)"),
        ({"out": torch.zeros(40, 24).T}, "not contiguous"),
        ({"b": factors(24, 40, 5, (3, 3), per_row=False)[1]}, r"expected \(r, in\) and \(out, r\)"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            packed_weight(**({"weight0": None, "a": a, "b": b, "omega": 1.0, "scale": 1.0} | change))  # type: ignore[arg-type]


@compiled
def test_nobody_pays_for_triton_unasked() -> None:
    assert weights.working_kernels(torch.device("cpu")) is None
    code = "import wellposed.compression, sys; print('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("rows", "cols", "r"), [(4096, 4096, 32), (1024, 4096, 16), (14336, 4096, 8), (999, 1001, 70)])
def test_on_a_gpu(rows: int, cols: int, r: int, bits: int) -> None:
    for dtype, omega, per_row in (
        (torch.bfloat16, 3.0, False),
        (torch.float16, None, True),
        (torch.float32, 3.0, True),
    ):
        a, b = factors(rows, cols, r, (bits, bits), per_row=per_row)
        check(a, b, torch.randn(rows, cols).to(dtype), omega, dtype, "cuda")


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("dtype", HALVES)
def test_factors_of_16_bits_on_a_gpu(dtype: torch.dtype) -> None:
    a, b = factors(1024, 2048, 8, (4, 4), per_row=False, dtype=dtype)
    check(a, b, torch.randn(1024, 2048, dtype=dtype), 2.0, dtype, "cuda")


@pytest.mark.gpu
@compiled
def test_the_kernel_is_what_a_gpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from wellposed.compression import kernels

    a, b = (each.to("cuda") for each in factors(1024, 1024, 8, (3, 3), per_row=False))
    weight0, calls = torch.randn(1024, 1024, dtype=torch.bfloat16, device="cuda"), []
    run = kernels.packed_weight
    packed_weight(weight0, a, b, 3.0, 0.5)  # the first on a device tries the kernel on a little of its own before
    monkeypatch.setattr(kernels, "packed_weight", lambda *given: calls.append(1) or run(*given))
    weight = packed_weight(weight0, a, b, 3.0, 0.5)
    assert calls == [1]
    right = weight0.double() + 0.5 * (3.0 * (b.values().double() @ a.values().double())).sin()
    assert ((weight.double() - right).abs() <= 1.0001 * last_bit(right, torch.bfloat16) + 1e-5).all()
