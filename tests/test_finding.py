"""Which models and blocks are known, and that the others are refused by name and left untouched."""

from typing import Any

import pytest
import timm
import torch
import transformers
from timm.models.vision_transformer import Block, ParallelScalingBlock
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertOutput

import wellposed as wp
from wellposed.errors import InvalidArgumentError, UnknownFamilyError, UnsuitableModelError
from wellposed.families.surgery import SitedModule
from zoo import bert, classes, convmixer, gpt2, llama, vit


class OwnForward(Block):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return x


class OwnName(Block):
    """Derives from timm's block and keeps its forward."""


def test_unknown_models_are_refused_by_name() -> None:
    swin = timm.create_model("swin_tiny_patch4_window7_224", pretrained=False)
    with pytest.raises(UnknownFamilyError) as caught:
        wp.cut_skips(swin)
    message = str(caught.value)
    assert "SwinTransformer" in message
    assert "HuggingFace Llama" in message
    with pytest.raises(UnknownFamilyError, match="Linear"):
        wp.skips(nn.Linear(2, 2))
    with pytest.raises(UnknownFamilyError, match="ParallelScalingBlock"):
        wp.cut_skips(vit(block_fn=ParallelScalingBlock))


def test_unknown_blocks_leave_the_model_untouched() -> None:
    model = vit(depth=3)
    model.blocks[1] = OwnForward(32, 4)
    types = classes(model)
    for function in (wp.cut_skips, wp.restore_skips, wp.condition_):
        with pytest.raises(UnknownFamilyError, match="OwnForward"):
            function(model)
    model.blocks[1] = ParallelScalingBlock(32, 4)
    with pytest.raises(UnknownFamilyError, match=r"ParallelScalingBlock at 'blocks\.1'"):
        wp.cut_skips(model)
    model.blocks[1] = OwnName(32, 4)
    wp.cut_skips(model)
    assert type(model.blocks[1]).__name__ == "OwnName"
    assert isinstance(model.blocks[1], OwnName)
    wp.restore_skips(model)
    assert classes(model)[1:3] == types[1:3]
    assert not any(issubclass(t, SitedModule) for t in classes(model))


@pytest.mark.parametrize("name", ["crossvit_tiny_240", "mobilevit_xxs"])
def test_architectures_with_other_skips_are_refused(name: str) -> None:
    """They hold timm's ViT block among others; cutting only that would leave skips nobody sees."""
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(UnknownFamilyError, match=r"Call it on the part you mean"):
        wp.cut_skips(model)
    assert wp.recipe(model) == []


def test_parts_of_a_larger_model_can_be_cut() -> None:
    two_towers = nn.ModuleDict({"image": vit(), "text": gpt2()})
    wp.cut_skips(two_towers["text"])
    assert wp.recipe(two_towers)[0]["attention"] == ["text.transformer.h.0", "text.transformer.h.1"]
    with torch.device("meta"):
        llava = transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(text_config=llama().config, vision_config=transformers.CLIPVisionConfig())
        )
    with pytest.raises(UnknownFamilyError, match=r"such as 'model\.language_model\.layers'"):
        wp.cut_skips(llava)
    wp.cut_skips(llava.model.language_model)


@pytest.mark.parametrize("name", ["pit_ti_224", "vit_small_r26_s32_224", "naflexvit_base_patch16_gap"])
def test_what_is_built_on_timms_block(name: str) -> None:
    with torch.device("meta"):
        model = wp.cut_skips(timm.create_model(name))
    assert not any(skip.attention or skip.mlp for skip in wp.skips(model))


def test_names_may_come_from_an_iterator() -> None:
    model = wp.cut_skips(vit(), attention=(f"blocks.{i}" for i in range(2)), mlp=())
    assert [(skip.attention, skip.mlp) for skip in wp.skips(model)] == [(False, True)] * 2


def test_a_replaced_part_of_a_block_is_refused() -> None:
    class OwnOutput(BertOutput):
        def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
            return self.dense(hidden_states)

    model: Any = bert()
    model.bert.encoder.layer[1].output = OwnOutput(model.config)
    with pytest.raises(UnknownFamilyError, match="OwnOutput"):
        wp.cut_skips(model)
    assert wp.recipe(model) == []
    wp.cut_skips(model, mlp=False)


def test_not_a_model() -> None:
    for function in (wp.cut_skips, wp.restore_skips, wp.skips, wp.condition_, wp.recipe):
        with pytest.raises(InvalidArgumentError, match=r"expected a torch\.nn\.Module, got str"):
            function("vit_tiny_patch16_224")


def test_cross_attention_is_refused() -> None:
    model = gpt2(add_cross_attention=True)
    with pytest.raises(UnknownFamilyError, match="cross-attention"):
        wp.cut_skips(model)
    assert wp.recipe(model) == []


def test_a_replaced_forward_is_refused() -> None:
    model = vit()
    model.blocks[1].forward = lambda x, **_: x
    with pytest.raises(UnsuitableModelError, match=r"blocks\.1 has its forward replaced"):
        wp.cut_skips(model)
    assert all(skip.attention for skip in wp.skips(model))


@pytest.mark.parametrize("attention", ["blocks.0", ["blocks.7"], ["head"], [0], None, 1], ids=str)
def test_wrong_names_are_refused(attention: Any) -> None:
    model = vit()
    with pytest.raises(InvalidArgumentError, match="attention="):
        wp.cut_skips(model, attention=attention)
    assert not wp.recipe(model)


def test_meta_models_can_be_cut() -> None:
    with torch.device("meta"):
        model = wp.cut_skips(convmixer())
    assert not any(skip.attention for skip in wp.skips(model))
