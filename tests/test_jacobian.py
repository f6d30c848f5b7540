"""Spectra of Jacobians, against dense SVDs, autograd and the closed form."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from wellposed.errors import InvalidArgumentError
from wellposed.spectrum import attention_jacobian, jacobian_spectrum, weyl_condition_bound
from zoo import vit


def linear_map(values: Tensor, seed: int = 0) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A linear function with the given singular values, and its matrix."""
    generator = torch.Generator().manual_seed(seed)
    n = len(values)
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    matrix = left @ torch.diag(values) @ right
    return (lambda x: x @ matrix.T), matrix


def test_small_jacobians_are_computed_whole() -> None:
    block = vit(depth=1).eval().blocks[0]
    x = torch.randn(1, 5, 32)
    found = jacobian_spectrum(block, x, k=7)
    expected = torch.linalg.svdvals(torch.autograd.functional.jacobian(block, x).reshape(160, 160))
    assert found.is_exact
    assert found.shape == (160, 160)
    torch.testing.assert_close(found.largest, expected[:7], rtol=1e-4, atol=1e-5)
    assert found.smallest == pytest.approx(float(expected[-1]), rel=1e-2)
    torch.testing.assert_close(found.nodes, expected, rtol=1e-3, atol=1e-4)


def test_without_forming_it() -> None:
    block = vit(depth=1).eval().blocks[0]
    x = torch.randn(1, 5, 32)
    whole = jacobian_spectrum(block, x, k=4)
    found = jacobian_spectrum(block, x, k=4, steps=60, dense_entries=0, generator=torch.Generator().manual_seed(1))
    assert not found.is_exact
    torch.testing.assert_close(found.largest, whole.largest, rtol=1e-4, atol=1e-5)
    assert found.smallest >= whole.smallest * (1 - 1e-3)
    assert found.condition_number <= whole.condition_number * (1 + 1e-2)


def test_errors_are_bounds() -> None:
    function, _ = linear_map(torch.linspace(0.1, 3, 80, dtype=torch.float64))
    values = torch.linspace(3, 0.1, 80, dtype=torch.float64)
    found = jacobian_spectrum(
        function, torch.zeros(80, dtype=torch.float64), k=5, steps=20, starts=1, dense_entries=0,
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    distance = (found.largest[:, None] - values).abs().amin(1)
    assert (distance <= found.errors + 1e-12).all()
    assert found.errors.max() > 1e-6  # twenty steps do not settle all five
    assert (found.largest <= 3 + 1e-12).all()
    assert found.smallest >= 0.1


def test_the_density_of_a_known_spectrum() -> None:
    """Half the singular values at 1, half at 2: the moments of the quadrature are those of the spectrum."""
    function, _ = linear_map(torch.tensor([1.0, 2.0], dtype=torch.float64).repeat(60))
    found = jacobian_spectrum(
        function, torch.zeros(120, dtype=torch.float64), steps=12, starts=30, dense_entries=0,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    assert float(found.weights.sum()) == pytest.approx(1)
    assert float((found.weights * (found.nodes > 1.5)).sum()) == pytest.approx(0.5, abs=0.05)
    assert float((found.weights * found.nodes**2).sum()) == pytest.approx(2.5, abs=0.15)


def test_functions_between_different_spaces() -> None:
    matrix = torch.randn(3, 40, dtype=torch.float64)
    for dense in (2**22, 0):
        found = jacobian_spectrum(lambda x: x @ matrix.T, torch.zeros(2, 40, dtype=torch.float64), dense_entries=dense)
        expected = torch.linalg.svdvals(matrix)
        assert found.shape == (6, 80)
        assert float(found.largest[0]) == pytest.approx(float(expected[0]))
        assert found.smallest == pytest.approx(float(expected[-1]), rel=1e-6)


@pytest.mark.parametrize("heads", [1, 3])
def test_the_closed_form_is_that_of_autograd(heads: int) -> None:
    torch.manual_seed(0)
    n, d, h = 5, 6, 4
    x = torch.randn(n, d, dtype=torch.float64)
    query, key, value = (torch.randn(heads, d, h, dtype=torch.float64) for _ in range(3))
    output = torch.randn(heads, h, d, dtype=torch.float64)

    def attention(x: Tensor) -> Tensor:
        a = ((x @ query) @ (x @ key).mT / h**0.5).softmax(-1)
        return (a @ (x @ value) @ output).sum(0)

    by_autograd = torch.autograd.functional.jacobian(attention, x)  # [row, column, row, column]
    by_columns = by_autograd.permute(1, 0, 3, 2).reshape(n * d, n * d)
    found = attention_jacobian(x, query, key, value, output)
    torch.testing.assert_close(found.whole, by_columns)
    spectrum = jacobian_spectrum(attention, x, k=3)
    torch.testing.assert_close(spectrum.largest, torch.linalg.svdvals(found.whole)[:3])


def test_proposition_2_and_lemma_1() -> None:
    """With attention near the identity and W_V W_O orthogonal, K is as well conditioned as A, within Weyl's bound."""
    torch.manual_seed(0)
    n, d = 4, 8
    x = 3 * torch.linalg.qr(torch.randn(d, d, dtype=torch.float64)).Q[:n]
    eye = torch.eye(d, dtype=torch.float64)[None]
    orthogonal = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64)).Q[None]
    found = attention_jacobian(x, 2 * eye, 2 * eye, orthogonal, eye)
    attention = (4 * x @ x.T / d**0.5).softmax(-1)
    assert torch.linalg.cond(found.through_values) == pytest.approx(float(torch.linalg.cond(attention)), rel=1e-6)
    bound = weyl_condition_bound(found.through_values, found.through_weights)
    assert bound.isfinite()
    assert torch.linalg.cond(found.whole) <= bound
    assert weyl_condition_bound(eye[0], 2 * eye[0]) == torch.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.tensor([1, 2])}, "floating point"),
        ({"x": torch.tensor([torch.nan])}, "finite"),
        ({"k": 0}, "k=0"),
        ({"k": 5, "steps": 3}, "steps at least k"),
        ({"starts": 0}, "starts=0"),
    ],
)
def test_bad_input(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        jacobian_spectrum(torch.sin, **({"x": torch.ones(3)} | arguments))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="expected"):
        attention_jacobian(torch.ones(3, 4), *torch.ones(3, 1, 5, 2), torch.ones(1, 2, 5))
