"""Codebooks against scikit-learn, scipy and every way to cut a few numbers."""

from itertools import combinations_with_replacement
from typing import get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.cluster import KMeans
from torch import Tensor

from wellposed.cli.compress import CompressArgs
from wellposed.compression import kmeans as kmeans_module
from wellposed.compression.bits import pack, packed_length, unpack
from wellposed.compression.kmeans import kmeans_codebooks
from wellposed.compression.quantizers import Scheme, normal_levels, quantize
from wellposed.errors import InvalidArgumentError
from wellposed.studies.compression_config import CompressionStudy

QLORA_NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


MAX_1960 = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}
"""Mean squared error of the best quantizers of a standard normal variable, as J. Max found it (1960)."""


def numbers(kind: str, n: int) -> Tensor:
    torch.manual_seed(1)
    return {
        "normal": lambda: 0.01 * torch.randn(n),
        "uniform": lambda: torch.rand(n) - 0.5,
        "laplace": lambda: torch.distributions.Laplace(0.0, 1e-3).sample((n,)),
        "heavy tails": lambda: torch.distributions.StudentT(2.0).sample((n,)),
        "an outlier": lambda: torch.cat([torch.randn(n - 1), torch.tensor([1e3])]),
        "clumps": lambda: torch.randn(n) * 0.01 + torch.arange(n) % 5,
        "few": lambda: torch.randint(-20, 20, (n,)).float(),
    }[kind]()


def cost(x: Tensor, codebook: Tensor) -> float:
    return float((x.double()[:, None] - codebook.double()).abs().amin(1).square().sum())


@pytest.mark.parametrize("kind", ["normal", "uniform", "laplace", "heavy tails", "an outlier", "clumps", "few"])
def test_kmeans_is_no_worse_than_scikit_learn(kind: str) -> None:
    x = numbers(kind, 6000)
    for bits in (1, 2, 3, 4, 5, 6, 8):
        k = min(2**bits, len(x.unique()))
        theirs = KMeans(k, n_init=2, random_state=0).fit(x[:, None].double().numpy()).inertia_
        ours = cost(x, kmeans_codebooks(x[None], 2**bits)[0])
        assert ours <= theirs * (1 + 1e-4) + 1e-12, (bits, ours, theirs)
        if kind in {"normal", "laplace", "uniform"}:  # as factors are; also once float16 has rounded the codebook
            (found,) = quantize([x[None]], bits)
            assert float((found.values()[0].double() - x.double()).square().sum()) <= theirs * (1 + 1e-4)


@pytest.mark.parametrize("bits", MAX_1960)
def test_kmeans_of_normal_numbers_has_the_published_error(bits: int) -> None:
    x = norm.ppf((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000)
    assert cost(torch.from_numpy(x), kmeans_codebooks(torch.from_numpy(x)[None], 2**bits)[0]) / len(x) == pytest.approx(
        MAX_1960[bits], rel=2e-3
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-100, 100, width=32) | st.integers(-3, 3).map(float), min_size=1, max_size=9),
    st.sampled_from([2, 4]),
)
def test_kmeans_of_few_numbers_is_the_best_there_is(values: list[float], k: int) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    ordered = x.sort().values
    best = min(
        sum(float(part.var() * len(part)) for part in np.split(ordered.numpy(), cuts) if len(part))
        for cuts in combinations_with_replacement(range(len(ordered) + 1), k - 1)
    )
    codebook = kmeans_codebooks(x[None], k)[0]
    assert (codebook.diff() >= 0).all()
    assert cost(x, codebook) <= best + 1e-9 * float(x.square().sum())


def test_rows_are_independent_and_nothing_is_random() -> None:
    rows = torch.stack([numbers(kind, 3000) for kind in ("normal", "few", "heavy tails", "clumps")])
    for k in (4, 32, 128):
        together = kmeans_codebooks(rows, k)
        for row, codebook in zip(rows, together, strict=True):
            torch.testing.assert_close(kmeans_codebooks(row[None], k)[0], codebook, rtol=1e-12, atol=1e-12)
        assert torch.equal(kmeans_codebooks(rows, k), together)
        assert torch.equal(kmeans_codebooks(rows[:, torch.randperm(3000)], k), together)


