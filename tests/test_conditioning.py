"""The conditioned initialization, on every family, read back through the layers themselves."""

import math
import re
from typing import Any

import peft
import pytest
import scipy.linalg
import timm
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import wellposed as wp
from wellposed.errors import InvalidArgumentError, UnknownFamilyError, UnsuitableModelError, WellposedError
from zoo import ATTENTIVE, Specimen, block_calls, convmixer, gpt2, images, llama, vit

every_family = pytest.mark.parametrize("specimen", ATTENTIVE.values(), ids=ATTENTIVE.keys())
in_each_dtype = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
ALPHA, BETA, C, D, H = 1.7, 0.9, 2.5, 32, 8


def linears(specimen: Specimen, model: nn.Module, index: int = 0) -> dict[str, Tensor]:
    """The linear maps of one block, in float64, from what its layers do to the identity."""
    assert specimen.linears is not None
    block = model.get_submodule(specimen.names.format(index)).float()
    with torch.no_grad():
        return {name: w.double() for name, w in specimen.linears(block, torch.eye(D)).items()}


def conditioned(specimen: Specimen, dtype: torch.dtype = torch.float32, **arguments: Any) -> nn.Module:
    settings = {"alpha": ALPHA, "beta": BETA, "c": C, "generator": torch.Generator().manual_seed(7)}
    model = specimen.make()
    assert wp.condition_(model, **(settings | arguments)) is model
    return model.to(dtype)


