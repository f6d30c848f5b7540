"""Features of blocks, against what timm and transformers themselves give, and models opened from all that holds one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

import wellposed as wp
from small_runs import small_config
from wellposed.data import DeviceLoader, ImageSet, make_shapes, open_data
from wellposed.errors import DataError, InvalidArgumentError, ModelFileError, UnknownFamilyError, UnsuitableModelError
from wellposed.evaluation.backbones import model_fingerprint, open_backbone
from wellposed.evaluation.features import layer_features
from zoo import SMALL_VIT, bert, convmixer, deit, dinov2, hf_vit, images, vit

PIXELS = images()["x"]


def swin() -> Any:
    return SwinTransformer(img_size=32, patch_size=2, window_size=4, embed_dim=8, depths=(1, 2), num_heads=(2, 2))


def hf_dinov2(registers: int = 0) -> Any:
    settings = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    if not registers:
        return transformers.Dinov2Model(transformers.Dinov2Config(**settings)).eval()
    config = transformers.Dinov2WithRegistersConfig(**settings, num_register_tokens=registers)
    return transformers.Dinov2WithRegistersModel(config).eval()


def shaken(model: nn.Module, by: float = 0.1) -> Any:
    """The model with every parameter and buffer away from its neutral initial value, so that nothing can hide."""
    for parameter in model.parameters():
        parameter.data += by * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.copy_(torch.rand_like(buffer) + 0.5 if "var" in name else by * torch.randn_like(buffer))
    return model.eval()


# --- tokens


@pytest.mark.parametrize("make", [vit, dinov2, deit, lambda: vit(class_token=False, global_pool="avg", reg_tokens=2)])
@pytest.mark.parametrize("size", [(32, 32), (48, 24)])
def test_timm_vits_agree_with_forward_intermediates(make: Callable[[], Any], size: tuple[int, int]) -> None:
    model = shaken(make())
    pixels = torch.randn(2, 3, *size)
    found = layer_features(model, pixels, None)
    model.set_input_size(img_size=size)  # timm's own way to other sizes
    expected = model.forward_intermediates(
        pixels, norm=True, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True
    )
    assert len(found) == len(expected) == 2
    for ours, (patches, prefix) in zip(found, expected, strict=True):
        assert ours.grid == (size[0] // 8, size[1] // 8)
        torch.testing.assert_close(ours.patches_BND, patches)
        if model.cls_token is not None:  # and both tokens of a distilled DeiT, which has two heads
            read = prefix[:, :2] if make is deit else prefix[:, :1]
            torch.testing.assert_close(ours.summary_BD, read.mean(1))


@pytest.mark.parametrize(
    "settings",
    [{}, {"global_pool": "avg"}, {"global_pool": "avg", "class_token": False}, {"global_pool": "avg", "reg_tokens": 2}],
    ids=str,
)
def test_the_summary_of_the_last_block_is_what_the_head_reads(settings: dict[str, Any]) -> None:
    model = shaken(vit(**settings))
    expected = model.forward_head(model.forward_features(PIXELS), pre_logits=True)
    torch.testing.assert_close(layer_features(model, PIXELS)[0].summary_BD, expected)


def test_the_summary_of_convmixer_and_swin_is_what_the_head_reads() -> None:
    for model in (shaken(convmixer()), shaken(swin())):
        expected = model.forward_head(model.forward_features(PIXELS), pre_logits=True)
        torch.testing.assert_close(layer_features(model, PIXELS)[0].summary_BD, expected)


def test_stages_of_swin_have_their_own_grids() -> None:
    model = shaken(swin())
    found = layer_features(model, PIXELS, None)
    assert [one.grid for one in found] == [(16, 16), (8, 8)]
    first_BHWD = model.layers[0](model.patch_embed(PIXELS))
    torch.testing.assert_close(found[0].patches_BND, first_BHWD.flatten(1, 2))
    torch.testing.assert_close(found[1].patches_BND, model.norm(model.layers[1](first_BHWD)).flatten(1, 2))


def test_blocks_of_convmixer_end_behind_the_pointwise_convolution() -> None:
    model = shaken(convmixer())
    first, last = layer_features(model, PIXELS, (0, -1))
    stem = model.stem(PIXELS)
    torch.testing.assert_close(first.patches_BND, model.blocks[0](stem).flatten(2).mT)
    torch.testing.assert_close(last.patches_BND, model.blocks(stem).flatten(2).mT)
    assert last.grid == (8, 8)


@pytest.mark.parametrize("make", [lambda: hf_vit().vit, hf_dinov2, lambda: hf_dinov2(4)], ids=["vit", "dinov2", "reg"])
@pytest.mark.parametrize("size", [(32, 32), (48, 24)])
def test_transformers_agree_with_their_hidden_states(make: Callable[[], Any], size: tuple[int, int]) -> None:
    model = shaken(make())
    pixels = torch.randn(2, 3, *size)
    options = {"interpolate_pos_encoding": True} if "vit" in type(model).__module__.split(".") else {}
    with torch.no_grad():
        expected = model(pixel_values=pixels, output_hidden_states=True, **options)
    found = layer_features(model, pixels, None)
    registers = getattr(model.config, "num_register_tokens", 0)
    for ours, theirs in zip(found, expected.hidden_states[1:], strict=True):
        normed = model.layernorm(theirs)
        torch.testing.assert_close(ours.patches_BND, normed[:, 1 + registers :])
        torch.testing.assert_close(ours.summary_BD, normed[:, 0])
        assert ours.grid == (size[0] // 8, size[1] // 8)
    torch.testing.assert_close(found[-1].summary_BD, expected.last_hidden_state[:, 0])


def test_a_head_changes_nothing() -> None:
    model = shaken(hf_vit())
    ours, bare = (layer_features(one, PIXELS)[0] for one in (model, model.vit))
    assert torch.equal(ours.patches_BND, bare.patches_BND)


def test_clip_has_its_vision_model_looked_at() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"image_size": 32, "patch_size": 8}
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision)).eval()
    found = layer_features(model, PIXELS)[0]
    with torch.no_grad():
        expected = model.vision_model(PIXELS)
    torch.testing.assert_close(found.summary_BD, expected.pooler_output)
    assert layer_features(model, PIXELS, kind="keys")[0].patches_BND.shape == (2, 16, 32)


def test_changed_models_give_the_features_of_what_they_compute() -> None:
    model = shaken(wp.gray_tokens(wp.cut_skips(vit()), "dct"))
    found = layer_features(model, PIXELS)[0]
    torch.testing.assert_close(found.patches_BND, model.forward_features(PIXELS)[:, 1:])
    wp.restore_skips(model)
    assert not torch.allclose(layer_features(model, PIXELS)[0].patches_BND, found.patches_BND)
    assert layer_features(wp.cut_skips(model), torch.randn(1, 3, 16, 24))[0].grid == (2, 3)


def test_layers_are_given_in_the_order_asked_for() -> None:
    model = shaken(vit(depth=4))
    every = layer_features(model, PIXELS, None)
    some = layer_features(model, PIXELS, (-1, 1, 1, -4))
    assert [torch.equal(a.patches_BND, every[i].patches_BND) for a, i in zip(some, (3, 1, 1, 0), strict=True)] == [
        True
    ] * 4


def test_the_model_is_left_as_it_was() -> None:
    model = vit(drop_path_rate=0.5, proj_drop_rate=0.5)
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    one, two = (layer_features(model, torch.randn(1, 3, 48, 48, generator=_seeded()))[0] for _ in range(2))
    assert torch.equal(one.patches_BND, two.patches_BND), "drop-path and dropout are off"
    assert [module.training for module in model.modules()] == before
    assert not one.patches_BND.requires_grad
    assert not model.dynamic_img_size
    assert model.patch_embed.strict_img_size
    assert model(PIXELS).shape == (2, 5)
    assert not any(module._forward_hooks for module in model.modules())


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_precisions(dtype: torch.dtype) -> None:
    model = shaken(vit())
    exact = layer_features(model, PIXELS)[0].patches_BND
    found = layer_features(model.to(dtype), PIXELS)[0].patches_BND
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.float(), exact, atol=0.1, rtol=0.1)


@pytest.mark.gpu
def test_features_on_a_gpu_are_those_on_the_cpu() -> None:
    model = shaken(vit())
    exact = layer_features(model, PIXELS)[0].patches_BND
    found = layer_features(model.cuda(), PIXELS.cuda())[0].patches_BND
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), exact, atol=1e-2, rtol=1e-2)


def test_a_compiled_model_is_looked_into() -> None:
    model = shaken(vit())
    compiled, plain = (layer_features(one, PIXELS)[0] for one in (torch.compile(model), model))
    assert torch.equal(compiled.patches_BND, plain.patches_BND)


# --- keys


@pytest.mark.parametrize("settings", [{}, {"qk_norm": True}, {"reg_tokens": 3}], ids=str)
def test_keys_of_timm(settings: dict[str, Any]) -> None:
    model = shaken(vit(**settings))
    found = layer_features(model, PIXELS, (0,), kind="keys")[0]
    tokens = model.norm_pre(model._pos_embed(model.patch_embed(PIXELS)))
    attention = model.blocks[0].attn
    _, w, _ = attention.qkv.weight.chunk(3)
    _, bias, _ = attention.qkv.bias.chunk(3)
    keys = (model.blocks[0].norm1(tokens) @ w.T + bias).unflatten(-1, (4, 8))
    expected = attention.k_norm(keys).flatten(2)
    torch.testing.assert_close(found.patches_BND, expected[:, model.num_prefix_tokens :])
    torch.testing.assert_close(found.summary_BD, expected[:, 0])


def test_keys_of_transformers() -> None:
    for model in (shaken(hf_dinov2(2)), shaken(hf_vit().vit)):
        states = model(pixel_values=PIXELS, output_hidden_states=True).hidden_states
        block = model.layers[1] if hasattr(model, "layers") else model.encoder.layer[1]
        norm = block.norm1 if hasattr(block, "norm1") else block.layernorm_before
        expected = block.attention.k_proj(norm(states[1]))
        found = layer_features(model, PIXELS, (1,), kind="keys")[0]
        torch.testing.assert_close(found.patches_BND, expected[:, -16:])


@pytest.mark.parametrize("make", [swin, convmixer])
def test_keys_that_are_not_on_the_grid_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnsuitableModelError, match="kind='tokens'"):
        layer_features(make(), PIXELS, kind="keys")


# --- what cannot be


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"images_BCHW": torch.zeros(1, 3, 36, 32)}, "height is no multiple of the patch of 8 pixels.*32 or 40"),
        ({"images_BCHW": torch.zeros(1, 3, 32, 5)}, "width is no multiple.*resize to 8"),
        ({"images_BCHW": torch.zeros(1, 1, 32, 32)}, "1 channels: expected 3"),
        ({"images_BCHW": torch.zeros(3, 32, 32)}, "expected a batch"),
        ({"images_BCHW": torch.zeros(0, 3, 32, 32)}, "expected a batch"),
        ({"images_BCHW": torch.zeros(1, 3, 32, 32, dtype=torch.uint8)}, "uint8.*open_backbone"),
        ({"layers": (2,)}, r"layers=\(2,\): expected some of 0 to 1"),
        ({"layers": ()}, "layers="),
        ({"kind": "queries"}, "kind='queries'"),
    ],
    ids=str,
)
def test_bad_arguments(change: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        layer_features(vit(), **({"images_BCHW": PIXELS} | change))


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "mixer_s32_224"])
def test_models_of_one_size_say_so(name: str) -> None:
    model = timm.create_model(name)
    with pytest.raises(InvalidArgumentError, match=r"images of 448 x 224: .*\(224, 224\)"):
        layer_features(model, torch.zeros(1, 3, 448, 224))


def test_models_that_are_no_vision_models_are_refused() -> None:
    for model in (bert(), nn.Linear(2, 2)):
        with pytest.raises(UnknownFamilyError, match="vision model"):
            layer_features(model, PIXELS)


def test_swin_says_its_size() -> None:
    with pytest.raises(InvalidArgumentError, match=r"made for \(32, 32\)"):
        layer_features(swin(), torch.zeros(1, 3, 64, 64))


# --- backbones


def test_a_timm_name_with_a_checkpoint(tmp_path: Path) -> None:
    model = shaken(vit())
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    pictures = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    args = {name: value for name, value in SMALL_VIT.items() if name != "num_classes"}
    backbone = open_backbone(
        "vit_tiny_patch16_224", checkpoint=tmp_path / "weights.safetensors", model_args=args, device="cpu"
    )
    assert backbone.image_size == 32
    assert backbone.mean.flatten().tolist() == [0.5] * 3, "what timm says of this model"
    expected = layer_features(model, pictures / 255 * 2 - 1)[0]
    torch.testing.assert_close(backbone.features(pictures)[0].patches_BND, expected.patches_BND)
    assert backbone.features(torch.zeros(1, 3, 48, 64, dtype=torch.uint8), (0, 1), "keys")[0].grid == (6, 8)
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())


def test_grey_pictures_and_grey_models() -> None:
    colour = open_backbone("vit_tiny_patch16_224", model_args=SMALL_VIT, device="cpu")
    grey = open_backbone("vit_tiny_patch16_224", model_args=SMALL_VIT | {"in_chans": 1}, device="cpu")
    picture = torch.randint(0, 256, (1, 1, 32, 32), dtype=torch.uint8)
    thrice = picture.expand(-1, 3, -1, -1)
    assert torch.equal(colour.features(picture)[0].patches_BND, colour.features(thrice)[0].patches_BND)
    torch.testing.assert_close(grey.features(picture)[0].patches_BND, grey.features(thrice)[0].patches_BND)
    with pytest.raises(InvalidArgumentError, match="4 channels"):
        colour.features(torch.zeros(1, 4, 32, 32, dtype=torch.uint8))
    with pytest.raises(InvalidArgumentError, match="expected uint8"):
        colour.features(torch.zeros(1, 3, 32, 32))


def test_image_sizes_of_a_backbone() -> None:
    settings = {"model_args": SMALL_VIT, "device": "cpu"}
    assert open_backbone("vit_tiny_patch16_224", image_size=64, **settings).image_size == 64
    with pytest.raises(InvalidArgumentError, match="40 or 48"):
        open_backbone("vit_tiny_patch16_224", image_size=44, **settings)
    args = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (1, 2), "num_heads": (2, 2)}
    swin = open_backbone("swin_tiny_patch4_window7_224", image_size=64, model_args=args, device="cpu")
    assert swin.features(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), (0, -1))[1].grid == (16, 16)


def test_a_folder_of_transformers_with_its_own_normalization(tmp_path: Path) -> None:
    model = hf_dinov2()
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]})
    )
    backbone = open_backbone(str(tmp_path), device="cpu")
    assert backbone.image_size == 32
    picture = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    expected = (picture / 255 - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([0.5, 0.6, 0.7]).view(
        3, 1, 1
    )
    with torch.no_grad():
        found = model(pixel_values=expected).last_hidden_state
    torch.testing.assert_close(backbone.features(picture)[0].summary_BD, found[:, 0])


def test_a_saved_model_keeps_its_recipe(tmp_path: Path) -> None:
    model = wp.cut_skips(shaken(vit()))
    wp.save(model, tmp_path)
    backbone = open_backbone(str(tmp_path), device="cpu")
    assert wp.recipe(backbone.model) == wp.recipe(model)
    picture = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    expected = layer_features(model, backbone.normalized(picture))[0]
    assert torch.equal(backbone.features(picture)[0].patches_BND, expected.patches_BND)


def test_a_run_and_its_checkpoints_are_normalized_as_in_training(tmp_path: Path) -> None:
    result = wp.train(small_config(tmp_path / "run", epochs=1), quiet=True)
    loader = DeviceLoader(_image_set("digits", "train"), 8)
    for source in (tmp_path / "run", next((tmp_path / "run" / "checkpoints").glob("step-*"))):
        backbone = open_backbone(str(source), device="cpu")
        assert torch.equal(backbone.mean, loader.mean)
        assert torch.equal(backbone.std, loader.std)
        assert backbone.image_size == 8
        test = _image_set("digits", "test").images[:5]
        logits = result.model.forward_head(result.model.forward_features((test / 255 - loader.mean) / loader.std))
        found = result.model.head(backbone.features(test)[0].summary_BD)
        torch.testing.assert_close(found, logits)
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["config"]["data"] = "cifar10:/nowhere"
    path.write_text(json.dumps(config))
    with pytest.raises(DataError, match="statistics of the set it was trained on"):
        open_backbone(str(tmp_path / "run"), device="cpu")
    path.write_text("{")
    with pytest.raises(ModelFileError, match="settings of a run"):
        open_backbone(str(tmp_path / "run"), device="cpu")


def _image_set(spec: str, split: str) -> ImageSet:
    found = open_data(spec, split)
    assert isinstance(found, ImageSet)
    return found


def test_fingerprints_tell_models_apart() -> None:
    torch.manual_seed(0)
    model = vit()
    first = model_fingerprint(model)
    assert model_fingerprint(model) == first
    model.train()
    assert model_fingerprint(model) == first, "the mode does not count"
    other_heads = vit(num_heads=2)
    other_heads.load_state_dict(model.state_dict())
    prints = [first, model_fingerprint(other_heads), model_fingerprint(wp.cut_skips(model))]
    wp.restore_skips(model)
    prints.append(model_fingerprint(wp.gray_tokens(model, "dct", eps=0.9)))
    wp.ungray_tokens(model)
    assert model_fingerprint(model) == first
    model.blocks[1].mlp.fc2.bias.data[3] += 1e-6
    prints += [model_fingerprint(model), model_fingerprint(model.half())]
    assert len(set(prints)) == len(prints)


def test_an_initialization_is_always_the_same_and_draws_nothing() -> None:
    before = torch.random.get_rng_state()
    prints = {open_backbone("vit_tiny_patch16_224", model_args=SMALL_VIT, device="cpu").fingerprint for _ in range(2)}
    assert len(prints) == 1
    assert torch.equal(torch.random.get_rng_state(), before)


def test_unknown_names_and_devices() -> None:
    with pytest.raises(InvalidArgumentError, match="vit_tiny"):
        open_backbone("vit_tyny_patch16_224")
    with pytest.raises(InvalidArgumentError, match="nowhere"):
        open_backbone("vit_tiny_patch16_224", device="nowhere")


def test_features_of_shapes_are_those_of_each_picture_alone() -> None:
    backbone = open_backbone("vit_tiny_patch16_224", model_args=SMALL_VIT, device="cpu")
    pictures: Tensor = make_shapes(4, 32, seed=0).images
    together = backbone.features(pictures)[0].patches_BND
    alone = torch.cat([backbone.features(picture[None])[0].patches_BND for picture in pictures])
    torch.testing.assert_close(together, alone)
