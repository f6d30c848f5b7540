"""Sine adapters in PEFT: every operation x layer type x dtype x (sine, sine with DoRA, rank-stabilized)."""

import copy
import json
from math import sqrt
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from wellposed.adapters import SineLoraConfig, SineLoraEmbedding, SineLoraLinear

LAYERS = ("embedding", "conv1d", "linear")
KINDS: dict[str, dict[str, Any]] = {"sine": {}, "dora": {"use_dora": True}, "rslora": {"use_rslora": True}}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
IDS = torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(1))

every_layer = pytest.mark.parametrize("layer", LAYERS)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


class Net(nn.Module):
    """One layer of each type that can be adapted."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        self.conv1d = Conv1D(16, 12)
        self.linear = nn.Linear(16, 10)
        self.head = nn.Linear(10, 4)
        nn.init.normal_(self.conv1d.weight, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.gelu(self.linear(F.gelu(self.conv1d(self.embedding(ids))))))


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def config(layer: str | list[str] = "linear", kind: str = "sine", **arguments: Any) -> SineLoraConfig:
    targets = [layer] if isinstance(layer, str) else layer
    return SineLoraConfig(**({"r": 3, "lora_alpha": 6, "target_modules": targets} | KINDS[kind] | arguments))


def adapted(
    layer: str | list[str] = "linear", kind: str = "sine", dtype: torch.dtype = torch.float32, **arguments: Any
) -> peft.PeftModel:
    """A small model with an adapter that does something: its B, or an embedding's A, is not 0."""
    model = peft.get_peft_model(net(dtype), config(layer, kind, **arguments))
    randomize(model)
    return model.eval()


def randomize(model: nn.Module, adapter: str = "default", seed: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if (".lora_B." in name or ".lora_embedding_A." in name) and adapter in name.split("."):
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
        if ".lora_magnitude." in name and adapter in name.split("."):
            parameter.data.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=generator))


def tuned(model: nn.Module, layer: str) -> Any:
    return model.get_submodule(f"base_model.model.{layer}")


def formula(model: nn.Module, layer: str, adapter: str = "default", base: Tensor | None = None) -> Tensor:
    """The adapted weight in float64, (out, in), from the method page and the saved parameters alone."""
    module, settings = tuned(model, layer), model.peft_config[adapter]  # type: ignore[union-attr]
    transposed = layer != "linear"
    weight = module.get_base_layer().weight.double() if base is None else base.double()
    weight = weight.T if transposed else weight
    if layer == "embedding":
        a, b = module.lora_embedding_A[adapter].double(), module.lora_embedding_B[adapter].double()
    else:
        a, b = module.lora_A[adapter].weight.double(), module.lora_B[adapter].weight.double()
    gain = settings.gain or sqrt(weight.shape[1])
    scale = settings.lora_alpha / (sqrt(settings.r) if settings.use_rslora else settings.r) / gain
    v = weight + scale * torch.sin(settings.omega_pattern[layer] * (b @ a))
    if settings.use_dora:
        v = module.lora_magnitude[adapter].double()[:, None] * v / v.norm(dim=1, keepdim=True)
    return v.T if transposed else v


def by_hand(model: nn.Module, weights: dict[str, Tensor]) -> Tensor:
    """The output of the net in float64 with some of its weights replaced."""
    own = {name.replace(".base_layer", ""): value.double() for name, value in model.state_dict().items()}
    own = {name.removeprefix("base_model.model."): value for name, value in own.items()}
    own |= {f"{name}.weight": weight for name, weight in weights.items()}
    plain = Net().double()
    plain.load_state_dict({name: own[name] for name in plain.state_dict()})
    return plain(IDS)


