"""Sine low-rank layers, replacing linear ones by them, and the recipe that remembers it."""

import copy
import json
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import wellposed as wp
from wellposed.errors import InvalidArgumentError, ModelFileError, RecipeMismatchError, UnsuitableModelError
from wellposed.lowrank import LowRankLinear, SineLinear, factorize, parameter_counts
from wellposed.lowrank.frequency import adapter_omega, layer_omega
from wellposed.lowrank.targets import close_names, is_target
from wellposed.recipes import replay
from wellposed.spectrum import stable_rank
from zoo import images, vit

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def written_out(layer: SineLinear) -> torch.Tensor:
    """W = sin(omega U V^T) / g in float64."""
    return torch.sin(layer.omega * (layer.U.double() @ layer.Vt.double())) / layer.gain


@every_dtype
@pytest.mark.parametrize("bias", [True, False])
def test_layer_is_its_formula(dtype: torch.dtype, bias: bool) -> None:
    layer = SineLinear(48, 24, rank=3, bias=bias, dtype=dtype)
    x = torch.randn(2, 5, 48, dtype=dtype)
    expected = F.linear(x.double(), written_out(layer), layer.bias.double() if layer.bias is not None else None)
    torch.testing.assert_close(layer(x).double(), expected, rtol=0, atol=TOLERANCE[dtype])
    assert layer(x).dtype == dtype
    torch.testing.assert_close(layer.weight.double(), written_out(layer), rtol=0, atol=TOLERANCE[dtype])


@every_dtype
def test_merged_layer_computes_the_same(dtype: torch.dtype) -> None:
    layer = SineLinear(48, 24, rank=3, dtype=dtype).eval()
    linear = layer.to_linear()
    assert type(linear) is nn.Linear
    assert (linear.in_features, linear.out_features, linear.training) == (48, 24, False)
    assert linear.weight.dtype == dtype
    x = torch.randn(7, 48, dtype=dtype)
    torch.testing.assert_close(linear(x), layer(x), rtol=0, atol=TOLERANCE[dtype])
    plain = LowRankLinear(48, 24, rank=3, dtype=dtype)
    torch.testing.assert_close(plain.to_linear()(x), plain(x), rtol=0, atol=2 * TOLERANCE[dtype])
    assert SineLinear(4, 4, rank=1, bias=False).to_linear().bias is None


def test_gradients_are_those_of_the_formula() -> None:
    layer = SineLinear(32, 16, rank=4)
    x = torch.randn(6, 32, requires_grad=True)
    layer(x).square().sum().backward()
    ours = [x.grad, layer.U.grad, layer.Vt.grad, layer.bias.grad]
    factors = [tensor.detach().double().requires_grad_() for tensor in (x, layer.U, layer.Vt, layer.bias)]
    weight = torch.sin(layer.omega * factors[1] @ factors[2]) / layer.gain
    F.linear(factors[0], weight, factors[3]).square().sum().backward()
    for one, other in zip(ours, factors, strict=True):
        torch.testing.assert_close(one.double(), other.grad, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=40)
@given(st.integers(16, 256), st.integers(16, 256), st.integers(1, 16))
def test_auto_brings_the_argument_to_two(in_features: int, out_features: int, rank: int) -> None:
    """std(U V^T) = 1 / (3 sqrt(in)) whatever the rank, so that omega = 6 sqrt(in) makes it 2."""
    torch.manual_seed(0)
    layer = SineLinear(in_features, out_features, rank)
    assert layer.omega == layer_omega(in_features) == 6 * sqrt(in_features)
    assert layer.gain == sqrt(in_features)
    # The entries of U are uniform in +-1/sqrt(k), those of V^T in +-1/sqrt(in).
    u, vt = layer.U.detach(), layer.Vt.detach()
    bounds = float(u.abs().max()) * sqrt(rank), float(vt.abs().max()) * sqrt(in_features)
    assert all(bound <= 1 + 1e-6 for bound in bounds)
    if min(in_features, out_features) >= 64:  # of so many entries one is near the bound, but for one draw in a million
        assert min(bounds) > 0.8
    if rank >= 4 and min(in_features, out_features) >= 64:
        assert 1.5 < float((layer.omega * u @ vt).std()) < 2.5


