"""What layers give, over the zoo of timm and transformers: on the right place of the grid, and as the head reads it."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers as hf
from torch import Tensor, nn

from test_features import shaken
from wellposed.diagnosis.sources import made_for_size
from wellposed.errors import InvalidArgumentError, UnknownFamilyError, UnsuitableModelError
from wellposed.evaluation.backbones import open_backbone
from wellposed.evaluation.features import LayerFeatures, layer_features
from wellposed.families import trunk
from wellposed.families.transformers_trunks import MAP_MODELS, TOKEN_MODELS

WIDTH = {"embed_dim": 32, "depth": 2, "num_heads": 4}
FLAT = WIDTH | {"img_size": 64, "patch_size": 8}
STAGES = {"img_size": 64, "embed_dim": 16, "depths": (1, 1, 1), "num_heads": (2, 2, 2), "window_size": 4}
FOUR = {"embed_dims": (16, 32, 32, 48), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)}
HEADS = {"samvit_base_patch16": lambda model: model.head.fc, "efficientvit_m0": lambda model: model.head}
TIMM: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": FLAT,
    "eva02_tiny_patch14_224": FLAT,
    "deit3_small_patch16_224": FLAT,
    "vit_base_patch16_siglip_224": FLAT,
    "vit_base_patch16_dinov3": FLAT,
    "vit_relpos_small_patch16_224": FLAT,
    "vit_tiny_r_s16_p8_224": WIDTH | {"img_size": 256},
    "samvit_base_patch16": FLAT | {"neck_chans": 24, "global_attn_indexes": (1,), "window_size": 4},
    "cait_xxs24_224": FLAT,
    "xcit_nano_12_p8_224": WIDTH | {"img_size": 64},
    "tnt_s_legacy_patch16_224": {"img_size": 64, "embed_dim": 32, "inner_dim": 8, "depth": 2, "num_heads_outer": 4},
    "swinv2_cr_tiny_ns_224": STAGES | {"patch_size": 4},
    "swinv2_tiny_window8_256": STAGES,
    "hiera_tiny_224": {"img_size": (128, 128), "embed_dim": 16, "num_heads": 1, "stages": (1, 1, 1, 1)},
    "tiny_vit_5m_224": FOUR | {"window_sizes": (4, 4, 4, 2)},
    "davit_tiny": FOUR,
    "convnext_atto": {"dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1)},
    "gcvit_xxtiny": {},
    "pvt_v2_b0": {},
    "pit_ti_224": {},
    "maxvit_pico_rw_256": {},
    "edgenext_xx_small": {},
    "fastvit_t8": {},
    "efficientvit_b0": {},
    "efficientvit_m0": {},
    "hgnetv2_b0": {},
    "resnet18": {},
    "mobilenetv3_small_050": {},
    "legacy_seresnet18": {},
}


def with_and_without_a_square(height: int, width: int | None = None) -> Tensor:
    """Two images, of which the second is bright in the sixth row and third column of eight."""
    width = width or height
    images = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(1)).repeat(2, 1, 1, 1)
    images[1, :, height * 5 // 8 : height * 6 // 8, width * 2 // 8 : width * 3 // 8] += 5
    return images


def assert_the_square_is_where_it_should_be(found: LayerFeatures) -> None:
    rows, columns = found.grid
    assert found.patches_BND.shape[1] == rows * columns
    change_HW = (found.patches_BND[1] - found.patches_BND[0]).norm(dim=-1).view(rows, columns)
    row, column = divmod(int(change_HW.argmax()), columns)
    for place, truth, cells in ((row, 11 / 16, rows), (column, 5 / 16, columns)):
        assert abs((place + 0.5) / cells - truth) <= 1 / 16 + 1.5 / cells, f"{(row, column)} of {found.grid}"


@pytest.mark.parametrize("name", TIMM)
def test_timm_models_have_their_patches_in_place_and_a_summary_that_the_head_reads(name: str) -> None:
    torch.manual_seed(0)
    model = shaken(timm.create_model(name, num_classes=7, **TIMM[name]), by=0.02)
    size = TIMM[name].get("img_size") or model.pretrained_cfg["input_size"][-1]
    images = with_and_without_a_square(size if isinstance(size, int) else size[0])
    found = layer_features(model, images, None)
    assert len(found) == len(trunk(model).blocks) == len(model.feature_info)
    for layer in found:
        assert_the_square_is_where_it_should_be(layer)
    classifier = HEADS.get(name, lambda model: model.get_classifier())(model)
    with torch.no_grad():
        torch.testing.assert_close(classifier(found[-1].summary_BD), model(images))


def test_a_layer_alone_is_what_it_is_among_the_others() -> None:
    for name in ("cait_xxs24_224", "swinv2_cr_tiny_ns_224", "legacy_seresnet18"):
        model = shaken(timm.create_model(name, **TIMM[name]))
        images = with_and_without_a_square(64)
        every = layer_features(model, images, None)
        alone = layer_features(model, images, (1,))[0]
        assert torch.equal(alone.patches_BND, every[1].patches_BND)
        assert torch.equal(alone.summary_BD, every[1].summary_BD)


def test_early_blocks_are_summed_up_as_the_last_is() -> None:
    model = shaken(timm.create_model("vit_base_patch16_siglip_224", **FLAT))
    images = with_and_without_a_square(64)
    tokens = model.forward_intermediates(images, indices=[0], norm=True, output_fmt="NLC", intermediates_only=True)[0]
    torch.testing.assert_close(layer_features(model, images, (0,))[0].summary_BD, model.attn_pool(tokens))


@pytest.mark.parametrize("name", ["crossvit_tiny_240", "coat_tiny", "convit_tiny", "hrnet_w18_small", "visformer_tiny"])
def test_timm_models_that_do_not_say_what_their_layers_give_are_refused(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(UnknownFamilyError, match="forward_intermediates or feature_info"):
        trunk(model)


@pytest.mark.parametrize("name", ["sequencer2d_s", "dpn48b"])
def test_maps_of_another_layout_than_timm_says_are_refused(name: str) -> None:
    with pytest.raises(UnsuitableModelError, match=r"gives \(1, .*expected maps \(B, "):
        layer_features(timm.create_model(name), torch.zeros(1, 3, 224, 224), None)


def test_the_size_that_a_timm_model_was_made_for() -> None:
    assert open_backbone("edgenext_xx_small", device="cpu").image_size == 256
    assert made_for_size(timm.create_model("edgenext_xx_small")) == 256
    assert made_for_size(timm.create_model("vit_tiny_patch16_224", img_size=64)) == 64
    gcvit = timm.create_model("gcvit_xxtiny")
    with pytest.raises(InvalidArgumentError, match=r"made for, \(224, 224\)"):
        layer_features(gcvit, torch.zeros(1, 3, 160, 160))
    xception = timm.create_model("legacy_xception")
    assert open_backbone("legacy_xception", device="cpu").image_size == made_for_size(xception) == 299


# --- transformers

TOKENS = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 64,
    "patch_size": 8,
}
SWIN = {"image_size": 64, "patch_size": 2, "embed_dim": 16, "depths": [1, 2, 1], "num_heads": [2, 2, 2]}
CONV = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}
HUGGINGFACE: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "vit": (hf.ViTModel, hf.ViTConfig, TOKENS),
    "deit": (hf.DeiTModel, hf.DeiTConfig, TOKENS),
    "dinov2": (hf.Dinov2Model, hf.Dinov2Config, TOKENS),
    "dinov2_with_registers": (hf.Dinov2WithRegistersModel, hf.Dinov2WithRegistersConfig, TOKENS),
    "dinov3_vit": (hf.DINOv3ViTModel, hf.DINOv3ViTConfig, TOKENS | {"num_register_tokens": 4}),
    "vit_msn": (hf.ViTMSNModel, hf.ViTMSNConfig, TOKENS),
    "vit_mae": (hf.ViTMAEModel, hf.ViTMAEConfig, TOKENS),
    "ijepa": (hf.IJepaModel, hf.IJepaConfig, TOKENS),
    "beit": (hf.BeitModel, hf.BeitConfig, TOKENS | {"use_relative_position_bias": True}),
    "data2vec-vision": (hf.Data2VecVisionModel, hf.Data2VecVisionConfig, TOKENS),
    "clip_vision_model": (hf.CLIPVisionModel, hf.CLIPVisionConfig, TOKENS),
    "metaclip_2_vision_model": (hf.MetaClip2VisionModel, hf.MetaClip2VisionConfig, TOKENS),
    "altclip_vision_model": (hf.AltCLIPVisionModel, hf.AltCLIPVisionConfig, TOKENS),
    "chinese_clip_vision_model": (hf.ChineseCLIPVisionModel, hf.ChineseCLIPVisionConfig, TOKENS),
    "siglip_vision_model": (hf.SiglipVisionModel, hf.SiglipVisionConfig, TOKENS),
    "convnext": (hf.ConvNextModel, hf.ConvNextConfig, CONV),
    "convnextv2": (hf.ConvNextV2Model, hf.ConvNextV2Config, CONV),
    "dinov3_convnext": (hf.DINOv3ConvNextModel, hf.DINOv3ConvNextConfig, CONV),
    "resnet": (hf.ResNetModel, hf.ResNetConfig, CONV | {"embedding_size": 16}),
    "regnet": (hf.RegNetModel, hf.RegNetConfig, CONV | {"embedding_size": 16, "groups_width": 8}),
    "swin": (hf.SwinModel, hf.SwinConfig, SWIN | {"window_size": 4}),
    "swinv2": (hf.Swinv2Model, hf.Swinv2Config, SWIN | {"window_size": 4}),
    "focalnet": (hf.FocalNetModel, hf.FocalNetConfig, {"image_size": 64, "embed_dim": 8, "depths": [1, 1, 1, 1]}),
}


def huggingface(kind: str) -> Any:
    torch.manual_seed(0)
    model, config, settings = HUGGINGFACE[kind]
    return shaken(model(config(**settings)), by=0.02)


def test_every_kind_of_transformers_is_looked_at_here() -> None:
    assert HUGGINGFACE.keys() == TOKEN_MODELS | MAP_MODELS


@pytest.mark.parametrize("kind", HUGGINGFACE)
@pytest.mark.parametrize("size", [(64, 64), (64, 128)])
def test_transformers_models_have_their_patches_in_place(kind: str, size: tuple[int, int]) -> None:
    model = huggingface(kind)
    for layer in layer_features(model, with_and_without_a_square(*size), None):
        assert_the_square_is_where_it_should_be(layer)


@pytest.mark.parametrize("kind", sorted(TOKEN_MODELS - {"vit_mae"}))
def test_the_last_tokens_are_those_that_transformers_gives(kind: str) -> None:
    model, images = huggingface(kind), with_and_without_a_square(64)
    with torch.no_grad():
        output = model(pixel_values=images)
    found = layer_features(model, images)[0]
    tokens = output.last_hidden_state
    if kind.endswith("clip_vision_model") or kind.startswith("metaclip"):  # there the norm is left to who reads it
        tokens = model.post_layernorm(tokens)
    torch.testing.assert_close(found.patches_BND, tokens[:, -64:])
    if kind not in {"vit", "deit", "ijepa", "data2vec-vision", "vit_msn"}:  # those pool with a further layer, or not
        torch.testing.assert_close(found.summary_BD, output.pooler_output)


@pytest.mark.parametrize(
    ("make", "config", "settings"),
    [
        (hf.ViTForImageClassification, hf.ViTConfig, TOKENS),
        (hf.DeiTForImageClassification, hf.DeiTConfig, TOKENS),
        (hf.ViTMSNForImageClassification, hf.ViTMSNConfig, TOKENS),
        (hf.IJepaForImageClassification, hf.IJepaConfig, TOKENS),
        (hf.BeitForImageClassification, hf.BeitConfig, TOKENS),
        (hf.BeitForImageClassification, hf.BeitConfig, TOKENS | {"use_mean_pooling": False}),
        (hf.Data2VecVisionForImageClassification, hf.Data2VecVisionConfig, TOKENS),
        (hf.ConvNextForImageClassification, hf.ConvNextConfig, CONV),
        (hf.ConvNextV2ForImageClassification, hf.ConvNextV2Config, CONV),
        (hf.ResNetForImageClassification, hf.ResNetConfig, CONV | {"embedding_size": 16}),
        (hf.RegNetForImageClassification, hf.RegNetConfig, CONV | {"embedding_size": 16, "groups_width": 8}),
        (hf.SwinForImageClassification, hf.SwinConfig, SWIN | {"window_size": 4}),
        (hf.Swinv2ForImageClassification, hf.Swinv2Config, SWIN | {"window_size": 4}),
        (hf.FocalNetForImageClassification, hf.FocalNetConfig, HUGGINGFACE["focalnet"][2]),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_the_summary_is_what_a_classifier_of_transformers_reads(
    make: Callable[..., Any], config: Callable[..., Any], settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = shaken(make(config(num_labels=7, **settings)))
    images = with_and_without_a_square(64)
    classifier = model.classifier[-1] if isinstance(model.classifier, nn.Sequential) else model.classifier
    with torch.no_grad():
        torch.testing.assert_close(
            classifier(layer_features(model, images)[0].summary_BD), model(pixel_values=images).logits
        )


def test_a_masked_autoencoder_sees_the_whole_image_in_order() -> None:
    masked, plain = huggingface("vit_mae"), hf.ViTModel(hf.ViTConfig(**TOKENS), add_pooling_layer=False)
    plain.load_state_dict(masked.state_dict())
    images = with_and_without_a_square(64)
    ours, expected = layer_features(masked, images)[0], layer_features(plain, images)[0]
    torch.testing.assert_close(ours.patches_BND, expected.patches_BND)
    torch.testing.assert_close(ours.summary_BD, expected.summary_BD)
    assert masked.config.mask_ratio == 0.75
    assert masked(pixel_values=images).last_hidden_state.shape[1] == 1 + 64 // 4


def test_a_wrapped_timm_model_is_looked_into() -> None:
    arguments = {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 4}
    config = hf.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=arguments)
    wrapped, images = shaken(hf.TimmWrapperModel(config)), with_and_without_a_square(64)
    ours, expected = (layer_features(model, images)[0] for model in (wrapped, wrapped.timm_model))
    assert torch.equal(ours.patches_BND, expected.patches_BND)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hf.HieraModel(hf.HieraConfig(embed_dim=16, image_size=[64, 64], depths=[1, 1, 1, 1])),
        lambda: hf.YolosModel(hf.YolosConfig(**TOKENS | {"image_size": [64, 64]})),
        lambda: hf.SamVisionModel(hf.SamVisionConfig(num_hidden_layers=1, hidden_size=24, image_size=64)),
        lambda: hf.Siglip2VisionModel(hf.Siglip2VisionConfig(num_hidden_layers=1, hidden_size=24)),
    ],
    ids=["hiera", "yolos", "sam", "siglip2"],
)
def test_transformers_models_of_another_layout_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnknownFamilyError, match=r"one of the types .*dinov2"):
        layer_features(make(), torch.zeros(1, 3, 64, 64))
