"""Saving and loading: every family, odd variants, tied weights, and what cannot be saved."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import transformers
from torch import nn

import wellposed as wp
from wellposed.errors import InvalidArgumentError, ModelFileError, UnsuitableModelError
from zoo import ATTENTIVE, SMALL_VIT, ZOO, Specimen, classes, convmixer, gpt2, images, llama, vit

WEIGHTS = "wellposed.safetensors"
every_family = pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO.keys())


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trip(specimen: Specimen, dtype: torch.dtype, tmp_path: Path) -> None:
    model = wp.cut_skips(specimen.make())
    if specimen.family in {known.family for known in ATTENTIVE.values()}:
        wp.condition_(model)
    model = model.to(dtype).eval()
    assert wp.save(model, tmp_path / "new" / "folder") == tmp_path / "new" / "folder"
    assert len({path.stat().st_mode for path in (tmp_path / "new" / "folder").iterdir()}) == 1
    loaded = wp.load(tmp_path / "new" / "folder")
    assert not loaded.training
    assert classes(loaded) == classes(model)
    assert wp.recipe(loaded) == wp.recipe(model)
    for (name, ours), (other, theirs) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in specimen.inputs().items()}
    # A loaded Llama has the rotary frequencies in float32, as from_pretrained gives it; model.to(bfloat16) rounds them.
    tolerance = 0.05 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(
        specimen.output(loaded, inputs), specimen.output(model, inputs), rtol=tolerance, atol=tolerance
    )


def test_recipe_is_in_the_header_and_in_the_readable_copy(tmp_path: Path) -> None:
    wp.save(wp.cut_skips(vit()), tmp_path)
    with safetensors.safe_open(tmp_path / WEIGHTS, framework="pt") as file:
        header = json.loads(file.metadata()["wellposed"])
    assert header == json.loads((tmp_path / "wellposed.json").read_text())
    assert header["recipe"] == [{"change": "cut_skips", "attention": True, "mlp": True}]
    assert header["model"]["architecture"] == "vit_tiny_patch16_224"
    assert sorted(os.listdir(tmp_path)) == ["wellposed.json", WEIGHTS], "no temporary file is left"


def test_other_loaders_fail_loudly(tmp_path: Path) -> None:
    wp.save(wp.cut_skips(gpt2()), tmp_path)
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("specimen", [s for s in ZOO.values() if "Hugging" in s.family], ids=lambda s: s.family)
def test_models_from_pretrained(specimen: Specimen, tmp_path: Path) -> None:
    made: Any = specimen.make()
    made.config.id2label = {0: "cat", 1: "dog"}
    made.save_pretrained(tmp_path / "hf")
    model = type(made).from_pretrained(tmp_path / "hf", dtype=torch.bfloat16, attn_implementation="eager")
    wp.save(wp.cut_skips(model), tmp_path / "wp")
    loaded: Any = wp.load(tmp_path / "wp")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    assert loaded.config.id2label == {0: "cat", 1: "dog"}
    assert classes(loaded) == classes(model)


def test_timm_tag_is_kept(tmp_path: Path) -> None:
    with torch.device("meta"):
        dino = timm.create_model("vit_small_patch16_224.dino", depth=1)
    model: Any = dino.to_empty(device="cpu")
    wp.save(model, tmp_path)
    loaded: Any = wp.load(tmp_path)
    assert loaded.pretrained_cfg == model.pretrained_cfg
    assert loaded.pretrained_cfg["tag"] == "dino"


VARIANTS: dict[str, Any] = {
    "no norm at all": {"global_pool": "avg", "fc_norm": False},
    "odd width": {"embed_dim": 44, "mlp_ratio": 1414 / 1408, "weight_init": "skip"},
    "pooled": {"global_pool": "avg", "class_token": False},
    "layer scale": {"init_values": 1e-4, "qk_norm": True, "qkv_bias": False},
    "dropped": {"drop_path_rate": 0.3, "drop_rate": 0.1, "attn_drop_rate": 0.2, "pos_drop_rate": 0.1, "depth": 5},
    "registers": {"reg_tokens": 3, "no_embed_class": True, "pre_norm": True},
    "rectangle": {"img_size": (32, 64), "patch_size": (8, 16), "in_chans": 1},
    "dynamic": {"dynamic_img_size": True, "mlp_ratio": 2.5},
    "features": {"num_classes": 0, "patch_drop_rate": 0.25},
}


@pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("made_by", ["name", "class"])
def test_timm_arguments_are_read_off_the_model(arguments: dict[str, Any], made_by: str, tmp_path: Path) -> None:
    model: Any = vit(**arguments)
    if made_by == "class":
        model = timm.models.VisionTransformer(**(SMALL_VIT | arguments))
    wp.save(wp.cut_skips(model.eval()), tmp_path)
    loaded = wp.load(tmp_path)
    assert repr(loaded) == repr(model)
    x = torch.randn(1, model.in_chans, *model.patch_embed.img_size)
    torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=0, equal_nan=True)


def test_set_input_size_and_a_new_head_are_remembered(tmp_path: Path) -> None:
    model: Any = wp.cut_skips(vit()).eval()
    model.set_input_size(img_size=48)
    model.reset_classifier(3)
    wp.save(model, tmp_path)
    x = torch.randn(1, 3, 48, 48)
    assert torch.equal(wp.load(tmp_path)(x), model(x))


def test_a_model_that_could_not_be_built_again_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model: Any = vit()
    model.head = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 5))
    with pytest.raises(UnsuitableModelError, match="'head' is a Linear, not a Sequential"):
        wp.save(model, tmp_path / "a")
    with pytest.raises(UnsuitableModelError, match=r"norm_layer|is a"):
        wp.save(vit(norm_layer="rmsnorm"), tmp_path / "a")
    with pytest.raises(UnsuitableModelError, match="neither a timm nor a transformers model"):
        wp.save(nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(UnsuitableModelError, match="JSON"):
        wp.save(vit(), tmp_path / "a", model_args={"norm_layer": nn.LayerNorm})
    with torch.device("meta"), pytest.raises(UnsuitableModelError, match="meta"):
        wp.save(vit(), tmp_path / "a")
    hf: Any = llama()
    hf.lm_head = nn.Linear(32, 7)
    with pytest.raises(UnsuitableModelError, match="lm_head"):
        wp.save(hf, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_numbers_changed_by_hand_are_noticed(tmp_path: Path) -> None:
    model: Any = ZOO["hf_vit"].make()
    model.vit.layernorm.eps = 5.0
    with pytest.raises(UnsuitableModelError, match=r"layernorm\.eps is 1e-12, not 5\.0"):
        wp.save(model, tmp_path)
    model = ZOO["hf_vit"].make()
    model.config.layer_norm_eps = 0.5
    with pytest.raises(UnsuitableModelError, match=r"eps is 0\.5, not 1e-12"):
        wp.save(model, tmp_path)


def test_running_a_model_does_not_change_what_it_is(tmp_path: Path) -> None:
    model: Any = llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    model.gradient_checkpointing_enable()
    model(torch.randint(0, 60, (1, 50)))
    wp.save(model, tmp_path)
    assert torch.equal(wp.load(tmp_path).model.norm.weight, model.model.norm.weight)


def test_model_args_say_what_cannot_be_read(tmp_path: Path) -> None:
    model = wp.cut_skips(vit(norm_layer="rmsnorm")).eval()
    wp.save(model, tmp_path, model_args={**SMALL_VIT, "norm_layer": "rmsnorm", "pretrained": True})
    assert torch.equal(wp.load(tmp_path)(**images()), model(**images()))


def test_tied_weights(tmp_path: Path) -> None:
    model: Any = wp.cut_skips(gpt2())
    wp.save(model, tmp_path / "tied")
    loaded: Any = wp.load(tmp_path / "tied")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    untied: Any = gpt2(tie_word_embeddings=False)
    wp.save(untied, tmp_path / "untied")
    assert len(safetensors.torch.load_file(tmp_path / "untied" / WEIGHTS)) == 1 + len(
        safetensors.torch.load_file(tmp_path / "tied" / WEIGHTS)
    )


def test_weights_tied_by_hand_stay_tied(tmp_path: Path) -> None:
    model: Any = vit()
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    wp.save(model, tmp_path)
    loaded: Any = wp.load(tmp_path)
    assert loaded.blocks[1].mlp.fc1.weight is loaded.blocks[0].mlp.fc1.weight
    apart: Any = vit()
    wp.load(tmp_path, apart)
    assert apart.blocks[1].mlp.fc1.weight is not apart.blocks[0].mlp.fc1.weight
    assert torch.equal(apart.blocks[1].mlp.fc1.weight, model.blocks[0].mlp.fc1.weight)


def test_loading_into_a_model_keeps_its_dtype_and_mode(tmp_path: Path) -> None:
    model = vit()
    wp.save(model, tmp_path)
    other = vit().bfloat16().train()
    assert wp.load(tmp_path, other) is other
    assert other.training
    assert all(p.dtype == torch.bfloat16 for p in other.parameters())
    compiled = torch.compile(vit())
    wp.load(tmp_path, compiled)
    assert torch.equal(next(compiled.parameters()), next(model.parameters()))
    wp.save(compiled, tmp_path / "again")
    assert wp.recipe(wp.load(tmp_path / "again")) == []


def test_weights_of_another_size_change_nothing(tmp_path: Path) -> None:
    wp.save(vit(), tmp_path)
    other = vit(depth=3, num_classes=7)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ModelFileError, match=r"head\.bias is \(5,\), expected \(7,\).*more"):
        wp.load(tmp_path, other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_weights_of_another_kind_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    wp.save(vit(), tmp_path)
    with safetensors.safe_open(tmp_path / WEIGHTS, framework="pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(tmp_path / WEIGHTS)
    tensors["head.bias"] = tensors["head.bias"].to(dtype)
    safetensors.torch.save_file(tensors, tmp_path / WEIGHTS, metadata=metadata)
    for arguments in ((), (vit(),)):
        with pytest.raises(ModelFileError, match=f"head.bias is {dtype}"):
            wp.load(tmp_path, *arguments)


def test_wrong_places(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelFileError, match="is a file"):
        wp.save(vit(), tmp_path / "file")
    wp.save(vit(), tmp_path)
    with pytest.raises(InvalidArgumentError, match="'warp'"):
        wp.load(tmp_path, device="warp")
    with pytest.raises(InvalidArgumentError, match="give only one"):
        wp.load(tmp_path, vit(), device="cpu")
    with pytest.raises(InvalidArgumentError, match="NoneType"):
        wp.save(None, tmp_path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = convmixer()
    wp.save(model, tmp_path)
    before = (tmp_path / WEIGHTS).read_bytes()

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("wellposed.recipes.store.save_model", full_disk)
    with pytest.raises(OSError, match="No space left"):
        wp.save(wp.cut_skips(model), tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["wellposed.json", WEIGHTS]