def test_lloyd_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers("normal", 50_000)[None]
    found = kmeans_codebooks(x, 256)
    monkeypatch.setattr(kmeans_module, "_ROUNDS", 10**6)
    assert torch.equal(kmeans_codebooks(x, 256), found)


@pytest.mark.parametrize("scheme", ["kmeans", "uniform", "normal", "stretched"])
def test_as_many_values_as_numbers_are_exact(scheme: str) -> None:
    x = torch.tensor([[0.25, -1.5, 3.0, 0.25]])
    (found,) = quantize([x], 3, scheme)  # type: ignore[arg-type]
    if scheme in {"kmeans", "stretched"}:
        assert torch.equal(found.values(), x)
    assert found.codes.max() < 8
    assert found.codebooks.shape == (1, 8)
    assert found.codebooks.dtype == torch.float16
    (zeros,) = quantize([torch.zeros(2, 5)], 2, scheme)  # type: ignore[arg-type]
    assert torch.equal(zeros.values(), torch.zeros(2, 5))


def test_codes_name_the_nearest_value() -> None:
    for scheme in ("kmeans", "uniform", "normal"):
        x = numbers("heavy tails", 2000).view(4, 500)
        (found,) = quantize([x], 3, scheme)  # type: ignore[arg-type]
        values = found.codebooks.float() * 2.0**found.exponent
        distances = (x[..., None] - values[:, None]).abs()
        torch.testing.assert_close((x - found.values()).abs(), distances.amin(2))


@pytest.mark.parametrize("kind", ["normal", "uniform", "heavy tails", "an outlier", "clumps"])
def test_stretched_is_kmeans_at_the_length_of_what_it_reads(kind: str) -> None:
    x = numbers(kind, 3000)[None].double()
    for bits in (1, 2, 4):
        (short,), (kept,) = quantize([x], bits, "kmeans"), quantize([x], bits, "stretched")
        assert torch.equal(kept.codes, short.codes)
        along = [((x * found.values()).sum(1) / x.square().sum(1)) for found in (short, kept)]
        torch.testing.assert_close(along[1], torch.ones_like(along[1]), rtol=0, atol=1e-3)
        assert (along[0] < 1 + 1e-3).all()


@pytest.mark.parametrize("bits", [1, 2])
def test_what_stretching_does_to_the_product_of_normal_factors(bits: int) -> None:
    share, random = 1 - MAX_1960[bits], torch.Generator().manual_seed(0)  # of its square that a normal row keeps
    b, a = torch.randn(600, 64, generator=random), torch.randn(64, 600, generator=random)
    for scheme, along, error in (
        ("kmeans", share**2, (1 - share**2) ** 0.5),
        ("stretched", 1.0, (share**-2 - 1) ** 0.5),
    ):
        q_b, q_a = (found.values() for found in quantize([b.view(1, -1), a.view(1, -1)], bits, scheme))  # type: ignore[arg-type]
        exact, made = b @ a, q_b.view_as(b) @ q_a.view_as(a)
        assert float((exact * made).sum() / exact.square().sum()) == pytest.approx(along, rel=0.02)
        assert float((made - exact).norm() / exact.norm()) == pytest.approx(error, rel=0.02)


def test_schemes_are_the_same_everywhere() -> None:
    """Flags are written out, so that help needs no torch."""
    assert get_type_hints(CompressArgs)["scheme"] == Scheme
    assert get_type_hints(CompressionStudy)["schemes"] == tuple[Scheme, ...]


