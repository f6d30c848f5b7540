"""The neural tangent kernel, against its definition, closed forms and itself by other ways."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import wellposed as wp
from wellposed.errors import InvalidArgumentError
from wellposed.spectrum import layer_products
from wellposed.spectrum.layer_gradients import evaluated, find_layers
from wellposed.spectrum.layer_products import Size, _of_pairs, _of_written
from wellposed.spectrum.ntk import _plan, contraction_costs
from zoo import VOCABULARY, bert, convmixer, gpt2, vit

METHODS = ["structured", "products"]
OUTPUTS = ["trace", "all"]
SIZES = st.integers(1, 4)


def by_definition(model: nn.Module, x: Tensor, outputs: str = "trace") -> Tensor:
    params = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}

    def function(params: dict[str, Tensor]) -> Tensor:
        output = torch.func.functional_call(model, params, (x,))
        return getattr(output, "logits", output).reshape(len(x), -1)

    with sdpa_kernel(SDPBackend.MATH):
        jacobians = torch.func.jacrev(function)(params)
    j_NKP = torch.cat([jacobian.reshape(*jacobian.shape[:2], -1) for jacobian in jacobians.values()], -1)
    if outputs == "all":
        return j_NKP.flatten(0, 1) @ j_NKP.flatten(0, 1).T
    return torch.einsum("nkp,mkp->nm", j_NKP, j_NKP) / j_NKP.shape[1]


def images(n: int = 3, size: int = 8) -> Tensor:
    return torch.randn(n, 3, size, size)


def ids(n: int = 3, length: int = 4) -> Tensor:
    return torch.randint(0, VOCABULARY, (n, length))


def mlp(*widths: int) -> nn.Sequential:
    layers = [nn.Linear(i, o) for i, o in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))[:-1]


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=4, padding="same", bias=False),
        nn.GroupNorm(2, 8),
        nn.Conv2d(8, 12, (3, 1), groups=2, padding=(2, 1), dilation=2, padding_mode="circular"),
        nn.Flatten(2),
        nn.Conv1d(12, 4, 3),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


class Tied(nn.Module):
    """Weights that two modules share, that one uses twice, that are also used without the module; a wasted call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.twice, self.open, self.wasteful = (nn.Linear(4, 4) for _ in range(5))
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.first(x).tanh()).tanh())
        x, _ = self.wasteful(x), self.wasteful(3 * x)
        return self.scale * F.linear(self.open(self.last(x).sin()).tanh(), self.open.weight)


class Patched(nn.Module):
    """Layers that do not do what their classes say: a hook on the output of one, another forward of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked, self.other = nn.Linear(4, 4), nn.Linear(4, 2)
        self.hooked.register_forward_hook(lambda module, arguments, output: 2 * output.sin())
        self.other.forward = lambda x: F.linear(x, self.other.weight.square(), self.other.bias)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.hooked(x))


class Lookup(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, 5, padding_idx=1), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x).tanh().cumsum(1)).flatten(1)


class TokensFirst(nn.Module):
    """A model whose samples lie along the second dimension, with weights that belong to no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 6), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.transpose(0, 1)))[-1]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: mlp(5, 7, 6, 3), lambda: torch.randn(4, 5)),
    "tokens": (lambda: nn.Sequential(mlp(5, 16, 3), nn.Flatten()), lambda: torch.randn(3, 6, 5)),
    "convolutional": (convolutional, images),
    "convmixer": (lambda: convmixer(num_classes=3), lambda: images(2, 16)),
    "vit": (lambda: vit(num_classes=3), lambda: images(2, 32)),
    "tokens first": (TokensFirst, lambda: torch.randn(3, 5, 4)),
    "tied": (Tied, lambda: torch.randn(3, 4)),
    "patched": (Patched, lambda: torch.randn(3, 4)),
    "lookup, many words": (lambda: Lookup(90), lambda: torch.randint(0, 4, (3, 5))),
    "lookup, few words": (lambda: Lookup(3), lambda: torch.randint(0, 3, (3, 9), dtype=torch.int32)),
    "bert": (bert, ids),
    "gpt2": (lambda: gpt2(vocab_size=20), lambda: ids(2, 2) % 20),
}


