"""Spectra of Jacobians, against dense SVDs, autograd, the closed form and curvlinops."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from wellposed.bench.jacobian import curvlinops_jacobian, singular_values_by_svds
from wellposed.errors import InvalidArgumentError
from wellposed.spectrum import JacobianSpectrum, attention_jacobian, jacobian_spectrum, weyl_condition_bound
from zoo import hf_vit, vit


def linear_map(values: Tensor, seed: int = 0) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A linear function with the given singular values, and its matrix."""
    generator = torch.Generator().manual_seed(seed)
    n = len(values)
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    matrix = left @ torch.diag(values) @ right
    return (lambda x: x @ matrix.T), matrix


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def parts(dtype: torch.dtype = torch.float32) -> tuple[dict[str, nn.Module], Tensor]:
    """Sub-blocks of a ViT with large weights, and an input of 17 tokens, 48 wide: Jacobians of 816 x 816."""
    torch.manual_seed(0)
    block: Any = vit(depth=1, embed_dim=48).eval().blocks[0]
    for param in block.parameters():
        nn.init.normal_(param, std=0.2)
    block.to(dtype)
    found = {"attention": block.attn, "mlp": block.mlp, "block": block, "norm": nn.Sequential(block.norm1, block.attn)}
    return found, torch.randn(1, 17, 48).to(dtype)


