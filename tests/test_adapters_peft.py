"""Sine adapters on transformers' models and with what stands around PEFT: files, quantizers, FSDP, other adapters."""

import json
import subprocess
import sys
from importlib.metadata import version
from math import sqrt
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn

from small_adapters import IDS, adapted, gpt2, llama, logits
from wellposed.adapters import SineLoraConfig, to_lora
from wellposed.adapters.layers import SineLayer, SineLoraLinear
from wellposed.errors import InvalidArgumentError, ModelFileError, UnsuitableModelError, WellposedError

# PEFT 0.20 looks for the configuration of a base model that was not loaded from anywhere.
pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file in")


@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (llama, ["q_proj", "v_proj", "up_proj", "down_proj"]),
        (llama, "all-linear"),
        (llama, r".*\.layers\.1\..*_proj"),
        (llama, None),
        (gpt2, ["c_attn", "c_fc", "wte"]),
        (gpt2, None),
    ],
)
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`", "ignore:Input and output embeddings are no")
def test_language_models(make: Any, targets: Any, use_dora: bool, tmp_path: Path) -> None:
    base, model = make(), adapted(make(), target_modules=targets, use_dora=use_dora, task_type="CAUSAL_LM")
    assert (logits(model) - logits(base)).abs().max() > 1e-4
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make(), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-5)
    assert type(merged) is type(base)
    assert merged.state_dict().keys() == base.state_dict().keys()
    same = model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(same, merged.generate(input_ids=IDS, max_new_tokens=3, do_sample=False))


@pytest.mark.parametrize("use_dora", [False, True])
def test_gradient_checkpointing_changes_nothing(use_dora: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = adapted(llama(), target_modules=["q_proj", "down_proj"], use_dora=use_dora).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0
        assert torch.equal(gradients[1][name], gradient)


def test_transformers_own_way_of_adding_adapters(tmp_path: Path) -> None:
    model = llama()
    model.add_adapter(SineLoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    assert any(isinstance(module, SineLayer) for module in model.modules())
    assert (logits(model) - logits(llama())).abs().max() > 1e-4
    injected = peft.inject_adapter_in_model(SineLoraConfig(r=2, target_modules=["q_proj"]), llama())
    assert torch.equal(logits(injected), logits(llama()))
    status = peft.get_model_status(adapted(llama(), target_modules=["q_proj"]))
    assert status.peft_types == {"default": "WELLPOSED_SINE_LORA"}


def test_omega_is_resolved_for_each_layer_and_saved(tmp_path: Path) -> None:
    config = SineLoraConfig(r=4, target_modules=["q_proj", "down_proj"], omega_pattern={r"layers\.1\.mlp\..*": 77.0})
    model = peft.get_peft_model(llama(), config)
    omegas = {name: module.omega["default"] for name, module in model.named_modules() if isinstance(module, SineLayer)}
    omegas = {name.removeprefix("base_model.model.model.layers."): omega for name, omega in omegas.items()}
    assert omegas["0.self_attn.q_proj"] == pytest.approx(sqrt(3 * 32) / (0.01 * 2))
    assert omegas["0.mlp.down_proj"] == pytest.approx(sqrt(3 * 64) / (0.01 * 2)), "by its own width"
    assert omegas["1.mlp.down_proj"] == 77.0
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["omega"] == "auto"
    assert len(saved["omega_pattern"]) == 5
    saved["omega_pattern"]["model.layers.0.self_attn.q_proj"] = 123.0
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path)
    assert loaded.base_model.model.model.layers[0].self_attn.q_proj.omega["default"] == 123.0, (
        "the file's, not a rule's"
    )


def test_one_configuration_for_two_models() -> None:
    config = SineLoraConfig(r=4, target_modules=["q_proj"])
    for width in (32, 64):
        model = peft.get_peft_model(llama(width=width), config)
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        assert layer.omega["default"] == pytest.approx(sqrt(3 * width) / (0.01 * 2))
        config.base_model_name_or_path = None


def test_rank_pattern_and_gaussian() -> None:
    model = adapted(llama(), target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 2})
    layer = model.base_model.model.model.layers[0].self_attn
    assert layer.v_proj.omega["default"] == pytest.approx(layer.q_proj.omega["default"] * sqrt(2))
    model = peft.get_peft_model(llama(), SineLoraConfig(r=8, target_modules=["q_proj"], init_lora_weights="gaussian"))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight.detach(), 0.01 * torch.randn(32, 8)
    assert float((layer.omega["default"] * b @ a).std()) == pytest.approx(1, rel=0.3)


def test_loading_without_the_registration_is_loud(tmp_path: Path) -> None:
    adapted(llama(), target_modules=["q_proj"]).save_pretrained(tmp_path)
    code = f"import peft, torch; peft.PeftModel.from_pretrained(torch.nn.Linear(1, 1), {str(tmp_path)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert result.stderr.strip().endswith("KeyError: 'WELLPOSED_SINE_LORA'")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"omega": 0}, "omega=0: expected a number above 0, or 'auto'"),
        ({"omega": -1.0}, "omega=-1.0"),
        ({"omega": float("inf")}, "above 0"),
        ({"omega": "large"}, "omega='large'"),
        ({"omega_pattern": {"q_proj": 0.0}}, r"omega_pattern\['q_proj'\]=0.0"),
        ({"omega_pattern": [3.0]}, "expected a dict"),
        ({"gain": 0.0}, "gain=0.0: expected a number above 0, or None"),
        ({"gain": -2}, "gain=-2"),
        ({"init_lora_weights": "pissa"}, "expected True, False or 'gaussian'"),
        ({"lora_bias": True}, "cannot have lora_bias: the update is a matrix"),
        ({"target_parameters": ["weight"]}, "cannot have target_parameters"),
        ({"use_qalora": True}, "cannot have use_qalora"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        SineLoraConfig(**({"target_modules": ["q_proj"]} | settings))


def test_targets_that_match_nothing_are_named_with_what_is_close() -> None:
    with pytest.raises(InvalidArgumentError, match=r"not found in the base model.*Close names: q_proj") as caught:
        adapted(llama(), target_modules=["q_porj"])
    assert isinstance(caught.value, WellposedError)
    with pytest.raises(ValueError, match="There are: embed_tokens, q_proj, k_proj"):
        adapted(llama(), target_modules=["zzz"])
    with pytest.raises(
        InvalidArgumentError, match=r"LlamaRMSNorm: target_modules of a sine adapter are torch.nn.Linear"
    ):
        adapted(llama(), target_modules=["norm"])
    with pytest.raises(InvalidArgumentError, match="Conv2d"):
        adapted(nn.ModuleDict({"conv": nn.Conv2d(3, 3, 1)}), target_modules=["conv"])
    with pytest.warns(UserWarning, match=r"omega_pattern has keys that match no adapted layer: \['q_porj'\].*q_proj"):
        adapted(llama(), target_modules=["q_proj"], omega_pattern={"q_porj": 5.0})


def test_ranks() -> None:
    with pytest.warns(UserWarning, match="r=20 for 0, a 16 x 32 matrix, which has no rank above its smaller side"):
        adapted(nn.Sequential(nn.Linear(32, 16)), target_modules=["0"], r=20)
    with pytest.raises(ValueError, match="positive"):
        adapted(nn.Sequential(nn.Linear(32, 16)), target_modules=["0"], r=0)


def test_weighted_sums_are_refused_with_a_reason() -> None:
    model = adapted(llama(), target_modules=["q_proj"])
    model.add_adapter("other", SineLoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(UnsuitableModelError, match="not the sine of a matrix of low rank"):
        model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "sum")


def test_other_kinds_of_adapters_on_the_same_layer_are_refused() -> None:
    model = adapted(llama(), target_modules=["q_proj"])
    with pytest.raises(ValueError, match="different peft types"):
        model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"]))
    with (
        pytest.warns(UserWarning, match="Already found a `peft_config`"),
        pytest.raises(UnsuitableModelError, match="the layer has sine adapters, and 'second' is a LoraConfig"),
    ):
        peft.inject_adapter_in_model(
            peft.LoraConfig(target_modules=["q_proj"]), model.base_model.model, adapter_name="second"
        )
    lora = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    with (
        pytest.warns(UserWarning, match="Already found a `peft_config`"),
        pytest.raises(UnsuitableModelError, match="has a LoRA adapter of PEFT's"),
    ):
        peft.inject_adapter_in_model(
            SineLoraConfig(target_modules=["q_proj"]), lora.base_model.model, adapter_name="sine"
        )
    split = nn.Linear(8, 8)
    split._hf_tp_plan, split._hf_device_mesh = "colwise", None  # type: ignore[assignment]
    with pytest.raises(UnsuitableModelError, match="tensor parallelism"):
        adapted(nn.Sequential(split), target_modules=["0"])


def test_adapters_of_another_base_are_refused(tmp_path: Path) -> None:
    adapted(llama(layers=3), target_modules=["q_proj"]).save_pretrained(tmp_path)
    with (
        pytest.warns(UserWarning, match="omega_pattern has keys that match no adapted layer"),
        pytest.raises(ModelFileError, match=r"does not have: model.layers.2.self_attn.q_proj.*trained on another base"),
    ):
        peft.PeftModel.from_pretrained(llama(layers=2), tmp_path)
    with pytest.warns(UserWarning, match="Found missing adapter keys"):
        peft.PeftModel.from_pretrained(llama(layers=4), tmp_path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft.PeftModel.from_pretrained(llama(layers=3, width=64), tmp_path)
    with pytest.raises(InvalidArgumentError, match="not found in the base model"):
        peft.PeftModel.from_pretrained(gpt2(), tmp_path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    adapted(llama(), target_modules=["q_proj"]).save_pretrained(tmp_path)
    weights, settings = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    whole, text = weights.read_bytes(), settings.read_text()
    for damaged in (whole[: len(whole) // 2], b"", b"\xff" * len(whole)):
        weights.write_bytes(damaged)
        with pytest.raises(SafetensorError):
            peft.PeftModel.from_pretrained(llama(), tmp_path)
    weights.write_bytes(whole)
    settings.write_text(text[: len(text) // 2])
    with pytest.raises(json.JSONDecodeError):
        peft.PeftModel.from_pretrained(llama(), tmp_path)
    settings.write_text(json.dumps(json.loads(text) | {"omega_pattern": {"q_proj": -5}}))
    with pytest.raises(InvalidArgumentError, match="omega_pattern"):
        peft.PeftModel.from_pretrained(llama(), tmp_path)


def test_unsafe_weights_are_not_merged() -> None:
    model = adapted(llama(), target_modules=["q_proj"])
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    before = layer.get_base_layer().weight.clone()
    layer.lora_B["default"].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"NaNs detected in the merged weights\. The adapter default"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(layer.get_base_layer().weight, before)
    assert not layer.merged


def test_trained_biases_travel_or_are_refused(tmp_path: Path) -> None:
    settings = {"target_modules": ["c_attn"], "bias": "lora_only"}
    if tuple(map(int, version("peft").split(".")[:2])) < (0, 21):
        with pytest.raises(InvalidArgumentError, match="would train the biases but not save them"):
            adapted(gpt2(), **settings)
        return
    model = adapted(gpt2(), **settings)
    bias = model.base_model.model.transformer.h[0].attn.c_attn.get_base_layer().bias
    assert bias.requires_grad
    bias.data.fill_(0.3)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(gpt2(), tmp_path)), logits(model))


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_tied_adapters_share_omega_and_gain() -> None:
    model = adapted(
        llama(tie_word_embeddings=True), target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True
    )
    embedding, head = model.base_model.model.model.embed_tokens, model.base_model.model.lm_head
    assert (head.omega, head.gain) == (embedding.omega, embedding.gain)
    torch.testing.assert_close(head.delta("default"), embedding.delta("default").T)


def test_tied_adapters_under_longer_names_share_omega_too() -> None:
    settings = {"vocab_size": 50, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1}
    base = transformers.T5ForConditionalGeneration(transformers.T5Config(**settings))
    model = adapted(base, target_modules=["embed_tokens"], ensure_weight_tying=True, omega_pattern={"shared": 7.0})
    layers = [layer for layer in model.modules() if isinstance(layer, SineLayer)]
    assert len(layers) == 4
    assert {layer.omega["default"] for layer in layers} == {7.0}


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens"], "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
    ids=["sine", "dora", "saved"],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_export_of_tied_adapters(settings: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(llama(tie_word_embeddings=True), ensure_weight_tying=True, **settings)
    plain = peft.PeftModel.from_pretrained(llama(tie_word_embeddings=True), to_lora(model, r=60).save(tmp_path)).eval()
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "targets"), [(llama, ["q_proj", "embed_tokens"]), (gpt2, ["c_attn"])], ids=["llama", "gpt2"]
)
@pytest.mark.parametrize("use_dora", [False, True])
def test_export_to_lora(make: Any, targets: list[str], use_dora: bool, tmp_path: Path) -> None:
    settings = {"target_modules": targets, "use_dora": use_dora, "modules_to_save": ["ln_f", "norm"]}
    model = adapted(make(), **settings)
    export = to_lora(model, r=2)
    for name, error in export.errors.items():
        layer: Any = model.base_model.model.get_submodule(name)
        values = torch.linalg.svdvals(layer.change("default").double())
        assert error == pytest.approx(float((values[2:].square().sum() / values.square().sum()).sqrt()), abs=1e-4)
    assert export.error == pytest.approx(sum(export.errors.values()) / len(export.errors))
    assert "LoRA of rank 2" in str(export)
    whole = to_lora(model, r=60)
    assert whole.error < 1e-5
    plain = peft.PeftModel.from_pretrained(make(), whole.save(tmp_path)).eval()
    assert type(plain.peft_config["default"]) is peft.LoraConfig
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=1e-4)


def test_export_needs_a_sine_adapter_and_a_rank() -> None:
    model = adapted(llama(), target_modules=["q_proj"])
    for r in (0, -1, 2.0, True):
        with pytest.raises(InvalidArgumentError, match="whole number above 0"):
            to_lora(model, r=r)
    with pytest.raises(InvalidArgumentError, match="no sine adapter 'b'; it has default"):
        to_lora(model, r=2, adapter_name="b")
    with pytest.raises(InvalidArgumentError, match="it has none"):
        to_lora(llama(), r=2)


def test_pefts_own_conversion_agrees() -> None:
    from peft.tuners.lora import conversion

    model = adapted(llama(), target_modules=["q_proj"])
    _, state = conversion.convert_to_lora(model, rank=3)
    ours = to_lora(model, r=3)
    for name in ours.errors:
        theirs = state[f"base_model.model.{name}.lora_B.weight"] @ state[f"base_model.model.{name}.lora_A.weight"]
        a, b = (ours.state_dict[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
        torch.testing.assert_close(b @ a, theirs, rtol=1e-3, atol=1e-6)
    with pytest.raises(TypeError, match="do not support LoRA conversion"):
        conversion.convert_to_lora(adapted(llama(), target_modules=["q_proj"], use_dora=True), rank=3)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("each_factor", [False, True], ids=["by block", "each factor"])
def test_fully_sharded(use_dora: bool, each_factor: bool, process_group: None) -> None:
    """FSDP2 has a block's weights there while the block runs, or a factor's while the factor is called."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    settings = {"target_modules": ["q_proj", "down_proj"], "use_dora": use_dora}
    plain, model = adapted(llama(), **settings), adapted(llama(), **settings)
    mesh = init_device_mesh("cpu", (1,))
    for name, module in model.named_modules():
        if each_factor and name.endswith(("lora_A.default", "lora_B.default")):
            fully_shard(module, mesh=mesh)
    for block in model.base_model.model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(input_ids=IDS, labels=IDS).loss.backward()
    plain(input_ids=IDS, labels=IDS).loss.backward()
    sharded = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(sharded[name], parameter.grad)


def test_offloaded_layers_are_called() -> None:
    """accelerate brings an offloaded layer's weights in when it is called, and not otherwise."""
    from accelerate import cpu_offload

    model = adapted(llama(), target_modules=["q_proj"])
    expected = logits(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    torch.testing.assert_close(logits(model), expected)


def test_base_layers_with_hooks_are_called() -> None:
    model = adapted(nn.Sequential(nn.Linear(8, 8)), target_modules=["0"])
    x, seen = torch.randn(2, 8), []
    expected = model(x)
    model.base_model.model[0].base_layer.register_forward_hook(lambda *given: seen.append(given))
    torch.testing.assert_close(model(x), expected)
    assert len(seen) == 1


class Fp8Linear(nn.Linear):
    """A layer that stores its weight in a way only it knows."""

    def __init__(self) -> None:
        super().__init__(8, 8, bias=False)
        self.weight = nn.Parameter((4 * self.weight.detach()).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.float() / 4).T


def test_unknown_quantization_trains_but_does_not_merge() -> None:
    model = adapted(nn.Sequential(Fp8Linear()), target_modules=["0"])
    x = torch.randn(3, 8)
    layer: Any = model.base_model.model[0]
    expected = layer.base_layer(x) + x @ layer.delta("default").T
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()
    with pytest.raises(UnsuitableModelError, match="float8_e4m3fn, and how to read that is not known"):
        model.merge_adapter()
    with pytest.raises(UnsuitableModelError, match="without DoRA and unmerged"):
        adapted(nn.Sequential(Fp8Linear()), target_modules=["0"], use_dora=True)


def check_quantized(model: Any, base_weight: Tensor, tolerance: float, of_merged: float) -> None:
    """`model` adapts one linear layer whose weight, dequantized, is `base_weight`."""
    layer: Any = model.base_model.model[0]
    assert isinstance(layer, SineLoraLinear)
    x = torch.randn(5, layer.in_features, dtype=base_weight.dtype)
    expected = x.float() @ (base_weight.float() + layer.change("default")).T
    torch.testing.assert_close(model(x).detach().float(), expected, rtol=0, atol=tolerance)
    model(x).float().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)
    before = model(x).detach()
    model.merge_adapter()
    torch.testing.assert_close(model(x).detach().float(), expected, rtol=0, atol=of_merged)
    model.unmerge_adapter()
    assert torch.equal(model(x).detach(), before), "the quantized weight is as it was"


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_torchao(use_dora: bool) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    base = nn.Sequential(nn.Linear(64, 32, bias=False))
    quantize_(base, Int8WeightOnlyConfig())
    model = adapted(base, target_modules=["0"], use_dora=use_dora)
    layer: Any = model.base_model.model[0]
    with pytest.raises(UnsuitableModelError, match="TorchAoConfig"):
        model.merge_adapter()
    layer.kwargs["get_apply_tensor_subclass"] = Int8WeightOnlyConfig
    check_quantized(model, layer.get_base_layer().weight.dequantize(), 2e-2, 5e-2)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes(kind: str, use_dora: bool) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    settings = {"has_fp16_weights": False} if kind == "Linear8bitLt" else {"compute_dtype": torch.float32}
    plain = nn.Linear(64, 32, bias=False)
    quantized = getattr(bitsandbytes.nn, kind)(64, 32, bias=False, **settings)
    quantized.load_state_dict(plain.state_dict())
    model = adapted(nn.Sequential(quantized.to("cpu")), target_modules=["0"], use_dora=use_dora)
    weight = quantized(torch.eye(64)).detach().T.float()
    assert (weight - plain.weight).abs().max() < 0.05
    check_quantized(model, weight, 5e-2, 1.0 if kind == "Linear4bit" else 0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use_dora", [False, True])
def test_on_a_gpu(dtype: torch.dtype, use_dora: bool) -> None:
    base = nn.Sequential(nn.Linear(1024, 768)).to("cuda", dtype)
    model = adapted(base, target_modules=["0"], use_dora=use_dora, r=8)
    layer: Any = model.base_model.model[0]
    x = torch.randn(64, 1024, device="cuda", dtype=dtype)
    weight = layer.get_base_layer().weight.double() + layer.change("default").double()
    expected = x.double() @ weight.T + layer.get_base_layer().bias.double()
    tolerance = {torch.float32: 5e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(model(x).double(), expected, rtol=0, atol=tolerance)
    model(x).float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    model.merge_adapter()
    torch.testing.assert_close(model(x).double(), expected, rtol=0, atol=tolerance)