def test_sine_raises_the_rank() -> None:
    for rank in (1, 4, 16):
        layer = SineLinear(256, 256, rank)
        product = stable_rank(layer.U.detach() @ layer.Vt.detach())
        assert stable_rank(layer.weight.detach()) > 1.4 * product


def test_omega_for_adapters_is_the_method_pages() -> None:
    """sqrt(3 in) / (0.01 sqrt(r)), about 2,800 for in 4096 and r 16, and std 1 where the trained factor has 0.01."""
    in_features, rank = 4096, 16
    init_std = 1 / sqrt(3 * in_features)
    omega = adapter_omega(rank, init_std)
    assert omega == pytest.approx(sqrt(3 * in_features) / (0.01 * sqrt(rank)))
    assert 2700 < omega < 2900
    a, b = init_std * torch.randn(rank, in_features), 0.01 * torch.randn(512, rank)
    assert float((omega * b @ a).std()) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 9}, "from 1 to 8.*8 x 16"),
        ({"rank": 0}, "from 1 to 8"),
        ({"rank": 2.0}, "whole number"),
        ({"rank": True}, "whole number"),
        ({"rank": 2, "omega": 0}, "omega=0: expected a number above 0, or 'auto'"),
        ({"rank": 2, "omega": -3.0}, "above 0"),
        ({"rank": 2, "omega": float("nan")}, "above 0"),
        ({"rank": 2, "omega": float("inf")}, "above 0"),
        ({"rank": 2, "omega": "high"}, "omega='high'"),
        ({"rank": 2, "gain": 0.0}, "gain=0.0"),
        ({"rank": 2, "gain": -1}, "above 0"),
    ],
)
def test_bad_layers_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        SineLinear(16, 8, **arguments)
    model = nn.Sequential(nn.Linear(16, 8))
    with pytest.raises(InvalidArgumentError, match=message):
        factorize(model, targets=["0"], **arguments)
    assert type(model[0]) is nn.Linear


def test_own_omega_and_gain() -> None:
    layer = SineLinear(8, 8, rank=2, omega=3, gain=2)
    torch.testing.assert_close(layer.weight, torch.sin(3 * layer.U @ layer.Vt) / 2)
    assert "rank=2" in repr(layer)
    assert "omega=3" in repr(layer)


def test_factorize_takes_the_named_layers() -> None:
    model = vit().eval()
    biases = {name: value.clone() for name, value in model.state_dict().items() if name.endswith("fc1.bias")}
    before = sum(parameter.numel() for parameter in model.parameters())
    assert factorize(model, rank=4, targets=["mlp.fc1", "mlp.fc2"]) is model
    made = {name: module for name, module in model.named_modules() if isinstance(module, SineLinear)}
    assert list(made) == [f"blocks.{block}.mlp.{layer}" for block in range(2) for layer in ("fc1", "fc2")]
    assert {module.omega for module in made.values()} == {layer_omega(32), layer_omega(128)}, "each by its own width"
    assert not any(module.training for module in made.values())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in biases.items())
    counts = parameter_counts(model)
    assert counts.before == before
    assert counts.now == sum(parameter.numel() for parameter in model.parameters()) < before
    assert str(counts).startswith(f"{before:,} -> {counts.now:,} parameters")
    model.train()(**images()).sum().backward()
    assert all(module.U.grad.abs().sum() > 0 for module in made.values())