def dense_values(function: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """By reverse-mode autograd, row by row."""
    return torch.linalg.svdvals(torch.autograd.functional.jacobian(function, x).reshape(-1, x.numel()))


def assert_bounds(found: JacobianSpectrum, expected: Tensor) -> None:
    """Every error is true, the largest are found from below and the smallest from above, all to rounding."""
    rounding = 32 * torch.finfo(found.nodes.dtype).eps * expected[0]
    for values, errors in ((found.largest, found.largest_errors), (found.smallest, found.smallest_errors)):
        assert ((values.double()[:, None] - expected).abs().amin(1) <= errors).all()
    assert (found.largest <= expected[: len(found.largest)] + rounding).all()
    assert (found.smallest >= expected.flip(0)[: len(found.smallest)] - rounding).all()


def test_small_jacobians_are_computed_whole() -> None:
    block = vit(depth=1).eval().blocks[0]
    x = torch.randn(1, 5, 32)
    found = jacobian_spectrum(block, x, k=7)
    expected = dense_values(block, x)
    assert found.is_exact
    assert found.shape == (160, 160)
    assert found.products == 160
    torch.testing.assert_close(found.largest, expected[:7], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.smallest, expected.flip(0)[:7], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.nodes, expected, rtol=1e-3, atol=1e-4)
    assert found.condition_number == pytest.approx(float(expected[0] / expected[-1]), rel=1e-2)
    assert found.mean(torch.square) == (pytest.approx(float(expected.square().mean())), 0)


@pytest.mark.parametrize("part", ["attention", "mlp", "block", "norm"])
def test_without_forming_it(part: str) -> None:
    wide, exact_x = parts(torch.float64)
    expected = dense_values(wide[part], exact_x)
    modules, x = parts()
    found = jacobian_spectrum(modules[part], x, k=6, dense_entries=0, generator=seeded())
    assert not found.is_exact
    assert found.shape == (816, 816)
    assert found.products == 2 * 4 * 36
    assert_bounds(found, expected)
    torch.testing.assert_close(found.largest.double(), expected[:6], rtol=1e-3, atol=0)
    assert found.condition_number <= float(expected[0] / expected[-1]) * (1 + 1e-3)
    few = jacobian_spectrum(modules[part], x, k=6, steps=6, starts=1, dense_entries=0, generator=seeded())
    assert few.largest_errors.max() > 0.01 * few.largest[0]  # six steps settle none
    assert_bounds(few, expected)


def test_which() -> None:
    modules, x = parts()
    for dense in (0, 2**22):
        both, largest, smallest = (
            jacobian_spectrum(modules["block"], x, 5, which, dense_entries=dense, generator=seeded())
            for which in ("both", "largest", "smallest")
        )
        assert largest.products <= both.products
        assert largest.products < both.products or both.is_exact
        assert both.products == smallest.products
        assert len(largest.smallest) == len(smallest.largest) == 0
        assert (largest.largest - both.largest).abs().max() <= 1e-3 * both.largest[0]
        torch.testing.assert_close(smallest.smallest, both.smallest)
        assert torch.tensor([largest.condition_number, smallest.condition_number]).isnan().all()


def test_the_largest_stop_at_the_tolerance() -> None:
    """The looser, the fewer products; no more steps than allowed, and then the errors say so."""
    function, matrix = linear_map(torch.linspace(0.1, 3, 800, dtype=torch.float64))
    x = torch.zeros(800, dtype=torch.float64)
    settings: dict[str, Any] = {"k": 4, "which": "largest", "dense_entries": 0}
    loose, tight = (
        jacobian_spectrum(function, x, **settings, tol=tol, steps=300, generator=seeded()) for tol in (1e-2, 1e-6)
    )
    short = jacobian_spectrum(function, x, **settings, tol=1e-6, steps=20, generator=seeded())
    assert loose.products < tight.products < 600
    assert loose.largest_errors.max() <= 1e-2 * 3
    assert tight.largest_errors.max() <= 1e-6 * 3 + 1e-12
    assert short.products == 40
    assert short.largest_errors.max() > 1e-6 * 3
    for found in (loose, tight, short):
        assert_bounds(found, torch.linalg.svdvals(matrix))


DEGENERATE = {
    "identity": torch.eye(160),
    "zero": torch.zeros(160, 160),
    "rank 1": torch.ones(160, 160),
    "half": torch.diag(torch.tensor([1.0, 0.0]).repeat(80)),
    "two values": torch.diag(torch.tensor([1.0, 2.0]).repeat(80)),
    "one entry": torch.zeros(160, 160).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(2.0)),
    "one layer, many tokens": torch.kron(torch.eye(16), torch.randn(10, 10, generator=seeded())),
    "wide range": torch.diag(torch.logspace(0, -9, 160)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_jacobians(name: str, dtype: torch.dtype) -> None:
    """Where products give nothing new, the vectors stay orthonormal and the bounds true."""
    matrix = DEGENERATE[name].to(dtype)
    expected = torch.linalg.svdvals(matrix.double())
    for starts, steps in ((1, 40), (4, 30), (3, 53)):
        found = jacobian_spectrum(
            lambda x: x @ matrix.T, torch.zeros(160, dtype=dtype),
            starts=starts, steps=steps, dense_entries=0, generator=seeded(),
        )  # fmt: skip
        assert not found.is_exact
        assert_bounds(found, expected)
        torch.testing.assert_close(found.shares.sum(1), torch.ones(starts, dtype=dtype))
        many = min(starts, int((expected > 0.999 * expected[0]).sum()))
        torch.testing.assert_close(found.largest[:many].double(), expected[:many], rtol=1e-4, atol=0)


def test_norms_remove_directions() -> None:
    """LayerNorm takes the mean out of each of the 17 tokens: that many singular values are 0, and no number divides."""
    modules, x = parts()
    whole = jacobian_spectrum(modules["norm"], x)
    assert whole.condition_number == float("inf")
    assert whole.mean(lambda s: s <= 1e-6 * whole.largest[0])[0] >= 17 / 816
    assert jacobian_spectrum(torch.zeros_like, x).condition_number == float("inf")


def test_the_density_of_a_known_spectrum() -> None:
    """Half the singular values at 1, half at 2: the moments of the quadrature are those of the spectrum."""
    function, _ = linear_map(torch.tensor([1.0, 2.0], dtype=torch.float64).repeat(300))
    found = jacobian_spectrum(
        function, torch.zeros(600, dtype=torch.float64), steps=12, starts=30, dense_entries=0, generator=seeded(3)
    )
    assert not found.is_exact
    assert float(found.weights.sum()) == pytest.approx(1)
    assert float((found.weights * (found.nodes > 1.5)).sum()) == pytest.approx(0.5, abs=0.03)
    assert float((found.weights * found.nodes**2).sum()) == pytest.approx(2.5, abs=0.1)


@pytest.mark.parametrize("part", ["attention", "mlp", "block"])
def test_the_density_within_its_standard_error(part: str) -> None:
    modules, x = parts()
    exact = jacobian_spectrum(modules[part], x)
    found = jacobian_spectrum(modules[part], x, starts=16, steps=20, dense_entries=0, generator=seeded(1))
    assert exact.is_exact
    assert not found.is_exact
    median = exact.nodes[408]
    for function in (torch.square, lambda s: s**6, lambda s: (s < median).float()):
        value, error = found.mean(function)
        truth = exact.mean(function)[0]
        assert error < 0.1 * truth
        assert abs(value - truth) <= 4 * error
    one = jacobian_spectrum(modules[part], x, starts=1, steps=20, dense_entries=0)
    assert torch.tensor(one.mean(torch.square)[1]).isnan()


@pytest.mark.parametrize("shape", [(30, 80), (80, 30), (6, 80)], ids=str)
def test_functions_between_different_spaces(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=seeded())
    expected = torch.linalg.svdvals(matrix)
    x = torch.zeros(2, shape[1], dtype=torch.float64)
    for dense in (2**22, 0):
        found = jacobian_spectrum(lambda x: x @ matrix.T, x, 2, starts=2, steps=14, dense_entries=dense)
        assert found.shape == (2 * shape[0], 2 * shape[1])
        assert found.is_exact == (dense > 0 or min(shape) == 6)  # 28 vectors fill the twelve dimensions of (12, 160)
        assert found.products == (2 * min(shape) if found.is_exact else 2 * 28)
        assert_bounds(found, expected.repeat_interleave(2))
        assert float(found.largest[0]) == pytest.approx(float(expected[0]), rel=1e-3)
    assert len(jacobian_spectrum(lambda x: x.sum(), x, k=5).largest) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("part", ["attention", "block"])
def test_against_curvlinops(part: str) -> None:
    """Its operator is one with respect to parameters, so that x is made one; scipy takes it from there."""
    modules, x = parts(torch.float64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = curvlinops_jacobian(modules[part], x)
        by_columns, by_rows = theirs @ torch.eye(816).double(), theirs.adjoint() @ torch.eye(816).double()
    torch.testing.assert_close(by_columns, by_rows.T)
    ours = jacobian_spectrum(modules[part], x, k=816)
    assert ours.is_exact
    torch.testing.assert_close(ours.largest, torch.linalg.svdvals(by_columns))
    values, _ = singular_values_by_svds(modules[part], x, 4, 1e-9)
    found = jacobian_spectrum(modules[part], x, 4, "largest", tol=1e-9, dense_entries=0, generator=seeded())
    assert not found.is_exact
    torch.testing.assert_close(found.largest, torch.tensor(values, dtype=torch.float64), rtol=1e-8, atol=0)


def test_of_a_tuple_the_first_counts() -> None:
    model: Any = hf_vit().eval()
    attention, x = model.vit.layers[0].attention, torch.randn(1, 5, 32)
    assert isinstance(attention(x), tuple)
    found = jacobian_spectrum(attention, x)
    torch.testing.assert_close(found.largest, dense_values(lambda x: attention(x)[0], x)[:8], rtol=1e-4, atol=1e-5)
    named = jacobian_spectrum(model.vit, torch.randn(1, 3, 32, 32), k=2)
    assert named.shape == (17 * 32, 3 * 32 * 32)


def test_training_mode_is_put_aside() -> None:
    model: Any = vit(depth=1, proj_drop_rate=0.5, drop_path_rate=0.5).train()
    block, x = model.blocks[0], torch.randn(1, 5, 32)
    block.norm2.eval()
    found = jacobian_spectrum(block, x)
    assert block.training
    assert block.attn.proj_drop.training
    assert not block.norm2.training
    with pytest.raises(InvalidArgumentError, match="another output each time"):
        jacobian_spectrum(block.mlp.forward, x)
    torch.testing.assert_close(found.largest, dense_values(block.eval(), x)[:8], rtol=1e-4, atol=1e-5)
    with pytest.raises(ZeroDivisionError):
        jacobian_spectrum(nn.Sequential(nn.Dropout(), Failing()), x)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        raise ZeroDivisionError


@pytest.mark.parametrize("dense", [0, 2**22])
def test_surroundings_do_not_matter(dense: int) -> None:
    modules, x = parts()
    module = modules["block"]
    expected = jacobian_spectrum(module, x, dense_entries=dense, generator=seeded())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = jacobian_spectrum(module, x, dense_entries=dense, generator=seeded())
    with torch.inference_mode():
        inference = jacobian_spectrum(module, x, dense_entries=dense, generator=seeded())
    for found in (autocast, inference):
        torch.testing.assert_close(found.nodes, expected.nodes)
    assert not expected.nodes.requires_grad
    assert all(param.grad is None for param in module.parameters())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch, of the first backward pass in a process
@pytest.mark.parametrize("part", ["attention", "block"])
def test_on_a_gpu(part: str) -> None:
    """A block as wide as ViT-B's, at 17 tokens."""
    block: Any = timm.create_model("vit_base_patch16_224", depth=1).eval().blocks[0]
    x = torch.randn(1, 17, 768)
    cpu = jacobian_spectrum(block.attn if part == "attention" else block, x, generator=seeded())
    block.cuda()
    gpu = jacobian_spectrum(block.attn if part == "attention" else block, x.cuda())
    assert gpu.largest.is_cuda
    assert not gpu.is_exact
    assert ((gpu.largest.cpu() - cpu.largest).abs() <= gpu.largest_errors.cpu() + cpu.largest_errors).all()
    assert gpu.largest_errors[0] <= 1e-3 * gpu.largest[0]
    assert gpu.smallest[0].item() == pytest.approx(cpu.smallest[0].item(), rel=0.3)
    (value, error), (expected, other) = gpu.mean(torch.square), cpu.mean(torch.square)
    assert abs(value - expected) <= 5 * (error**2 + other**2) ** 0.5


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch, of the first backward pass in a process
def test_steps_do_not_wait_for_a_gpu() -> None:
    modules, x = parts()
    module, x = modules["block"].cuda(), x.cuda()
    waits = []
    for steps in (8, 8, 24):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                jacobian_spectrum(module, x, k=4, steps=steps, dense_entries=0)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(warning.message) for warning in seen))
    assert waits[1] == waits[2]


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
    values, weights = (torch.linalg.svdvals(part) for part in (found.through_values, found.through_weights))
    bound = weyl_condition_bound(values[0], values[-1], weights[0])
    assert bound.isfinite()
    assert torch.linalg.cond(found.whole) <= bound
    assert weyl_condition_bound(values[0], values[-1], 2 * values[-1]) == torch.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.tensor([1, 2])}, "x is of torch.int64: expected torch.float32 or torch.float64"),
        ({"x": torch.ones(3, dtype=torch.bfloat16)}, r"x is of torch.bfloat16.*\.float\(\)"),
        ({"x": [1.0]}, "x is of list"),
        ({"x": torch.tensor([torch.nan])}, "x holds NaN or Inf"),
        ({"x": torch.ones(2, 0)}, r"x has shape \(2, 0\): an empty tensor"),
        ({"k": 0}, "k=0"),
        ({"k": 5, "steps": 3}, "steps at least k"),
        ({"starts": 0}, "starts=0"),
        ({"which": "SM"}, "which='SM': expected 'both', 'largest' or 'smallest'"),
        ({"tol": 0.0}, "tol=0.0"),
        ({"module": torch.log, "x": -torch.ones(3)}, "output holds NaN"),
        ({"module": torch.Tensor.half}, "output is of torch.float16: expected torch.float32"),
        ({"module": lambda x: x[:0]}, "output has shape"),
        ({"module": lambda x: ()}, "returns tuple"),
        ({"module": lambda x: {"logits": x}}, "returns dict: expected a tensor"),
        ({"module": lambda x: ("no",)}, "output is of str"),
    ],
)
def test_bad_input(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        jacobian_spectrum(**({"module": torch.sin, "x": torch.ones(3)} | arguments))


def test_bad_input_to_the_closed_form() -> None:
    with pytest.raises(InvalidArgumentError, match="expected"):
        attention_jacobian(torch.ones(3, 4), *torch.ones(3, 1, 5, 2), torch.ones(1, 2, 5))