@pytest.mark.parametrize("case", CASES)
def test_against_the_definition(case: str) -> None:
    make, batch = CASES[case]
    x = batch()
    x = x.double() if x.is_floating_point() else x
    model = make().eval().double()
    model(x)
    for outputs in OUTPUTS:
        expected = by_definition(model, x, outputs)
        for method in METHODS:
            found = wp.ntk(model, x, outputs=outputs, method=method)  # type: ignore[arg-type]
            torch.testing.assert_close(found.gram, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))
            assert found.method == method
            assert found.gram.dtype == found.eigenvalues.dtype == torch.float64
            assert found.eigenvalues[-1] >= -1e-10 * found.eigenvalues[0]
            assert (found.eigenvalues.diff() <= 0).all()
            assert float(found.eigenvalues.sum()) == pytest.approx(float(expected.trace()))


@given(N=SIZES, Q=SIZES, S=SIZES, T=SIZES, I=SIZES, O=SIZES, memory=st.sampled_from([1, 300, 2**20]))
@settings(max_examples=40, deadline=None)
def test_both_forms_are_one(N: int, Q: int, S: int, T: int, I: int, O: int, memory: int) -> None:  # noqa: E741
    generator = torch.Generator().manual_seed(0)
    a, g = (torch.randn(*shape, generator=generator).double() for shape in [(N, S, T, I), (N, Q, S, T, O)])
    rows = torch.einsum("nsti,nqsto->nqsoi", a, g).reshape(N * Q, -1)
    torch.testing.assert_close(_of_written(a, g, memory), rows @ rows.T)
    torch.testing.assert_close(_of_pairs(a, g, memory), rows @ rows.T)