def test_factorize_by_pattern_and_all() -> None:
    model = factorize(vit(), rank=2, targets=r"blocks\.0\.(attn|mlp)\..*", activation="none")
    made = {name for name, module in model.named_modules() if type(module) is LowRankLinear}
    assert made == {f"blocks.0.{end}" for end in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    everything = factorize(vit(), rank=2)
    assert not any(type(module) is nn.Linear for module in everything.modules())
    compiled = torch.compile(vit(), backend="eager")
    assert parameter_counts(factorize(compiled, rank=2, targets=["fc1"])).now < parameter_counts(vit()).now


@every_dtype
def test_factorized_layers_keep_the_type(dtype: torch.dtype) -> None:
    model = factorize(nn.Sequential(nn.Linear(16, 8)).to(dtype), rank=2, targets=["0"])
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(torch.randn(3, 16, dtype=dtype)).dtype == dtype


def test_targets_that_match_nothing_are_named_with_what_is_close() -> None:
    with pytest.raises(InvalidArgumentError, match=r"match no torch.nn.Linear. Close names: mlp.fc1"):
        factorize(vit(), rank=2, targets=["mpl.fc1"])
    with pytest.raises(InvalidArgumentError, match="There are: qkv, proj, fc1, fc2, head"):
        factorize(vit(), rank=2, targets=["zzzzz"])
    with pytest.raises(InvalidArgumentError, match="not a regular expression"):
        factorize(vit(), rank=2, targets="mlp.(fc1")
    with pytest.raises(InvalidArgumentError, match="expected ends of names"):
        factorize(vit(), rank=2, targets=[])
    with pytest.raises(InvalidArgumentError, match="activation='cosine'"):
        factorize(vit(), rank=2, activation="cosine")  # type: ignore[arg-type]


def test_tied_and_foreign_weights_are_refused() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(20, 8), "head": nn.Linear(8, 20, bias=False)})
    model["head"].weight = model["embedding"].weight
    with pytest.raises(UnsuitableModelError, match="tied"):
        factorize(model, rank=2, targets=["head"])
    nn.utils.parametrizations.weight_norm(model["head"])
    with pytest.raises(InvalidArgumentError, match="match no"):
        factorize(model, rank=2, targets=["head"])
    assert isinstance(model["head"], nn.Linear)


def test_nothing_is_replaced_if_one_layer_is_too_small() -> None:
    model = vit()
    with pytest.raises(InvalidArgumentError, match="rank=8 for head"):
        factorize(model, rank=8, targets="all-linear")
    assert not any(isinstance(module, LowRankLinear) for module in model.modules())


def test_recipe_remembers_omegas_as_numbers(tmp_path: Path) -> None:
    model = factorize(vit(), rank=4, targets=["fc1", "fc2"])
    entries = wp.recipe(model)
    assert [entry["change"] for entry in entries] == ["factorize", "factorize"]
    assert [entry["omega"] for entry in entries] == [layer_omega(32), layer_omega(128)]
    counts = parameter_counts(model)
    assert sum(entry["parameters_saved"] for entry in entries) == counts.before - counts.now
    assert json.loads(json.dumps(entries)) == entries
    fresh = vit()
    replay(fresh, entries)
    assert wp.recipe(fresh) == entries
    assert fresh.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("activation", ["sine", "none"])
def test_saved_and_loaded(tmp_path: Path, activation: Any) -> None:
    model = factorize(vit(), rank=4, targets=["fc1"], omega=50.0, gain=3.0, activation=activation).eval()
    wp.cut_skips(model, mlp=False)
    loaded = wp.load(wp.save(model, tmp_path))
    assert wp.recipe(loaded) == wp.recipe(model)
    assert torch.equal(loaded(**images()), model(**images()))
    with pytest.raises(RecipeMismatchError, match="factorize"):
        wp.load(tmp_path, wp.cut_skips(vit(), mlp=False))


@pytest.mark.parametrize(
    "change",
    [{"targets": ["blocks.9.mlp.fc1"]}, {"rank": 10**9}, {"omega": -1.0}, {"activation": "tan"}, {"surprise": 1}],
    ids=str,
)
def test_recipe_entries_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    entry = wp.recipe(factorize(vit(), rank=4, targets=["fc1"]))[0] | change
    with pytest.raises(ModelFileError, match="recipe entry"):
        replay(vit(), [entry])


def test_copies_and_checkpoints() -> None:
    layer = SineLinear(16, 16, rank=2, omega=7.0, gain=3.0)
    x = torch.randn(4, 16)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    again = SineLinear(16, 16, rank=2, omega=7.0, gain=3.0)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


def test_names() -> None:
    assert is_target("fc1", ["fc1"])
    assert not is_target("xfc1", ["fc1"])
    assert is_target("a.b", "all-linear")
    assert close_names(["q_porj"], ["layers.0.q_proj", "layers.1.q_proj"]) == ["q_proj"]
    assert close_names("zzz", ["layers.0.q_proj"]) == []
