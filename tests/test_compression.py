"""Adapters through packed files and back, as a user would: compress, load, expand, the command, and many on a shelf."""

import hashlib
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import wellposed as wp
from small_adapters import gpt2, llama, logits
from small_packed import KINDS, saved, trained
from wellposed.adapters.layers import SineLayer
from wellposed.cli import main
from wellposed.compression import AdapterShelf, expand, packed_weight, read_packed
from wellposed.compression.files import PACKED
from wellposed.errors import InvalidArgumentError, ModelFileError, RunError
from wellposed.lowrank import sine_delta
from wellposed.spectrum import stable_rank

# PEFT 0.20 looks for the configuration of a base model that was not loaded from anywhere.
pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file in")


def fingerprint(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per", ["tensor", "row"])
def test_every_kind_comes_back(kind: str, per: Any, tmp_path: Path) -> None:
    model = trained(kind)
    model.save_pretrained(tmp_path / "plain")
    before = fingerprint(tmp_path / "plain")
    report = wp.compress(tmp_path / "plain", bits=5, out=tmp_path / "packed", per=per)
    assert fingerprint(tmp_path / "plain") == before
    assert sorted(file.name for file in (tmp_path / "packed").iterdir()) == ["adapter_config.json", PACKED]
    loaded = wp.load_adapter(llama(), tmp_path / "packed")
    assert isinstance(loaded, peft.PeftModel)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    expand(tmp_path / "packed", tmp_path / "expanded")
    plainly = peft.PeftModel.from_pretrained(llama(), tmp_path / "expanded")
    assert torch.equal(logits(loaded), logits(plainly)), "bit by bit"
    base, ours, theirs = logits(llama()), logits(loaded), logits(model)
    assert 0 < (ours - theirs).norm() < 0.3 * (theirs - base).norm()
    assert len(report.layers) == 4
    assert all(0 < layer.error < 0.25 for layer in report.layers)
    again = wp.compress(tmp_path / "expanded", bits=5, out=tmp_path / "again", per=per)
    first, second = (read_packed(tmp_path / name).tensors() for name in ("packed", "again"))
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    if per == "tensor":
        assert (tmp_path / "again" / PACKED).read_bytes() == (tmp_path / "packed" / PACKED).read_bytes()
    assert again.error < 1e-6


def test_the_table_says_what_was_done(tmp_path: Path) -> None:
    model = trained("sine")
    model.save_pretrained(tmp_path / "plain")
    report = wp.compress(tmp_path / "plain", bits=2, out=tmp_path / "packed")
    loaded = wp.load_adapter(llama(), tmp_path / "packed")
    layers = dict(model.named_modules()), dict(loaded.named_modules())
    for row in report.layers:
        before, after = (named[f"base_model.model.{row.name}"] for named in layers)
        assert isinstance(before, SineLayer)
        delta, quantized = before.delta("default").detach(), after.delta("default").detach()
        assert row.error == pytest.approx(float((quantized - delta).norm() / delta.norm()), rel=1e-4)
        assert row.stable_rank == pytest.approx(float(stable_rank(delta)), rel=1e-3)
        assert row.quantized_stable_rank == pytest.approx(float(stable_rank(quantized)), rel=1e-3)
        for letter, error in (("A", row.error_a), ("B", row.error_b)):
            a, q = (getattr(layer, f"lora_{letter}")["default"].weight.detach() for layer in (before, after))
            assert error == pytest.approx(float((q - a).norm() / a.norm()), rel=1e-4)
            assert len(q.unique()) == 4
        assert (row.rank, row.bits_a, row.bits_b) == (4, 2, 2)
    text = str(report)
    assert text.count("model.layers.") == 4
    assert f"{report.size:,} bytes" in text
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["error"] == report.layers[0].error


def test_the_error_of_lora_is_that_of_the_product(tmp_path: Path) -> None:
    saved(tmp_path / "plain", "lora")
    report = wp.compress(tmp_path / "plain", bits=3, out=tmp_path / "packed", scheme="uniform")
    before = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    after = read_packed(tmp_path / "packed").tensors()
    for row in report.layers:
        products = [
            tensors[f"base_model.model.{row.name}.lora_B.weight"]
            @ tensors[f"base_model.model.{row.name}.lora_A.weight"]
            for tensors in (before, after)
        ]
        assert row.error == pytest.approx(float((products[1] - products[0]).norm() / products[0].norm()), rel=1e-4)
        assert row.stable_rank == pytest.approx(float(stable_rank(products[0])), rel=1e-4)
        assert row.quantized_stable_rank == pytest.approx(float(stable_rank(products[1])), rel=1e-4)
    assert wp.compress(tmp_path / "plain", bits=3, out=tmp_path / "better").error < report.error


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_size_is_codes_codebooks_and_a_small_header(bits: int, tmp_path: Path) -> None:
    """With the names and shapes of Llama-3-8B, rank 8: 28 MB in float32."""
    sides = {"q_proj": (4096, 4096), "k_proj": (1024, 4096), "v_proj": (1024, 4096), "down_proj": (4096, 14336)}
    tensors, omegas = {}, {}
    for i in range(4):
        for name, (out, cols) in sides.items():
            part = "mlp" if name == "down_proj" else "self_attn"
            layer = f"model.layers.{i}.{part}.{name}"
            tensors[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(8, cols) / 100
            tensors[f"base_model.model.{layer}.lora_B.weight"] = torch.randn(out, 8) / 100
            omegas[layer] = 2771.28 + i
    config = wp.SineLoraConfig(r=8, target_modules=list(sides), omega_pattern=omegas)
    config.save_pretrained(str(tmp_path))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    saved_config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved_config | {"peft_type": "LORA"}))  # dW in no time
    report = wp.compress(tmp_path, bits=bits, out=tmp_path / "packed", scheme="uniform")
    assert report.original_size > 2**20
    payload = sum(tensor.numel() * bits // 8 + 2 * 2**bits for tensor in tensors.values())
    assert payload < report.size < 1.02 * payload
    assert (tmp_path / "packed" / PACKED).stat().st_size == report.size


@pytest.mark.parametrize("kind", ["lora", "sine"])
def test_bits_for_an_error(kind: str, tmp_path: Path) -> None:
    saved(tmp_path / "plain", kind)
    sizes = []
    for most in (0.5, 0.1, 0.03):
        report = wp.compress(tmp_path / "plain", max_error=most, out=tmp_path / f"{most}")
        assert max(layer.error for layer in report.layers) <= most
        sizes.append(sum(each.nbytes for each in read_packed(tmp_path / f"{most}").factors.values()))
        fewest = min(min(layer.bits_a, layer.bits_b) for layer in report.layers)
        if fewest > 1:  # one bit less everywhere would not do
            less = wp.compress(tmp_path / "plain", bits=fewest - 1, out=tmp_path / f"less-{most}")
            assert max(layer.error for layer in less.layers) > most
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2]
    with pytest.raises(InvalidArgumentError, match=r"max_error=1e-05: with 8 bits the error of .* is .* still"):
        wp.compress(tmp_path / "plain", max_error=1e-5, out=tmp_path / "never")