@given(N=SIZES, K=SIZES, width=SIZES, memory=st.sampled_from([1, 2000, 10**9]), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_properties(N: int, K: int, width: int, memory: int, seed: int) -> None:
    """However little memory there is; the trace is the mean of the outputs' own blocks; more samples only add rows."""
    torch.manual_seed(seed)
    model, x = mlp(3, width, K).double(), torch.randn(N, 3).double()
    whole = wp.ntk(model, x, outputs="all", method="structured", memory=memory)
    torch.testing.assert_close(whole.gram, by_definition(model, x, "all"))
    assert whole.eigenvalues[-1] >= -1e-10 * whole.eigenvalues[0]
    mean = torch.einsum("nkmk->nm", whole.gram.view(N, K, N, K)) / K
    for method in METHODS:
        found = wp.ntk(model, x, method=method, memory=memory)  # type: ignore[arg-type]
        torch.testing.assert_close(found.gram, mean)
    torch.testing.assert_close(wp.ntk(model, x[:1], memory=memory).gram, mean[:1, :1])


@given(
    sizes=st.lists(st.builds(Size, SIZES, SIZES, SIZES, st.integers(1, 50)), min_size=1, max_size=5),
    N=SIZES, K=SIZES, outputs=st.sampled_from(OUTPUTS), memory=st.integers(1, 3000),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_what_is_held_fits_and_is_all(sizes: list[Size], N: int, K: int, outputs: Any, memory: int) -> None:
    plan = _plan(sizes, N, K, outputs, saved=100, memory=memory, itemsize=4)
    assert [k for piece in plan.pieces for k in piece] == list(range(K))
    parts = [(i, feature) for group in plan.groups for i, part in group for feature in range(part.start, part.stop)]
    assert parts == [(i, feature) for i, size in enumerate(sizes) for feature in range(size.O)]
    for group in plan.groups:
        held = [4 * N * len(plan.pieces[0]) * sizes[i].S * sizes[i].T * (part.stop - part.start) for i, part in group]
        assert sum(held) <= memory or (len(group) == 1 and group[0][1].stop - group[0][1].start == 1)


def test_linear_models() -> None:
    x = torch.randn(4, 3).double()
    gram = x @ x.T + 1
    torch.testing.assert_close(wp.ntk(nn.Linear(3, 1).double(), x).gram, gram)
    torch.testing.assert_close(wp.ntk(nn.Linear(3, 5).double(), x).gram, gram)
    by_output = wp.ntk(nn.Linear(3, 5).double(), x, outputs="all").gram.view(4, 5, 4, 5)
    torch.testing.assert_close(by_output, torch.einsum("nm,kl->nkml", gram, torch.eye(5).double()))
    torch.testing.assert_close(wp.ntk(nn.Linear(3, 1, bias=False).double(), x).gram, x @ x.T)


def test_two_layers() -> None:
    """f(x) = a^T relu(W x): Theta = relu(W x)^T relu(W x') + x^T x' sum over r of a_r^2 [w_r x > 0] [w_r x' > 0]."""
    model = nn.Sequential(nn.Linear(6, 50, bias=False), nn.ReLU(), nn.Linear(50, 1, bias=False)).double()
    x = torch.randn(5, 6).double()
    w, a = model[0].weight.detach(), model[2].weight.detach()[0]
    h = x @ w.T
    expected = h.relu() @ h.relu().T + (x @ x.T) * (((h > 0) * a.square()) @ (h > 0).double().T)
    torch.testing.assert_close(wp.ntk(model, x).gram, expected)


def test_condition_numbers() -> None:
    line = nn.Linear(3, 1, bias=False)
    found = wp.ntk(line, torch.diag(torch.tensor([1.0, 2.0, 3.0])))
    torch.testing.assert_close(found.eigenvalues, torch.tensor([9.0, 4.0, 1.0], dtype=torch.float64))
    assert found.condition_number == pytest.approx(9)
    assert wp.ntk(line, torch.ones(2, 3)).condition_number == torch.inf
    eigenvalues = torch.tensor([1.0, 1e-8], dtype=torch.float64)
    assert replace(found, eigenvalues=eigenvalues).condition_number == torch.inf
    assert replace(found, eigenvalues=eigenvalues, dtype=torch.float64).condition_number == pytest.approx(1e8)
    assert replace(found, eigenvalues=-eigenvalues.flip(0)).condition_number == torch.inf


def test_each_method_and_form_is_cheapest_somewhere() -> None:
    def costs(T: int, K: int, outputs: Any, N: int = 16, width: int = 512) -> dict[str, float]:
        return contraction_costs([Size(1, T, width, width)] * 12, 12 * 2.0 * T * width**2, N, K, outputs)

    few_outputs, many_outputs = costs(T=65, K=10, outputs="all"), costs(T=65, K=1000, outputs="all")
    assert few_outputs["structured"] < few_outputs["products"]
    assert many_outputs["products"] < many_outputs["structured"]
    assert costs(T=65, K=1000, outputs="trace")["structured"] < costs(T=65, K=1000, outputs="trace")["products"]
    written, paired = Size(1, 1, 512, 512).costs(N=16, Q=10)
    assert paired < written / 100
    written, paired = Size(1, 196, 512, 512).costs(N=16, Q=10)
    assert written < paired / 10


def test_auto_takes_what_costs_least() -> None:
    few, many = nn.Sequential(mlp(8, 64, 2), nn.Flatten()), nn.Sequential(mlp(64, 64, 64, 64), nn.Flatten())
    chosen = set()
    for model, x in [(few, torch.randn(4, 2, 8)), (many, torch.randn(2, 8, 64))]:
        found = wp.ntk(model, x, outputs="all")
        assert found.method == min(found.costs, key=lambda name: found.costs[name])
        chosen.add(found.method)
    assert chosen == set(METHODS)
    x = torch.randn(4, 2, 8)
    assert wp.ntk(few, x, memory=1).costs["structured"] > wp.ntk(few, x).costs["structured"]


@pytest.mark.parametrize(("tokens", "unused"), [(1, "_of_written"), (40, "_of_pairs")])
def test_the_cheaper_form_is_used(tokens: int, unused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(layer_products, unused)
    wp.ntk(nn.Linear(8, 8, bias=False), torch.randn(3, tokens, 8), method="structured")


def test_which_layers_are_known() -> None:
    """All that matter in a ViT; and none whose parameters are used elsewhere too."""

    def modules(model: nn.Module, x: Tensor) -> set[str]:
        trained = [name for name, _ in model.named_parameters()]
        with evaluated(model) as values:
            return {layer.names[0] for layer in find_layers(model, values, trained, x).layers if layer.module}

    model = vit()
    linear = (nn.Linear, nn.Conv2d)
    expected = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, linear)}
    assert modules(model, images(1, 32)) == expected
    assert modules(Tied(), torch.randn(1, 4)) == set()


def state(model: nn.Module) -> Any:
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    grads = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
    wants = [param.requires_grad for param in model.parameters()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return hooks, grads, wants, [module.training for module in model.modules()], values, torch.get_rng_state()


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_left_as_it_was(method: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 2))
    model[1].eval()
    model[0].weight.requires_grad_(False)
    x = images(2)
    model(x).sum().backward()
    before = state(model)
    found = wp.ntk(model, x, method=method)
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)
    torch.testing.assert_close(found.gram, wp.ntk(model.eval(), x, method=method).gram)
    with torch.inference_mode():
        torch.testing.assert_close(found.gram, wp.ntk(model, x.clone(), method=method).gram)


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


