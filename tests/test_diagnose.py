"""A diagnosis against what can be computed by hand, for every family."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.diagnosis import Diagnosis
from wellposed.diagnosis.report import STAGES
from wellposed.errors import InvalidArgumentError, UnsuitableModelError
from wellposed.spectrum import attention_jacobian
from zoo import ATTENTIVE, IMAGE, ZOO, Specimen, convmixer, gpt2, images, llama, tokens, vit

IMAGES = images()["x"]
NO_CLASS: dict[str, Any] = {"class_token": False, "global_pool": "avg"}


def unpadded(specimen: Specimen) -> dict[str, Tensor]:
    return {name: value for name, value in specimen.inputs().items() if name != "attention_mask"}


def spectrum(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix.double())


def condition(matrix: Tensor) -> float:
    values = spectrum(matrix)
    return float(values[0] / values[-1])


@pytest.fixture(params=ZOO)
def specimen(request: pytest.FixtureRequest) -> Specimen:
    return ZOO[request.param]


def test_tokens_at_every_stage(specimen: Specimen) -> None:
    """Cutting the skips leaves what attention and MLP give alone; with them, sums stand after both."""
    torch.manual_seed(0)
    model = specimen.make().eval()
    report = wp.diagnose(model, unpadded(specimen))
    assert [block.name for block in report.blocks] == [specimen.names.format(i) for i in range(2)]
    assert all(block.cut == () for block in report.blocks)
    of_vit, of_convmixer = (
        {*STAGES} - {"convolution"},
        {"input", "attention input", "convolution", "attention", "output"},
    )
    expected = of_vit if specimen.skips == ("attention", "mlp") else of_convmixer
    assert all(set(block.tokens) == expected for block in report.blocks)
    cut = wp.diagnose(wp.cut_skips(model), unpadded(specimen))
    for block in cut.blocks:
        assert block.cut == specimen.skips
        if "mlp" in block.tokens and specimen.family != "HuggingFace BERT":  # whose norms come after
            assert block.tokens["after attention"] == block.tokens["attention"]
            assert block.tokens["output"] == block.tokens["mlp"]
        assert not any("Prop. 4.2" in p.source for p in block.predictions)  # which is about the skip
    assert cut.blocks[0].tokens["attention"] == report.blocks[0].tokens["attention"]
    assert cut.blocks[0].tokens["output"] != report.blocks[0].tokens["output"]


@torch.no_grad()
def test_numbers_of_tokens_by_hand() -> None:
    torch.manual_seed(0)
    model = vit(depth=1).eval()
    block: Any = model.blocks[0]
    found = wp.diagnose(model, IMAGES).blocks[0].tokens
    x = model._pos_embed(model.patch_embed(IMAGES))
    seen = block.norm1(x)
    branch = block.attn(seen)
    after = x + branch
    mlp = block.mlp(block.norm2(after))
    by_hand = {"input": x, "attention input": seen, "attention": branch, "after attention": after, "mlp": mlp}
    for stage, value in {**by_hand, "output": after + mlp}.items():
        conditions = sorted(condition(one) for one in value)
        assert [found[stage].condition.low, found[stage].condition.high] == pytest.approx(conditions, rel=1e-3)
        ranks = sorted(float((s / s[0]).square().sum()) for s in map(spectrum, value))
        assert [found[stage].stable_rank.low, found[stage].stable_rank.high] == pytest.approx(ranks, rel=1e-3)


@pytest.mark.parametrize("name", ATTENTIVE)
@torch.no_grad()
def test_attention_of_every_family(name: str) -> None:
    """Rows that add up to 1 within the bounds, equal to transformers' own where it returns them."""
    specimen = ATTENTIVE[name]
    torch.manual_seed(0)
    model: Any = specimen.make().eval()
    inputs = unpadded(specimen)
    report = wp.diagnose(model, inputs)
    expected = None
    if hasattr(model, "set_attn_implementation"):
        assert model.config._attn_implementation == "sdpa"  # put back
        model.set_attn_implementation("eager")
        expected = model(**inputs, output_attentions=True).attentions
    for i, block in enumerate(report.blocks):
        seen = block.attention
        assert seen is not None
        assert 0 < seen.diagonal < 1
        assert 0 < seen.entropy <= 1 + 1e-6
        assert 1 - 1e-6 <= seen.frobenius <= seen.frobenius_bound == math.sqrt(report.input_shape[1])
        assert seen.is_causal == (name in {"gpt2", "llama"})
        if expected is not None:
            a = expected[i]
            assert seen.diagonal == pytest.approx(float(a.diagonal(dim1=-2, dim2=-1).mean()), rel=1e-4)
            assert seen.frobenius == pytest.approx(float(torch.linalg.matrix_norm(a).mean()), rel=1e-4)
            n, first = a.shape[-1], int(seen.is_causal)  # where a row has but one token to look at
            rows = -(a * a.clamp(min=1e-30).log()).sum(-1)[..., first:]
            largest = torch.arange(2, n + 1).log() if seen.is_causal else torch.tensor(math.log(n))
            assert seen.entropy == pytest.approx(float((rows / largest).mean()), abs=2e-3)
            visible = torch.ones(n, n, dtype=torch.bool).tril() | (not seen.is_causal)
            ranges = [row[seen_].log() for m in a.flatten(0, 1) for row, seen_ in zip(m, visible, strict=True)]
            assert seen.logit_range == pytest.approx(
                float(torch.stack([r.max() - r.min() for r in ranges]).median()), rel=1e-3
            )
            if seen.is_causal:  # the others are singular up to rounding
                conditions = sorted(condition(m) for m in a.flatten(0, 1))
                assert seen.condition.high == pytest.approx(conditions[round(0.9 * 7)], rel=1e-3)