def test_uniform_and_normal_have_their_levels() -> None:
    x = torch.cat([numbers("normal", 4000), torch.tensor([-0.5, 1.0])])[None]
    (uniform,) = quantize([x], 2, "uniform")
    torch.testing.assert_close(
        uniform.codebooks.float() * 2.0**uniform.exponent, torch.tensor([[-0.5, 0.0, 0.5, 1.0]]), rtol=0, atol=1e-3
    )
    levels = normal_levels(4)
    np.testing.assert_allclose((levels / levels.max()).numpy(), QLORA_NF4, atol=1e-6)
    for bits in range(2, 9):
        levels = normal_levels(bits)
        assert len(levels) == 2**bits
        assert (levels.diff() > 0).all()
        assert (levels == 0).sum() == 1
        assert float(levels[-1]) == pytest.approx(norm.ppf(1 - (1 / (2**bits - 1) + 1 / 2**bits) / 4))
    (found,) = quantize([x], 3, "normal")
    rms = float(x.square().mean().sqrt())
    torch.testing.assert_close(
        found.codebooks[0].double() * 2.0**found.exponent / rms, normal_levels(3), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1.0, 1e20, 3e38])
def test_no_scale_is_lost_in_float16(scale: float) -> None:
    x = torch.linspace(-1, 1, 1000)[None] * scale
    (found,) = quantize([x], 8)
    assert float((found.values().double() - x.double()).norm() / x.double().norm()) < 0.01


def test_halves_and_doubles() -> None:
    x = numbers("normal", 3000)[None]
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        (found,), (single,) = quantize([x.to(dtype)], 4), quantize([x.to(dtype).float()], 4)
        torch.testing.assert_close(found.codebooks, single.codebooks)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 8), st.integers(0, 70), st.integers(0, 2**32 - 1))
def test_packing(bits: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, count, dtype=np.uint8)
    packed = pack(torch.from_numpy(codes), bits)
    stream = np.unpackbits(codes[:, None], axis=1, bitorder="little")[:, :bits].flatten()
    np.testing.assert_array_equal(packed.numpy(), np.packbits(stream, bitorder="little"))
    assert len(packed) == packed_length(count, bits) == -(-count * bits // 8)
    np.testing.assert_array_equal(unpack(packed, count, bits).numpy(), codes)


@pytest.mark.parametrize("bits", [0, 9, -1, 2.0, True, "3", None])
def test_bits_out_of_range(bits: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"bits=.*expected a whole number from 1 to 8"):
        quantize([torch.zeros(1, 4)], bits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "matrix",
    [
        torch.tensor([[1.0, torch.nan]]),
        torch.tensor([[torch.inf]]),
        torch.zeros(1, 0),
        torch.zeros(3),
        torch.ones(1, 2).long(),
    ],
)
def test_what_has_no_codebook(matrix: Tensor) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be quantized"):
        quantize([matrix], 3)
    with pytest.raises(InvalidArgumentError, match="expected one of kmeans, uniform, normal, stretched"):
        quantize([torch.ones(1, 2)], 3, "nothing")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["kmeans", "uniform", "normal", "stretched"])
def test_a_gpu_finds_the_same(scheme: Scheme) -> None:
    matrices = [numbers(kind, 20_000)[None] for kind in ("normal", "laplace", "heavy tails")]
    for bits in (1, 3, 5, 8):
        found = [quantize([x.to(device) for x in matrices], bits, scheme) for device in ("cpu", "cuda")]
        for x, cpu, gpu in zip(matrices, *found, strict=True):
            values = gpu.values().cpu()
            if scheme == "stretched":  # its error is not the least
                assert float((values * x).sum() / x.square().sum()) == pytest.approx(1, abs=1e-3)
            else:
                errors = [float((each.double() - x.double()).norm()) for each in (cpu.values(), values)]
                assert errors[1] <= errors[0] * (1 + 1e-6)
            assert torch.equal(unpack(pack(gpu.codes, bits), x.numel(), bits).view_as(gpu.codes), gpu.codes)


@pytest.mark.gpu
def test_an_adapter_of_llama_size_takes_ten_seconds_on_a_gpu() -> None:
    import time

    sizes = [
        (32, 4096),
        (4096, 32),
        (32, 4096),
        (1024, 32),
        (32, 4096),
        (1024, 32),
        (32, 4096),
        (14336, 32),
        (32, 14336),
    ]
    factors = [torch.randn(1, a * b, device="cuda") for a, b in (*sizes, (4096, 32)) for _ in range(32)]
    quantize(factors[:2], 3)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for found in quantize(factors, 3):
        pack(found.codes, 3)
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 10