def test_also_what_it_counts() -> None:
    model, x = Counting(), torch.randn(2, 3)
    torch.testing.assert_close(wp.ntk(model, x, method="structured").gram, (x @ x.T + 1).double())
    assert model.calls == 0


class FailsLater(nn.Module):
    def __init__(self, after: int) -> None:
        super().__init__()
        self.layer, self.left = nn.Linear(3, 2), after

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("failed")
        return self.layer(x)


@pytest.mark.parametrize("after", [0, 1])
def test_also_when_it_fails(after: int) -> None:
    model = FailsLater(after)
    before = state(model)
    with pytest.raises(RuntimeError, match="failed"):
        wp.ntk(model, torch.ones(2, 3))
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.", "0."])
def test_only_what_trains_counts(frozen: str) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)).double(), images(2).double()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(frozen))
    for method in METHODS:
        found = wp.ntk(model, x, outputs="all", method=method)  # type: ignore[arg-type]
        torch.testing.assert_close(found.gram, by_definition(model, x, "all"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    model, x = convolutional().eval(), images().to(dtype)
    model(x.float())
    model.to(dtype)
    found = wp.ntk(model, x)
    assert found.dtype == torch.float32
    assert next(model.parameters()).dtype == dtype
    torch.testing.assert_close(found.gram, wp.ntk(model.float(), x.float()).gram)
    torch.testing.assert_close(found.gram, by_definition(model.double(), x.double()), rtol=1e-4, atol=1e-3)


def test_outputs_of_any_shape() -> None:
    x = torch.randn(3, 4)
    single, pair = mlp(4, 6, 1), mlp(4, 6, 4)
    torch.testing.assert_close(wp.ntk(nn.Sequential(single, nn.Flatten(0)), x).gram, wp.ntk(single, x).gram)
    square = wp.ntk(nn.Sequential(pair, nn.Unflatten(1, (2, 2))), x, outputs="all")
    torch.testing.assert_close(square.gram, wp.ntk(pair, x, outputs="all").gram)


class Rounded(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).round().long()


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.ones(0, 3)}, r"\(0, 3\): expected a tensor of at least one sample"),
        ({"x": torch.tensor(1.0)}, r"\(\): expected"),
        ({"x": torch.tensor([[1.0, torch.nan, 0.0]])}, "without NaN or Inf"),
        ({"x": [[1.0, 2.0, 3.0]]}, "x is list"),
        ({"model": nn.Linear(3, 2).requires_grad_(False)}, r"call requires_grad_\(\)"),
        ({"model": nn.Flatten()}, "no parameter of the model"),
        ({"model": Rounded(3, 2)}, r"torch\.int64, has no derivative"),
        ({"model": Pair(3, 2)}, "the model returns tuple for 1 samples"),
        ({"model": nn.Sequential(nn.Linear(3, 2), nn.Flatten(0))}, r"the model returns \(2,\) for 1 samples"),
        ({"outputs": "mean"}, "outputs='mean'"),
        ({"method": "jacobian"}, "'structured', 'products'"),
        ({"memory": 0}, "memory=0"),
    ],
)
def test_bad_input(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        wp.ntk(**({"model": nn.Linear(3, 2), "x": torch.ones(2, 3)} | arguments))


@pytest.mark.parametrize("method", METHODS)
def test_gradients_that_are_not_finite(method: Any) -> None:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.bias, torch.nan)
    with pytest.raises(InvalidArgumentError, match="NaN or Inf"):
        wp.ntk(nn.Sequential(model, nn.Linear(2, 2)), torch.ones(2, 3), method=method)