def close(ours: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(ours.double(), expected.double(), rtol=TOLERANCE[dtype] / 2, atol=TOLERANCE[dtype])


@every_dtype
@every_kind
@every_layer
def test_is_the_base_model_at_the_start(layer: str, kind: str, dtype: torch.dtype) -> None:
    base = net(dtype).eval()
    model = peft.get_peft_model(net(dtype), config(layer, kind)).eval()
    if kind == "dora" or dtype != torch.float32:
        close(model(IDS), base(IDS), dtype)
    else:
        assert torch.equal(model(IDS), base(IDS))
    assert model(IDS).dtype == dtype


@every_dtype
@every_kind
@every_layer
def test_is_its_formula(layer: str, kind: str, dtype: torch.dtype) -> None:
    model = adapted(layer, kind, dtype)
    expected = by_hand(model, {layer: formula(model, layer)})
    close(model(IDS), expected, dtype)
    difference = float((model(IDS) - net(dtype).eval()(IDS)).detach().abs().max())
    assert difference > TOLERANCE[dtype], "the adapter does something"


@every_dtype
@every_kind
@every_layer
@pytest.mark.parametrize("safe", [False, True])
def test_merged_equals_unmerged(layer: str, kind: str, dtype: torch.dtype, safe: bool) -> None:
    model = adapted(layer, kind, dtype)
    before, weight = model(IDS), copy.deepcopy(tuned(model, layer).get_base_layer().weight)
    expected = formula(model, layer)
    model.merge_adapter(safe_merge=safe)
    close(model(IDS), before, dtype)
    merged = tuned(model, layer).get_base_layer().weight
    assert torch.equal(merged, expected.to(dtype)) or (merged - expected).abs().max() <= max(
        2e-6, 2 * torch.finfo(dtype).eps
    )
    model.unmerge_adapter()
    assert torch.equal(tuned(model, layer).get_base_layer().weight, weight), "bit by bit"
    assert torch.equal(model(IDS), before)
    with pytest.warns(UserWarning, match="Already unmerged"):
        model.unmerge_adapter()
    plain = model.merge_and_unload(safe_merge=safe)
    assert type(plain) is Net
    assert [type(module) for module in plain.modules()] == [type(module) for module in net().modules()]
    close(plain(IDS), before, dtype)


@every_dtype
@every_kind
@every_layer
def test_saved_and_loaded(layer: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = adapted(layer, kind, dtype)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(net(dtype), tmp_path).eval()
    assert torch.equal(loaded(IDS), model(IDS))
    assert isinstance(tuned(loaded, layer), SineLoraEmbedding if layer == "embedding" else SineLoraLinear)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["peft_type"] == "WELLPOSED_SINE_LORA"
    assert saved["omega_pattern"] == {layer: tuned(model, layer).omega["default"]}
    empty = peft.PeftModel.from_pretrained(net(dtype), tmp_path, low_cpu_mem_usage=True).eval()
    assert torch.equal(empty(IDS), model(IDS))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    trainable = peft.PeftModel.from_pretrained(net(dtype), tmp_path, is_trainable=True)
    names = {name for name, parameter in trainable.named_parameters() if parameter.requires_grad}
    assert len(names) == (3 if kind == "dora" else 2)


@every_dtype
@every_kind
@every_layer
def test_gradients_are_those_of_the_formula(layer: str, kind: str, dtype: torch.dtype) -> None:
    """DoRA's norm is a constant for the gradient."""
    model = adapted(layer, kind, dtype).train()
    model(IDS).float().square().sum().backward()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.dtype == torch.float32 for p in parameters.values())

    module, settings = tuned(model, layer), model.peft_config["default"]
    leaves = {name.split(".lora_")[1].split(".")[0]: p.detach().double() for name, p in parameters.items()}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    a, b = (leaves[f"embedding_{letter}" if layer == "embedding" else letter] for letter in "AB")
    weight = module.get_base_layer().weight.detach().double()
    weight = weight if layer == "linear" else weight.T
    v = weight + module.scale("default") * torch.sin(settings.omega_pattern[layer] * (b @ a))
    if settings.use_dora:
        v = leaves["magnitude"][:, None] * v / v.detach().norm(dim=1, keepdim=True)
    own = {name.replace(".base_layer", ""): value.double() for name, value in model.state_dict().items()}
    own = {name.removeprefix("base_model.model."): value for name, value in own.items()}
    own[f"{layer}.weight"] = v if layer == "linear" else v.T
    plain = Net().double()
    torch.func.functional_call(plain, {name: own[name] for name in plain.state_dict()}, IDS).square().sum().backward()
    for name, parameter in parameters.items():
        reference = leaves[name.split(".lora_")[1].split(".")[0]].grad
        assert reference.abs().max() > 0
        error = (parameter.grad.double() - reference).norm() / reference.norm()
        assert error < {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype], name


@every_dtype
@every_kind
@every_layer
def test_disabled_and_switched(layer: str, kind: str, dtype: torch.dtype) -> None:
    base, model = net(dtype).eval(), adapted(layer, kind, dtype)
    with_adapter = model(IDS)
    with model.disable_adapter():
        assert torch.equal(model(IDS), base(IDS))
    assert torch.equal(model(IDS), with_adapter)
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(model(IDS), base(IDS))
    assert torch.equal(model.unload()(IDS), base(IDS))


@every_dtype
@every_kind
@every_layer
def test_several_adapters_with_their_own_settings(layer: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = adapted(layer, kind, dtype, gain=2.0)
    other = "dora" if kind != "dora" else "sine"
    model.add_adapter("other", config(layer, other, r=2, lora_alpha=3, omega=40.0))
    randomize(model, "other", seed=5)
    model.eval()
    module = tuned(model, layer)
    assert module.gain == {"default": 2.0, "other": sqrt(module.in_features)}
    assert module.omega["other"] == 40.0 != module.omega["default"]
    outputs = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        outputs[name] = model(IDS)
        close(outputs[name], by_hand(model, {layer: formula(model, layer, name)}), dtype)
    base = net(dtype).eval()(IDS)
    assert not torch.allclose(outputs["default"], outputs["other"])

    weight = module.get_base_layer().weight.double()
    both = formula(model, layer) + formula(model, layer, "other") - weight
    model.base_model.set_adapter(["default", "other"])
    together = model(IDS)
    close(together, by_hand(model, {layer: both}), dtype)
    model.merge_adapter(["default"])
    with pytest.warns(UserWarning, match="additionally merging other"):
        model.merge_adapter(["other"])
    close(model(IDS), together, dtype)
    model.unmerge_adapter()
    assert torch.equal(module.get_base_layer().weight.double(), weight)

    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(net(dtype), tmp_path)
    loaded.load_adapter(tmp_path / "other", adapter_name="other")
    loaded.eval().set_adapter("other")
    assert torch.equal(loaded(IDS), outputs["other"])
    model.delete_adapter("other")
    assert "other" not in module.omega.keys() | module.gain.keys() | set(module.lora_magnitude)
    model.set_adapter("default")
    assert torch.equal(model(IDS), outputs["default"])
    with model.disable_adapter():
        assert torch.equal(model(IDS), base)


@every_dtype
def test_active_adapters_of_other_layers_change_nothing(dtype: torch.dtype) -> None:
    """Also in the last bit: the layer's own one is still added to W0 before the product."""
    model = adapted("linear", dtype=dtype)
    expected = model(IDS)
    model.add_adapter("other", config("conv1d"))
    model.base_model.set_adapter(["default", "other"])
    assert torch.equal(model(IDS), expected), "B is 0 in the other"
    randomize(model, "other")
    assert not torch.equal(model(IDS), expected)


@every_dtype
@every_layer
def test_each_input_with_an_adapter_of_its_own(layer: str, dtype: torch.dtype) -> None:
    model = adapted(layer, dtype=dtype)
    model.add_adapter("other", config(layer, r=2, omega=40.0))
    randomize(model, "other", seed=5)
    model.eval()
    mixed = model(IDS, adapter_names=["other", "__base__", "default"])
    close(mixed[1], net(dtype).eval()(IDS)[1], dtype)
    close(mixed[2], model(IDS)[2], dtype)
    model.set_adapter("other")
    close(mixed[0], model(IDS)[0], dtype)


@every_dtype
@every_layer
@pytest.mark.parametrize("cast", [True, False])
def test_types_of_the_adapter(layer: str, cast: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """float32, or that of the base model if PEFT is told not to cast; what is loaded is what was saved."""
    model = peft.get_peft_model(net(dtype), config(layer, "dora"), autocast_adapter_dtype=cast).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(net(dtype), tmp_path, autocast_adapter_dtype=cast).eval()
    expected = torch.float32 if cast else dtype
    for each in (model, loaded):
        assert {p.dtype for name, p in each.named_parameters() if ".lora_" in name} == {expected}
    assert torch.equal(loaded(IDS), model(IDS))


@every_kind
@every_layer
def test_dropout_is_honoured(layer: str, kind: str) -> None:
    """In training each output is random with the right mean; in evaluation it is the formula's."""
    model = adapted(layer, kind, lora_dropout=0.5)
    close(model(IDS), by_hand(model, {layer: formula(model, layer)}))
    module = tuned(model, layer)
    x = torch.tensor([3, 5]) if layer == "embedding" else torch.randn(2, module.in_features)
    with torch.no_grad():
        expected, base = module(x), module.base_layer(x)
        model.train()
        assert not torch.equal(module(x), module(x))
        many = torch.stack([module(x) for _ in range(1200)])
    spread = many.std(0) / sqrt(len(many))
    assert ((many.mean(0) - expected).abs() <= 5 * spread + 1e-5).all()
    assert (expected - base).abs().max() > 10 * spread.median(), "so that a missing dropout would be seen"


def test_dropout_zeroes_inputs_of_the_update_alone() -> None:
    model = adapted("linear", lora_dropout=0.999).train()
    module = tuned(model, "linear")
    x = torch.randn(1, 16)
    assert torch.equal(module(x), module.base_layer(x)), "all inputs dropped: the base layer is left"


@every_dtype
@pytest.mark.parametrize("kind", ["sine", "dora"])
def test_small_updates_survive_half_precision(kind: str, dtype: torch.dtype) -> None:
    """W0 of +-1 with an update of 7.8e-5 in each entry, far below the last bit, where all of x adds up to 0."""
    base = nn.Linear(64, 4, bias=False)
    base.weight.data = torch.tensor([1.0, -1.0]).repeat(4, 32)
    settings = config("0", kind, r=1, lora_alpha=1, omega=1.0)
    model = peft.get_peft_model(nn.Sequential(base.to(dtype)), settings).eval()
    module = tuned(model, "0")
    module.lora_A["default"].weight.data.fill_(1.0)
    module.lora_B["default"].weight.data.fill_(0.000625)
    update = torch.sin(torch.tensor(0.000625)) / 8
    assert torch.equal((base.weight + update).to(dtype), base.weight) or dtype == torch.float32
    expected = 64 * update / (torch.sqrt(1 + update**2) if kind == "dora" else 1)
    output = model(torch.ones(3, 64, dtype=dtype)).detach().float()
    torch.testing.assert_close(output, expected.expand(3, 4), rtol=0.01, atol=0)


@pytest.mark.parametrize("kind", ["sine", "dora"])
@every_layer
def test_for_small_arguments_it_is_pefts_lora(layer: str, kind: str) -> None:
    """sin(z) = z for small z: LoRA, and DoRA, with alpha omega / g."""
    model = adapted(layer, kind, omega=1e-3)
    module = tuned(model, layer)
    alpha = 6 * 1e-3 / module.gain["default"] * 50
    module.scaling["default"] *= 50
    lora = peft.get_peft_model(
        net(),
        peft.LoraConfig(
            r=3, lora_alpha=alpha, target_modules=[layer], use_dora=kind == "dora", fan_in_fan_out=layer == "conv1d"
        ),
    ).eval()
    state = {}
    for name, value in model.state_dict().items():
        state[name.replace("lora_magnitude.default", "lora_magnitude_vector.default.weight")] = value
    assert not lora.load_state_dict(state, strict=False).unexpected_keys
    torch.testing.assert_close(model(IDS), lora(IDS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_and_only_moves_the_adapter(kind: str) -> None:
    model = peft.get_peft_model(net(), config(list(LAYERS), kind, modules_to_save=["head"], lora_dropout=0.1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    labels = IDS % 4
    losses = []
    for _ in range(150):
        loss = F.cross_entropy(model(IDS).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert all(".lora_" in name or ".modules_to_save." in name for name in moved)
    assert len(moved) == 2 * 3 + 2 + (3 if kind == "dora" else 0)


def test_modules_to_save_travel(tmp_path: Path) -> None:
    model = adapted("linear", modules_to_save=["head"])
    model.base_model.model.head.modules_to_save["default"].bias.data.fill_(3.0)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(net(), tmp_path).eval()
    assert torch.equal(loaded(IDS), model(IDS))
    assert float(loaded.merge_and_unload().head.bias.mean()) == 3.0


@every_layer
@pytest.mark.parametrize("kind", ["sine", "dora"])
def test_compiles_in_one_graph(layer: str, kind: str) -> None:
    model = adapted(layer, kind, lora_dropout=0.0)
    expected = model(IDS)
    expected.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    compiled = torch.compile(model.base_model.model, backend="aot_eager", fullgraph=True)
    output = compiled(IDS)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, gradients[name])


@every_layer
@pytest.mark.parametrize("kind", ["sine", "dora"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(layer: str, kind: str, dtype: torch.dtype) -> None:
    model = adapted(layer, kind)
    with torch.autocast("cpu", dtype=dtype):
        output = model(IDS)
        model.merge_adapter()
        merged = model(IDS)
    assert output.dtype == dtype
    close(output, by_hand(model, {}), dtype)
    close(merged, output, dtype)


def test_copies_and_scales() -> None:
    model = adapted(list(LAYERS))
    assert torch.equal(copy.deepcopy(model)(IDS), model(IDS))
    module = tuned(model, "linear")
    module.set_scale("default", 0.0)
    assert float(module.delta("default").detach().abs().max()) == 0.0
    module.set_scale("default", 1.0)
    assert module.scale("default") == pytest.approx(2 / sqrt(16))
    merged = copy.deepcopy(model)
    merged.merge_adapter()
    merged = copy.deepcopy(merged)
    merged.unmerge_adapter()
    assert torch.equal(merged(IDS), model(IDS))


def test_tied_weights_stay_tied() -> None:
    """Merging into an embedding does not change the head that shares its weight; unmerging ties them again."""
    base = nn.ModuleDict({"embedding": nn.Embedding(20, 8), "out": nn.Linear(8, 20, bias=False)})
    base["out"].weight = base["embedding"].weight
    model = peft.get_peft_model(base, config("embedding", init_lora_weights=False))
    before = base["out"].weight.detach().clone()
    model.merge_adapter()
    assert torch.equal(base["out"].weight, before)
    assert not torch.equal(base["embedding"].get_base_layer().weight, before)
    model.unmerge_adapter()
    assert base["embedding"].get_base_layer().weight is base["out"].weight


@every_layer
def test_cast_while_merged(layer: str) -> None:
    """`unmerge` gives back a weight of the type that the model has by then."""
    model = adapted(layer)
    expected = copy.deepcopy(model).to(torch.bfloat16)
    model.merge_adapter()
    model.to(torch.bfloat16)
    model.unmerge_adapter()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model(IDS), expected(IDS))