@every_family
@in_each_dtype
def test_query_key_products_are_truncated_svds_of_m(specimen: Specimen, dtype: torch.dtype, tolerance: float) -> None:
    maps = linears(specimen, conditioned(specimen, dtype))
    key_heads = maps["k"].shape[1] // H
    group = maps["q"].shape[1] // H // key_heads
    z = torch.randn(key_heads, D, D, generator=torch.Generator().manual_seed(7)).double() / math.sqrt(D)
    for j, w_q in enumerate(maps["q"].split(H, dim=1)):
        w_k = maps["k"].split(H, dim=1)[j // group]
        u, s, vt = scipy.linalg.svd((ALPHA * z[j // group] + BETA * torch.eye(D)).numpy())
        expected = torch.from_numpy((u[:, :H] * s[:H]) @ vt[:H])
        assert (w_q @ w_k.T - expected).norm() <= tolerance * expected.norm()
        assert (w_k @ w_q.T - expected).norm() > 0.5 * expected.norm(), "a transposed product would be told apart"


@every_family
@in_each_dtype
def test_value_output_product_is_orthogonal(specimen: Specimen, dtype: torch.dtype, tolerance: float) -> None:
    maps = linears(specimen, conditioned(specimen, dtype))
    for name in ("v", "o"):
        values = torch.linalg.svdvals(maps[name])
        torch.testing.assert_close(values, torch.full_like(values, C), rtol=tolerance, atol=0)
    if maps["v"].shape == maps["o"].shape:  # not with grouped-query attention
        values = torch.linalg.svdvals(maps["v"] @ maps["o"])
        torch.testing.assert_close(values, torch.full_like(values, C**2), rtol=2 * tolerance, atol=0)
        assert values[0] / values[-1] <= 1 + 4 * tolerance


@every_family
@in_each_dtype
@pytest.mark.parametrize("scale_mlp", [True, False])
def test_mlp_singular_values(specimen: Specimen, dtype: torch.dtype, tolerance: float, scale_mlp: bool) -> None:
    maps = linears(specimen, conditioned(specimen, dtype, scale_mlp=scale_mlp))
    mlp = [w for name, w in maps.items() if name.startswith("mlp")]
    assert len(mlp) in {2, 3}
    for w in mlp:
        fan_in, fan_out = w.shape
        expected = max(math.sqrt(fan_out / fan_in), 1.0) if scale_mlp else 1.0
        values = torch.linalg.svdvals(w)
        torch.testing.assert_close(values, torch.full_like(values, expected), rtol=tolerance, atol=0)


def test_fc1_is_2_and_fc2_is_1_for_a_vit() -> None:
    model: Any = wp.condition_(vit())
    for block in model.blocks:
        torch.testing.assert_close(torch.linalg.svdvals(block.mlp.fc1.weight), torch.full((32,), 2.0))
        torch.testing.assert_close(torch.linalg.svdvals(block.mlp.fc2.weight), torch.ones(32))


@every_family
def test_vectors_are_reset_and_the_rest_is_left(specimen: Specimen) -> None:
    model = specimen.make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wp.condition_(model)
    inside = tuple(specimen.names.format(i) + "." for i in range(2))
    for name, parameter in model.named_parameters():
        if not name.startswith(inside):
            assert torch.equal(parameter, before[name]), name
        elif parameter.ndim == 1:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
        else:
            assert not torch.equal(parameter, before[name]), name


def test_layer_scale_is_set_to_one() -> None:
    model: Any = wp.condition_(vit(init_values=1e-5))
    assert all((block.ls1.gamma == 1).all() and (block.ls2.gamma == 1).all() for block in model.blocks)


def test_blocks_differ_from_each_other() -> None:
    first, second = wp.condition_(vit()).blocks
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert ours.ndim == 1 or not torch.equal(ours, theirs)


def test_same_generator_same_weights() -> None:
    one, two, three = (
        wp.condition_(vit(), generator=torch.Generator().manual_seed(seed)).blocks.state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["0.attn.qkv.weight"], three["0.attn.qkv.weight"])
    torch.manual_seed(3)
    default = wp.condition_(vit()).blocks[0].attn.qkv.weight
    assert not torch.equal(default, one["0.attn.qkv.weight"])


def test_grouped_queries_share_their_keys_factor() -> None:
    attention: Any = wp.condition_(llama()).model.layers[0].self_attn
    heads = attention.q_proj.weight.split(8)
    assert torch.equal(heads[0], heads[1])
    assert torch.equal(heads[2], heads[3])
    assert not torch.equal(heads[0], heads[2])


def test_heads_are_decomposed_in_batches_to_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = wp.condition_(llama(), generator=torch.Generator().manual_seed(1)).state_dict()
    monkeypatch.setattr("wellposed.skipless.conditioning._BATCH_ENTRIES", 32**2)
    parts = wp.condition_(llama(), generator=torch.Generator().manual_seed(1)).state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(whole[name], parts[name])


@pytest.mark.parametrize("mlp_layer", ["SwiGLUPacked", "SwiGLU"])
def test_gated_mlps_of_timm(mlp_layer: str) -> None:
    model: Any = wp.condition_(vit(mlp_layer=getattr(timm.layers, mlp_layer), depth=1))
    mlp = model.blocks[0].mlp
    first = mlp.fc1.weight.chunk(2) if mlp_layer == "SwiGLUPacked" else (mlp.fc1_g.weight, mlp.fc1_x.weight)
    for weight in (*first, mlp.fc2.weight):
        expected = max(math.sqrt(weight.shape[0] / weight.shape[1]), 1.0)
        torch.testing.assert_close(torch.linalg.svdvals(weight), torch.full((32,), expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_model_in_another_dtype(dtype: torch.dtype) -> None:
    model: Any = wp.condition_(vit().to(dtype), generator=torch.Generator().manual_seed(2))
    reference: Any = wp.condition_(vit(), generator=torch.Generator().manual_seed(2))
    weight = model.blocks[1].attn.qkv.weight
    assert weight.dtype == dtype
    expected = reference.blocks[1].attn.qkv.weight
    torch.testing.assert_close(weight.float(), expected.to(dtype).float(), rtol=1e-2, atol=1e-3)


# --- what the initialization is for


@pytest.mark.parametrize(
    ("d", "heads", "alpha", "beta", "diagonal"), [(768, 12, 2.0, 0.6, 0.8), (384, 6, 1.8, 1.0, 0.98)], ids=["B", "S"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_starts_near_the_identity(
    d: int, heads: int, alpha: float, beta: float, diagonal: float, dtype: torch.dtype
) -> None:
    """Mean diagonal attention on 197 random LayerNormed tokens, as the method page measured it; 1/n by default."""
    model: Any = timm.create_model("vit_tiny_patch16_224", embed_dim=d, num_heads=heads, depth=1)
    tokens = nn.functional.layer_norm(torch.randn(4, 197, d), (d,))
    assert _mean_diagonal(model, tokens) == pytest.approx(1 / 197, rel=0.5)
    wp.condition_(model, alpha=alpha, beta=beta)
    assert _mean_diagonal(model.to(dtype), tokens.to(dtype)) == pytest.approx(diagonal, abs=0.03)


def _mean_diagonal(model: Any, tokens: Tensor) -> float:
    attention = model.blocks[0].attn
    with torch.no_grad():
        q, k, _ = attention.qkv(tokens).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT * attention.scale).float().softmax(-1)
    return weights.diagonal(dim1=-2, dim2=-1).mean().item()


@every_family
def test_a_skipless_model_keeps_tokens_apart(specimen: Specimen) -> None:
    """Without skips the default initialization loses what distinguishes tokens; conditioned, more of it is left."""

    def spread(model: nn.Module) -> float:
        output = block_calls(specimen, wp.cut_skips(model).eval())[-1][-1]
        return (output - output.mean(dim=1, keepdim=True)).norm().item() / output.norm().item()

    default, ours = specimen.make(), wp.condition_(specimen.make())
    assert spread(ours) > 1.3 * spread(default)


# --- what cannot be conditioned


@pytest.mark.parametrize(
    "arguments",
    [
        {"alpha": 0},
        {"alpha": -1.0},
        {"alpha": math.nan},
        {"alpha": math.inf},
        {"beta": -0.1},
        {"beta": math.nan},
        {"c": 0},
        {"c": -3},
        {"c": "3"},
        {"c": 1e39},
        {"alpha": 1e200},
        {"alpha": 1e-170},
        {"generator": 0},
    ],
    ids=str,
)
def test_numbers_out_of_range(arguments: dict[str, Any]) -> None:
    name, value = next(iter(arguments.items()))
    model = vit()
    _assert_refused(model, InvalidArgumentError, re.escape(f"{name}={value!r}"), **arguments)


def test_beta_zero_is_allowed() -> None:
    wp.condition_(vit(), beta=0)


def test_convmixer_is_refused_with_a_reason() -> None:
    _assert_refused(convmixer(), UnsuitableModelError, "no attention")


def test_meta_device() -> None:
    with torch.device("meta"):
        model = vit()
    with pytest.raises(UnsuitableModelError, match="to_empty"):
        wp.condition_(model)


def test_quantized_weights() -> None:
    model: Any = vit()
    qkv = model.blocks[1].attn.qkv
    qkv.weight = nn.Parameter(torch.zeros(96, 32, dtype=torch.int8), requires_grad=False)
    _assert_refused(model, UnsuitableModelError, "torch.int8.*before it is quantized")

    class PackedLinear(nn.Module):  # as GPTQ and AWQ keep their weights
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("qweight", torch.zeros(8, 8, dtype=torch.int32))

    qkv.weight = nn.Parameter(torch.zeros(96, 32).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UnsuitableModelError, match="float8"):
        wp.condition_(model)
    model.blocks[1].attn.qkv = PackedLinear()
    with pytest.raises(UnsuitableModelError, match="PackedLinear"):
        wp.condition_(model)


def test_parametrized_weights() -> None:
    model: Any = vit()
    parametrizations.weight_norm(model.blocks[1].mlp.fc1)
    _assert_refused(model, UnsuitableModelError, "parametrized")


@pytest.mark.parametrize("target", ["qkv", "fc1"])
def test_adapted_weights(target: str) -> None:
    adapted = peft.get_peft_model(vit(), peft.LoraConfig(r=2, target_modules=[target]))
    _assert_refused(adapted, UnsuitableModelError, f"{target}.lora_A.*before adapters")


def test_other_attention_layers_are_refused() -> None:
    _assert_refused(vit(attn_layer="diff"), UnsuitableModelError, "DiffAttention")


def test_heads_wider_than_the_model() -> None:
    _assert_refused(llama(head_dim=64), UnsuitableModelError, "wider than the model")


def test_unknown_family() -> None:
    _assert_refused(timm.create_model("resnet18"), UnknownFamilyError, "ResNet")
    _assert_refused(gpt2(add_cross_attention=True), UnknownFamilyError, "cross-attention")


def _assert_refused(model: nn.Module, error: type[WellposedError], match: str, **arguments: Any) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=match):
        wp.condition_(model, **arguments)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not wp.recipe(model)


# --- on a GPU


@pytest.mark.gpu
def test_on_a_gpu_with_either_generator() -> None:
    cpu: Any = wp.condition_(vit(), generator=torch.Generator().manual_seed(1))
    moved: Any = wp.condition_(vit().cuda(), generator=torch.Generator().manual_seed(1))
    assert all(parameter.is_cuda for parameter in moved.parameters())
    q, k, _ = cpu.blocks[0].attn.qkv.weight.chunk(3)
    q_gpu, k_gpu, _ = moved.blocks[0].attn.qkv.weight.cpu().chunk(3)
    torch.testing.assert_close(q_gpu[:8].T @ k_gpu[:8], q[:8].T @ k[:8], rtol=1e-4, atol=1e-4)
    wp.condition_(vit().cuda(), generator=torch.Generator("cuda").manual_seed(1))
    assert wp.cut_skips(moved)(images()["x"].cuda()).isfinite().all()