def test_attention_that_is_uniform_and_attention_that_is_the_identity() -> None:
    model: Any = vit(depth=1, num_heads=1, qkv_bias=False).eval()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[:64] = 0
    seen = wp.diagnose(model, IMAGES).blocks[0].attention
    assert seen is not None
    assert seen.entropy == pytest.approx(1)
    assert seen.frobenius == pytest.approx(1)
    assert seen.diagonal == pytest.approx(1 / 17)
    assert seen.logit_range == pytest.approx(0, abs=1e-5)
    assert seen.condition.median == math.inf
    with torch.no_grad():  # x x^T is largest on the diagonal, all rows being of one norm
        model.blocks[0].attn.qkv.weight[:64] = 2 * torch.eye(32).repeat(2, 1)
    seen = wp.diagnose(model, IMAGES).blocks[0].attention
    assert seen is not None
    assert seen.diagonal > 0.95
    assert seen.condition.low == pytest.approx(1, abs=0.5)
    assert seen.diagonal_margin > 5
    assert seen.logit_range > seen.diagonal_margin


@pytest.mark.parametrize("name", ATTENTIVE)
def test_weight_products(name: str) -> None:
    specimen = ATTENTIVE[name]
    assert specimen.linears is not None
    torch.manual_seed(0)
    model: Any = specimen.make().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Module) and getattr(module, "bias", None) is not None:
                module.bias.zero_()
    report = wp.diagnose(model, unpadded(specimen))
    block = model.get_submodule(specimen.names.format(0))
    maps = {key: value.detach() for key, value in specimen.linears(block, torch.eye(32)).items()}
    shared = maps["q"].shape[1] // maps["k"].shape[1]
    q, k, v = (maps[key].view(32, -1, 8) for key in "qkv")
    o = maps["o"].view(-1, 8, 32)
    found = report.blocks[0].weights
    assert found is not None
    whole_qk, whole_vo = torch.zeros(32, 32), torch.zeros(32, 32)
    for head in range(4):
        query_key = q[:, head] @ k[:, head // shared].T
        value_output = v[:, head // shared] @ o[head]
        whole_qk, whole_vo = whole_qk + query_key, whole_vo + value_output
        for matrix, measured in ((query_key, found.query_key_heads), (value_output, found.value_output_heads)):
            values = spectrum(matrix)
            assert measured[head] == pytest.approx(float(values[0] / values[7]), rel=1e-3)
    rank = 32 // shared
    for matrix, number in ((whole_qk, found.query_key), (whole_vo, found.value_output)):
        values = spectrum(matrix)
        assert number == pytest.approx(float(values[0] / values[rank - 1]), rel=1e-2)
    assert found.factors == pytest.approx([condition(maps[key]) for key in "qkv"], rel=1e-3)


def test_a_conditioned_model_is_seen_to_be_one() -> None:
    torch.manual_seed(0)
    default, conditioned = (wp.cut_skips(vit(depth=4, embed_dim=64)) for _ in range(2))
    wp.condition_(conditioned)
    before, after = (wp.diagnose(model.eval(), IMAGES) for model in (default, conditioned))
    assert all(block.weights is not None and block.weights.value_output < 1.01 for block in after.blocks)
    assert after.blocks[0].tokens["output"].cosine < 0.9 < before.blocks[0].tokens["output"].cosine
    assert before.findings[0].startswith("Unhealthy")
    assert "wp.condition_" in before.findings[0]
    assert any("W_V W_O has a condition number below" in sentence for sentence in after.findings)


def test_jacobians_and_the_predictions_about_them() -> None:
    """One head, no biases: K, B and E of the closed form."""
    torch.manual_seed(0)
    model: Any = vit(depth=1, num_heads=1, embed_dim=12, img_size=16, qkv_bias=False, **NO_CLASS).double().eval()
    wp.condition_(model)
    block = wp.diagnose(model, IMAGES[:, :, :16, :16].double(), jacobians=True).blocks[0]
    attn = model.blocks[0].attn
    x = model.blocks[0].norm1(model._pos_embed(model.patch_embed(IMAGES[:1, :, :16, :16].double())))[0].detach()
    q, k, v = (w.T[None] for w in attn.qkv.weight.detach().chunk(3))
    closed = attention_jacobian(x, q, k, v, attn.proj.weight.detach().T[None])
    values = torch.linalg.svdvals(closed.whole)
    found = block.jacobians["attention"]
    assert found.is_exact
    torch.testing.assert_close(found.largest, values[:2])
    torch.testing.assert_close(found.smallest[0], values[-1])
    b, e = torch.linalg.svdvals(closed.through_values), torch.linalg.svdvals(closed.through_weights)
    told = {(p.source.split(", ")[1], p.quantity): p for p in block.predictions}
    kappa = told["Prop. 2", "condition number of K"]
    assert kappa.predicted == pytest.approx(float(b[0] / b[-1]))
    assert kappa.measured == pytest.approx(float(values[0] / values[-1]))
    lemma = told["Lemma 1", "condition number of K"]
    expected = float((b[0] + e[0]) / (b[-1] - e[0])) if b[-1] > e[0] else math.inf
    assert lemma.predicted == pytest.approx(expected)
    assert lemma.predicted >= lemma.measured
    of_b = told["Prop. 2", "condition number of B, that of A for one head"]
    assert "mlp" in block.jacobians
    assert of_b.measured == pytest.approx(float(b[0] / b[-1]))


@pytest.mark.parametrize("name", ZOO)
def test_jacobians_of_every_family_against_autograd(name: str) -> None:
    """The largest singular value of what attention gives with respect to what it sees."""
    specimen = ZOO[name]
    torch.manual_seed(0)
    model: Any = specimen.make().double().eval()
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in unpadded(specimen).items()}
    first = {key: value[:1] for key, value in inputs.items()}
    report = wp.diagnose(model, inputs, jacobians=True)
    block = model.get_submodule(specimen.names.format(0))
    calls: dict[str, Tensor] = {}
    seen, given = (report_family_stage(model, specimen, stage) for stage in ("attention input", "attention"))

    def perturbed(x: Tensor) -> Tensor:
        def enter(layer: nn.Module, arguments: Any, options: Any) -> Any:
            if arguments:
                return (x, *arguments[1:]), options
            return (), {**options, next(iter(options)): x}

        def leave(layer: nn.Module, arguments: Any, output: Any) -> None:
            calls["output"] = output[0] if isinstance(output, tuple) else output

        hooks = [
            block.get_submodule(seen).register_forward_pre_hook(enter, with_kwargs=True),
            block.get_submodule(given).register_forward_hook(leave),
        ]
        model(**first)
        for hook in hooks:
            hook.remove()
        return calls["output"]

    def record(layer: nn.Module, arguments: Any, options: Any) -> None:
        calls["input"] = arguments[0] if arguments else next(iter(options.values()))

    hook = block.get_submodule(seen).register_forward_pre_hook(record, with_kwargs=True)
    model(**first)
    hook.remove()
    x = calls["input"].detach()
    jacobian = torch.autograd.functional.jacobian(perturbed, x).reshape(-1, x.numel())
    largest = report.blocks[0].jacobians["attention"].largest[0]
    torch.testing.assert_close(largest, torch.linalg.svdvals(jacobian)[0], rtol=1e-5, atol=0)


def report_family_stage(model: nn.Module, specimen: Specimen, stage: str) -> str:
    from wellposed.families import blocks

    return blocks(model)[0].family.stages[stage][0]


def test_uniform_attention_of_a_causal_model() -> None:
    model: Any = gpt2().eval()
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight[:, :64] = 0
            block.attn.c_attn.bias[:64] = 0
    report = wp.diagnose(model, tokens()["input_ids"])
    for block in report.blocks:
        assert block.attention is not None
        assert block.attention.entropy == pytest.approx(1)
        assert block.attention.logit_range == pytest.approx(0, abs=1e-5)
    assert any(sentence.startswith("To watch: attention is nearly uniform") for sentence in report.findings)


def test_predictions_of_softmax() -> None:
    """Proposition 1: a narrow range of logits, and a diagonal with a margin in some rows."""
    torch.manual_seed(0)
    model: Any = vit(depth=1, num_heads=1, qkv_bias=False).eval()
    told = {p.quantity: p for p in wp.diagnose(model, IMAGES).blocks[0].predictions if "Prop. 1" in p.source}
    narrow = told["condition number of A"]
    seen = wp.diagnose(model, IMAGES).blocks[0].attention
    assert seen is not None
    assert narrow.predicted == pytest.approx(1 / seen.logit_range)
    assert narrow.measured == seen.condition.median > narrow.predicted
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[:64] = torch.eye(32).repeat(2, 1)
    x = model.blocks[0].norm1(model._pos_embed(model.patch_embed(IMAGES))).detach()
    logits = x @ x.mT / 32**0.5
    others = logits.masked_fill(torch.eye(17, dtype=torch.bool), -torch.inf).amax(-1)
    margins = logits.diagonal(dim1=-2, dim2=-1) - others
    block = wp.diagnose(model, IMAGES).blocks[0]
    told = {p.quantity: p for p in block.predictions if "Prop. 1" in p.source}
    assert "condition number of A" not in told
    bound = told["attention to other tokens"]
    assert bound.predicted == pytest.approx(float((16 * torch.exp(-margins)).clamp(max=1).mean()), rel=1e-3)
    assert bound.measured == pytest.approx(1 - float(logits.softmax(-1).diagonal(dim1=-2, dim2=-1).mean()), rel=1e-3)
    assert bound.measured <= bound.predicted


@torch.no_grad()
def test_predictions_of_linear_attention() -> None:
    torch.manual_seed(0)
    model: Any = vit().eval()
    report = wp.diagnose(model, IMAGES[:1])
    x = model.blocks[0].norm1(model._pos_embed(model.patch_embed(IMAGES[:1])))[0]
    values = spectrum(x)
    for block in report.blocks:
        told = {p.source.split(", ")[1]: p for p in block.predictions}
        assert block.weights is not None
        cube = block.tokens["attention input"].condition.median ** 3
        assert told["Prop. 4.1"].predicted == pytest.approx(math.prod(block.weights.factors) * cube)
        assert told["Prop. 4.1"].measured == block.tokens["attention"].condition.median
        assert told["Prop. 4.2"].measured == block.tokens["after attention"].condition.median
        if block is report.blocks[0]:
            most = math.prod(block.weights.factors) * values[0] ** 3 + values[0]
            assert told["Prop. 4.2"].predicted == pytest.approx(float(most / (values[-1] ** 3 + values[-1])), rel=1e-2)


def test_a_convolution_is_predicted_by_its_fourier_transform() -> None:
    torch.manual_seed(0)
    report = wp.diagnose(convmixer().eval(), IMAGES)
    assert all(block.attention is None and block.weights is None for block in report.blocks)
    sources = [p.source.split(", ")[1] for block in report.blocks for p in block.predictions]
    assert sources == ["Eq. 24", "Eq. 24"]
    model: Any = convmixer().eval()
    report = wp.diagnose(model, IMAGES[:1])
    x = model.stem(IMAGES[:1]).detach()
    convolution = model.blocks[0][0].fn[0]
    kernels = convolution.weight.detach()
    ratios = []
    for kernel in kernels:  # the matrix of the convolution of one channel, with borders that wrap
        padded = torch.nn.functional.pad(torch.eye(64).view(64, 1, 8, 8), (1, 1, 1, 1), mode="circular")
        ratios.append(spectrum(torch.nn.functional.conv2d(padded, kernel[None]).flatten(1)))
    every = torch.stack(ratios)
    told = report.blocks[0].predictions[0]
    expected = float(every.max() / every.min()) * condition(x[0].flatten(1))
    assert told.predicted == pytest.approx(expected, rel=1e-3)
    assert told.measured == pytest.approx(condition(convolution(x).detach()[0].flatten(1)), rel=1e-3)
    assert report.notes == ()


def test_the_model_is_left_as_it_was() -> None:
    model = vit(drop_rate=0.5).train()
    model.blocks[0].eval()
    report = wp.diagnose(model, IMAGES, jacobians=True)
    assert any("training mode" in note for note in report.notes)
    assert model.training
    assert not model.blocks[0].training
    assert model.blocks[1].training
    assert all(param.grad is None for param in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    again = wp.diagnose(model.eval(), IMAGES)
    assert again.blocks[0].tokens == report.blocks[0].tokens  # without dropout
    assert again.notes == ()


def test_text_json_and_picture(tmp_path: Any) -> None:
    report = wp.diagnose(wp.cut_skips(vit()).eval(), IMAGES)
    assert isinstance(report, Diagnosis)
    text = str(report)
    assert "VisionTransformer: 2 blocks, 2 inputs of 17 tokens, 32 wide" in text
    assert "blocks.1" in text
    assert all(sentence in text for sentence in report.findings)
    read = json.loads(report.to_json(), parse_constant=pytest.fail)
    assert read["blocks"][0]["tokens"]["output"]["cosine"] == report.blocks[0].tokens["output"].cosine
    assert read["blocks"][0]["cut"] == ["attention", "mlp"]
    assert read["findings"] == report.findings
    report.plot(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG"


def test_infinity_in_json() -> None:
    model: Any = vit(**NO_CLASS).eval()
    with torch.no_grad():
        model.pos_embed.zero_()
    report = wp.diagnose(model, torch.ones(IMAGE))
    assert report.blocks[0].tokens["output"].condition.median == math.inf
    assert '"Infinity"' in report.to_json()
    assert "do their tokens differ at all?" in report.findings[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = vit().eval()
    exact = wp.diagnose(model, IMAGES)
    half = wp.diagnose(model.to(dtype), IMAGES.to(dtype))
    for block, other in zip(exact.blocks, half.blocks, strict=True):
        assert block.attention is not None
        assert other.attention is not None
        assert other.attention.diagonal == pytest.approx(block.attention.diagonal, rel=2e-2)
        assert other.tokens["mlp"].condition.median == pytest.approx(block.tokens["mlp"].condition.median, rel=0.2)


def test_grouped_query_and_wrapped_models() -> None:
    ids = tokens()["input_ids"]
    report = wp.diagnose(torch.compile(llama(num_key_value_heads=1).eval()), ids)
    assert report.model == "LlamaForCausalLM"
    assert report.blocks[0].weights is not None
    assert len(report.blocks[0].weights.query_key_heads) == 4


def test_a_block_that_runs_twice_or_not_at_all() -> None:
    twice: Any = vit().eval()
    twice.blocks[1] = twice.blocks[0]
    with pytest.raises(UnsuitableModelError, match=r"blocks.0 ran twice"):
        wp.diagnose(twice, IMAGES)
    never: Any = vit().eval()
    never.blocks.forward = never.blocks[0].forward
    with pytest.raises(UnsuitableModelError, match=r"did not run"):
        wp.diagnose(never, IMAGES)
    assert not any(module._forward_hooks for module in never.modules())


def test_large_jacobians_are_told_as_bounds_and_repeat() -> None:
    torch.manual_seed(0)
    model = vit(depth=1, embed_dim=64, patch_size=2).eval()
    first, second = (wp.diagnose(model, IMAGES, jacobians=True) for _ in range(2))
    found = first.blocks[0].jacobians["attention"]
    assert not found.is_exact
    assert torch.equal(found.nodes, second.blocks[0].jacobians["attention"].nodes)
    quantities = {p.quantity for p in first.blocks[0].predictions}
    assert "condition number of K, both no more than lower bounds" in quantities
    assert not any("Lemma 1" in p.source for p in first.blocks[0].predictions)


def test_one_token_and_images_in_another_type() -> None:
    model = vit(img_size=8, **NO_CLASS).eval()
    report = wp.diagnose(model, IMAGES[:, :, :8, :8])
    assert report.findings[0].startswith("There is one token only")
    assert not any("uniform" in sentence for sentence in report.findings)
    same = wp.diagnose(vit().double().eval(), IMAGES)  # float32 images
    assert same.input_shape == (2, 17, 32)


def test_blocks_that_differ_share_a_table() -> None:
    model: Any = vit().eval()
    with torch.no_grad():
        report = wp.diagnose(model, IMAGES)
    bare = replace(report.blocks[0], weights=None, attention=None)
    columns, rows = replace(report, blocks=(report.blocks[0], bare)).table(spreads=True)
    assert len(rows[0]) == len(rows[1]) == len(columns)
    assert rows[1][columns.index("cond. W_V W_O")] == ""
    assert " to " in rows[0][columns.index("cond. output")]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.randn(0, 3, 32, 32), "at least one input"),
        (torch.full(IMAGE, torch.nan), "NaN or Inf"),
        ({"input_ids": [1, 2]}, "as a tensor"),
        (tokens(), "attention_mask leaves tokens out"),
        (torch.zeros(IMAGE, dtype=torch.uint8), "expected floating-point images"),
        ([1, 2], "expected a tensor, or a mapping"),
        (torch.randn(2, 3, 48, 48), "the model cannot take inputs"),
    ],
)
def test_refused_inputs(inputs: Any, message: str) -> None:
    model = gpt2() if isinstance(inputs, dict) else vit()
    with pytest.raises(InvalidArgumentError, match=message):
        wp.diagnose(model.eval(), inputs)


def test_broken_weights_are_named() -> None:
    model: Any = vit().eval()
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight[0, 0] = torch.nan
    with pytest.raises(InvalidArgumentError, match=r"blocks.1 \(mlp\) hold NaN or Inf"):
        wp.diagnose(model, IMAGES)


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    model = wp.condition_(wp.cut_skips(vit(depth=3, embed_dim=64))).eval()
    here = wp.diagnose(model, IMAGES)
    there = wp.diagnose(model.cuda(), IMAGES)
    for block, other in zip(here.blocks, there.blocks, strict=True):
        for stage, found in block.tokens.items():
            assert other.tokens[stage].condition.median == pytest.approx(found.condition.median, rel=1e-2)
            assert other.tokens[stage].stable_rank.median == pytest.approx(found.stable_rank.median, rel=1e-2)
        assert block.weights is not None
        assert other.weights is not None
        assert other.weights.query_key_heads == pytest.approx(block.weights.query_key_heads, rel=1e-2)
        assert other.weights.factors == pytest.approx(block.weights.factors, rel=1e-2)
