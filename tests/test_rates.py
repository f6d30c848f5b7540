"""BD-rate against closed forms, scipy's PCHIP and published examples; bounds of a stable rank under quantization."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.interpolate import PchipInterpolator

import wellposed as wp
from wellposed.compression import dominated, quantize, stable_rank_bounds
from wellposed.errors import InvalidArgumentError
from wellposed.spectrum import stable_rank

CURVE = [(27.1, 76.4), (9.1, 75.8), (5.6, 74.9), (3.8, 73.7), (2.1, 65.0)]
"""MB and accuracy, such as an adapter has at several numbers of bits."""


@pytest.mark.parametrize("factor", [0.25, 0.584, 1.0, 1.5, 10.0])
def test_a_curve_at_another_rate_has_that_rate(factor: float) -> None:
    scaled = [(factor * rate, quality) for rate, quality in CURVE]
    assert wp.bd_rate(scaled, CURVE) == pytest.approx(factor - 1, abs=1e-12)
    assert wp.bd_rate(list(reversed(scaled)), CURVE) == pytest.approx(factor - 1, abs=1e-12), "in any order"
    units = [(rate * 1e6, quality / 100) for rate, quality in CURVE]
    assert wp.bd_rate([(factor * rate, quality) for rate, quality in units], units) == pytest.approx(
        factor - 1, abs=1e-9
    )


def test_straight_lines_have_a_closed_form() -> None:
    """Log rates a q + b and a q + c over [2, 5]: the mean difference is b - c, of another slope also (a - d) 3.5."""
    line = [(math.exp(0.3 * q + 1.0), q) for q in (0.0, 1.5, 2.0, 3.3, 5.0)]
    other = [(math.exp(0.5 * q + 0.2), q) for q in (2.0, 4.0, 7.0, 9.0)]
    assert wp.bd_rate(line, other) == pytest.approx(math.exp(-0.2 * 3.5 + 0.8) - 1, rel=1e-12)
    assert wp.bd_rate(other, line) == pytest.approx(math.exp(0.2 * 3.5 - 0.8) - 1, rel=1e-12)
    assert wp.bd_rate(line[:2], line[:2]) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 5)), min_size=2, max_size=7),
    st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 5)), min_size=2, max_size=7),
    st.floats(-0.5, 0.5),
)
def test_against_scipy(
    steps: list[tuple[float, float]], reference_steps: list[tuple[float, float]], shift: float
) -> None:
    def curve(steps: list[tuple[float, float]], quality: float) -> list[tuple[float, float]]:
        points, rate = [], 0.0
        for more_rate, more_quality in steps:
            rate, quality = rate + more_rate, quality + more_quality
            points.append((rate, quality))
        return points

    own, reference = curve(steps, shift), curve(reference_steps, 0.0)
    low, high = max(own[0][1], reference[0][1]), min(own[-1][1], reference[-1][1])
    if high - low < 1e-3:
        return
    means = []
    for points in (own, reference):
        at = [quality for _, quality in points]
        logs = [math.log(rate) for rate, _ in points]
        if len(at) == 2:  # scipy makes a straight line of two points as well
            assert float(PchipInterpolator(at, logs)((at[0] + at[1]) / 2)) == pytest.approx(sum(logs) / 2)
        inner = [quality for quality in at if low < quality < high]
        means.append(quad(PchipInterpolator(at, logs), low, high, points=inner or None, limit=200)[0] / (high - low))
    assert math.log1p(wp.bd_rate(own, reference)) == pytest.approx(means[0] - means[1], rel=1e-6, abs=1e-7)


# The first two: curves of JCTVC-E137 and their rates, as Android's compatibility suite has them from Netflix's VMAF
# (BdRateCalculatorTests.java). The others: the test data in example_usage.py of the package bjontegaard (x265 at two
# presets), and what its version 1.3.0 gives with method="pchip", by its authors what the sheet of the common
# test conditions of JVET has, to 10 places.
PUBLISHED = [
    (
        [(108048.8736, 43.6471), (61279.976, 40.3953), (33905.6656, 37.247), (18883.6928, 34.2911)],
        [(108061.2784, 43.6768), (61299.9936, 40.4232), (33928.7472, 37.2761), (18910.912, 34.3147)],
        -0.00465215420752807,
    ),
    (
        [(40433.8848, 37.5761), (7622.7456, 35.3756), (2394.488, 33.8977), (1017.6184, 32.0603)],
        [(40370.12, 37.5982), (7587.0024, 35.4025), (2390.0944, 33.9194), (1017.0984, 32.0822)],
        -0.018779823450567612,
    ),
    (
        [(9487.76, 40.037), (4593.6, 38.615), (2486.44, 36.845), (1358.24, 34.851)],
        [(9787.8, 40.121), (4469.0, 38.651), (2451.52, 36.97), (1356.24, 34.987)],
        -0.04417485350589045,
    ),
    (
        [(82472.76, 43.825), (26875.24, 41.404), (9487.76, 40.037), (4593.6, 38.615), (3600, 36.5), (2900, 35.1)],
        [(99896.96, 44.731), (33952.04, 41.875), (9787.8, 40.121), (4469.0, 38.651), (4040, 37.0), (3300, 36.5)],
        -0.029528024116427964,
    ),
]


@pytest.mark.parametrize(("reference", "curve", "rate"), PUBLISHED)
def test_published_examples(
    reference: list[tuple[float, float]], curve: list[tuple[float, float]], rate: float
) -> None:
    assert wp.bd_rate(curve, reference) == pytest.approx(rate, rel=1e-9)


def test_dominated_points_are_left_out() -> None:
    worse = [*CURVE, (10.0, 70.0), (4.0, 73.7), (3.8, 60.0)]
    assert dominated(CURVE) == 0
    assert dominated(worse) == 3
    assert wp.bd_rate(worse, CURVE) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        ([(1.0, 70.0)], "1 of 1 points"),
        ([(1.0, 70.0), (2.0, 69.0)], "1 of 2 points"),
        ([(0.0, 70.0), (2.0, 75.0)], "rates above 0"),
        ([(1.0, math.nan), (2.0, 75.0)], "finite numbers"),
        ([(1.0, 10.0), (2.0, 20.0)], "share a range"),
        ([], "0 of 0 points"),
    ],
)
def test_curves_that_cannot_be_compared(curve: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        wp.bd_rate(curve, CURVE)
    with pytest.raises(InvalidArgumentError, match=message):
        wp.bd_rate(CURVE, curve)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from(["kmeans", "uniform", "normal", "stretched"]),
    st.integers(0, 2**31),
)
def test_the_stable_rank_stays_within_its_bounds(m: int, n: int, rank: int, bits: int, scheme: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(m, rank, generator=generator) @ torch.randn(rank, n, generator=generator)
    (found,) = quantize([matrix.view(1, -1)], bits, scheme)  # type: ignore[arg-type]
    quantized = found.values().view(m, n)
    low, high = stable_rank_bounds(matrix, quantized)
    assert 0 <= low <= high <= min(m, n)
    assert low * (1 - 1e-9) - 1e-9 <= float(stable_rank(quantized)) <= high * (1 + 1e-9) + 1e-9


def test_bounds_close_in_and_are_reached() -> None:
    matrix = torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0])).double()
    assert stable_rank_bounds(matrix, matrix) == pytest.approx((22 / 16, 22 / 16))
    widths = []
    for bits in (2, 4, 8):
        noisy = torch.randn(64, 8) @ torch.randn(8, 64)
        (found,) = quantize([noisy.view(1, -1)], bits)
        low, high = stable_rank_bounds(noisy, found.values().view(64, 64))
        widths.append(high - low)
    assert widths[0] > widths[1] > widths[2]
    # E = c u v^T along the top direction of a matrix of rank one, away from it: both bounds are the stable rank, 1.
    top = torch.outer(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])).double()
    assert stable_rank_bounds(top, 1.25 * top)[0] == pytest.approx((0.75 / 1.25) ** 2)
    with pytest.raises(InvalidArgumentError, match="expected two of one shape"):
        stable_rank_bounds(matrix, matrix[:2])