@pytest.mark.parametrize("kind", ["lora", "sine dora"])
def test_bits_for_a_size(kind: str, tmp_path: Path) -> None:
    saved(tmp_path / "plain", kind, target_modules="all-linear", r=8)
    least = wp.compress(tmp_path / "plain", bits=1, out=tmp_path / "least").size
    most = wp.compress(tmp_path / "plain", bits=8, out=tmp_path / "most").size
    errors = []
    for part in (0.2, 0.4, 0.8):
        budget = int(least + part * (most - least))
        report = wp.compress(tmp_path / "plain", budget=budget, out=tmp_path / f"{part}")
        assert 0.8 * budget < report.size <= budget
        errors.append(sum(layer.error**2 for layer in report.layers))
    assert errors[0] > errors[1] > errors[2]
    same = wp.compress(tmp_path / "plain", bits=3, out=tmp_path / "three")
    chosen = wp.compress(tmp_path / "plain", budget=same.size + 1024, out=tmp_path / "as large")
    assert sum(layer.error**2 for layer in chosen.layers) <= sum(layer.error**2 for layer in same.layers)
    with pytest.raises(InvalidArgumentError, match="below what the adapter takes with one bit"):
        wp.compress(tmp_path / "plain", budget="1KB", out=tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_peft_stops_at_a_packed_folder(tmp_path: Path) -> None:
    wp.compress(saved(tmp_path / "plain", "lora"), bits=3, out=tmp_path / "packed")
    with pytest.raises(KeyError, match=r"wellposed\.load_adapter\(model, folder\)"):
        peft.PeftModel.from_pretrained(llama(), tmp_path / "packed")
    with pytest.raises(KeyError, match=r"wellposed\.load_adapter\(model, folder\)"):
        trained("lora").load_adapter(tmp_path / "packed", "other")


def test_plain_folders_and_second_adapters(tmp_path: Path) -> None:
    model = trained("sine")
    model.save_pretrained(tmp_path / "plain")
    assert torch.equal(logits(wp.load_adapter(llama(), tmp_path / "plain")), logits(model))
    wp.compress(saved(tmp_path / "other", "sine", seed=5), bits=4, out=tmp_path / "packed")
    alone = logits(wp.load_adapter(llama(), tmp_path / "packed"))
    both = wp.load_adapter(model, tmp_path / "packed", adapter_name="other")
    assert both is model
    both.set_adapter("other")
    assert torch.equal(logits(both), alone)
    with pytest.raises(InvalidArgumentError, match="the model has one of this name"):
        wp.load_adapter(model, tmp_path / "packed", adapter_name="other")
    trainable = wp.load_adapter(llama(), tmp_path / "packed", is_trainable=True)
    assert any(parameter.requires_grad for parameter in trainable.parameters())


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`", "ignore:Input and output embeddings are no")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("kind", ["lora", "sine", "sine dora"])
def test_embeddings_conv1d_half_precision_and_other_tensors(kind: str, tmp_path: Path) -> None:
    base = gpt2().bfloat16() if kind == "lora" else gpt2()
    model = trained(kind, base=base, target_modules=["c_attn", "wte"], modules_to_save=["ln_f"])
    model.base_model.model.transformer.ln_f.modules_to_save["default"].weight.data.add_(0.5)
    model.save_pretrained(tmp_path / "plain", save_embedding_layers=False)
    wp.compress(tmp_path / "plain", bits=8, out=tmp_path / "packed")
    packed = read_packed(tmp_path / "packed")
    before, after = load_file(tmp_path / "plain" / "adapter_model.safetensors"), packed.tensors()
    assert before.keys() == after.keys()
    assert any("lora_embedding_A" in name for name in packed.factors)
    for name, tensor in before.items():
        if "ln_f" in name:
            assert torch.equal(after[name], tensor)
        elif "magnitude" in name:
            torch.testing.assert_close(after[name].float(), tensor.float(), rtol=1e-3, atol=0)
        else:
            assert after[name].dtype == tensor.dtype
            assert (after[name].float() - tensor.float()).norm() < 0.02 * tensor.float().norm()
    base = gpt2().bfloat16() if kind == "lora" else gpt2()
    loaded = logits(wp.load_adapter(base, tmp_path / "packed"))
    assert (loaded - logits(model)).norm() < 0.1 * (logits(model) - logits(gpt2())).norm() + 0.5 * (kind == "lora")


def test_convolutions_and_pickled_weights(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(4))
    images = torch.randn(2, 3, 6, 6)
    net(images)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    model = peft.get_peft_model(net, config).eval()
    model.save_pretrained(tmp_path / "plain")
    weights = tmp_path / "plain" / "adapter_model.safetensors"
    torch.save(load_file(weights), tmp_path / "plain" / "adapter_model.bin")
    weights.unlink()
    wp.compress(tmp_path / "plain", bits=8, out=tmp_path / "packed", per="row")
    fresh = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    fresh.load_state_dict(state)
    loaded = wp.load_adapter(fresh, tmp_path / "packed")
    torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=0.05)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, packed = str(saved(tmp_path / "plain")), str(tmp_path / "packed")
    assert main(["compress", plain, "--bits", "3", "--out", packed, "--json", str(tmp_path / "errors.json")]) == 0
    printed = capsys.readouterr().out
    assert "layers.1.mlp.down_proj" in printed
    assert "times smaller" in printed
    assert len(json.loads((tmp_path / "errors.json").read_text())["layers"]) == 4
    assert main(["compress", packed, "--expand", "--out", str(tmp_path / "expanded")]) == 0
    assert (tmp_path / "expanded" / "adapter_model.safetensors").exists()
    assert main(["compress", plain, "--budget", "4KB", "--out", str(tmp_path / "small")]) == 0
    assert (tmp_path / "small" / PACKED).stat().st_size <= 4000
    assert main(["compress", plain, "--max-error", "0.1", "--out", str(tmp_path / "good")]) == 0
    capsys.readouterr()
    for arguments, message in [
        ([plain, "--out", packed, "--bits", "3"], "there is something"),
        ([plain, "--out", str(tmp_path / "x"), "--bits", "9"], "bits=9: expected a whole number from 1 to 8"),
        ([plain, "--out", str(tmp_path / "x")], "nothing given: expected one of bits, budget and max_error"),
        ([plain, "--out", str(tmp_path / "x"), "--bits", "3", "--budget", "2MB"], "bits and budget given"),
        ([plain, "--out", str(tmp_path / "x"), "--budget", "2 parsecs"], "expected bytes above 0"),
        ([plain, "--out", str(tmp_path / "x"), "--max-error", "nan"], "max_error=nan: expected a number above 0"),
        ([plain, "--out", str(tmp_path / "x"), "--expand"], "is no packed adapter"),
        ([packed, "--out", str(tmp_path / "x"), "--expand", "--bits", "3"], "expected it alone"),
        ([packed, "--out", str(tmp_path / "x"), "--bits", "3"], "packed already"),
        ([str(tmp_path), "--out", str(tmp_path / "x"), "--bits", "3"], "is no adapter: it has no adapter_config.json"),
    ]:
        assert main(["compress", *arguments]) == 2, arguments
        assert message in capsys.readouterr().err
        assert not (tmp_path / "x").exists()


def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "plain", "lora")

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("wellposed.compression.files.save_file", full)
    with pytest.raises(RunError, match=r"cannot write .*No space left"):
        wp.compress(tmp_path / "plain", bits=3, out=tmp_path / "packed")
    assert [each.name for each in tmp_path.iterdir()] == ["plain"]


def test_another_model(tmp_path: Path) -> None:
    wp.compress(saved(tmp_path / "plain", "lora"), bits=3, out=tmp_path / "packed")
    wider = llama(width=64)
    with pytest.raises(ModelFileError, match=r"update of shape 32 x 64 for .*down_proj, whose weight is \(64, 64\)"):
        wp.load_adapter(wider, tmp_path / "packed")
    assert not any(isinstance(module, peft.tuners.lora.LoraLayer) for module in wider.modules()), "untouched"
    with pytest.raises(ModelFileError, match="does not have"):
        wp.load_adapter(gpt2(), tmp_path / "packed")
    with pytest.raises(ModelFileError, match=r"no place|does not fit"):
        wp.load_adapter(llama(layers=1), tmp_path / "packed")
    with pytest.raises(ModelFileError, match=r"no values|does not fit"):
        wp.load_adapter(llama(layers=3), tmp_path / "packed")
    with pytest.raises(ModelFileError, match="is no adapter"):
        wp.load_adapter(llama(), tmp_path)


@pytest.mark.parametrize(
    ("kind", "per"), [("lora", "tensor"), ("dora", "row"), ("sine", "row"), ("sine dora", "tensor")]
)
def test_a_shelf(kind: str, per: Any, tmp_path: Path) -> None:
    for seed in range(3):
        wp.compress(saved(tmp_path / f"plain-{seed}", kind, seed), bits=3, out=tmp_path / f"{seed}", per=per)
    model = wp.load_adapter(llama(), tmp_path / "0")
    parameters = dict(model.named_parameters())
    shelf = AdapterShelf(model)
    for seed in range(3):
        shelf.add(f"{seed}", tmp_path / f"{seed}")
    assert shelf.nbytes == pytest.approx(sum(read_packed(tmp_path / f"{seed}").nbytes for seed in range(3)), rel=0.05)
    for seed in (2, 0, 1):
        shelf.use(f"{seed}")
        assert torch.equal(logits(model), logits(wp.load_adapter(llama(), tmp_path / f"{seed}")))
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    with pytest.raises(InvalidArgumentError, match="expected one of 0, 1, 2"):
        shelf.use("3")
    wp.compress(saved(tmp_path / "plain-r", kind, r=2, lora_alpha=4), bits=3, out=tmp_path / "r")
    with pytest.raises(InvalidArgumentError, match="one configuration"):
        shelf.add("r", tmp_path / "r")
    with pytest.raises(InvalidArgumentError, match="has default"):
        AdapterShelf(model, "nobody")


def test_the_weight_from_packed_factors(tmp_path: Path) -> None:
    wp.compress(saved(tmp_path / "plain", "sine"), bits=4, out=tmp_path / "packed", per="row")
    stem = "base_model.model.model.layers.0.mlp.down_proj"
    a, b = (read_packed(tmp_path / "packed").factors[f"{stem}.lora_{letter}.weight"] for letter in "AB")
    weight0 = torch.randn(32, 64)
    expected = weight0 + sine_delta(a.values(), b.values(), 300.0, 0.5)
    torch.testing.assert_close(packed_weight(weight0, a, b, 300.0, 0.5), expected)
    half = packed_weight(weight0.bfloat16(), a, b, 300.0, 0.5)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.01, atol=0.02)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    saved(tmp_path / "plain", "sine")
    for device in ("cpu", "cuda"):
        report = wp.compress(tmp_path / "plain", bits=3, out=tmp_path / device, device=device)
        assert report.error < 0.5
    cpu, gpu = (read_packed(tmp_path / device).tensors() for device in ("cpu", "cuda"))
    for name, tensor in cpu.items():
        torch.testing.assert_close(gpu[name], tensor, rtol=1e-3, atol=1e-3 * float(tensor.abs().max()))
    model = wp.load_adapter(llama().cuda(), tmp_path / "cuda")
    shelf = AdapterShelf(model)
    shelf.add("one", tmp_path / "cpu")
    shelf.use("one")
    places = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert all(torch.equal(places[name].cpu(), tensor) for name, tensor in cpu.items())
