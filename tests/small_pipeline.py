"""A text-to-image pipeline of a few ten thousand parameters, as diffusers saves it, and photographs of a subject."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from wellposed.data import make_shapes

SIZE, WIDTH, LENGTH = 16, 16, 16


def small_tokenizer() -> Any:
    """CLIP's, with a token for each letter, inside a word and at its end."""
    letters = [chr(number) for number in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=LENGTH)


def small_unet(**more: Any) -> Any:
    sizes = {"sample_size": SIZE // 2, "block_out_channels": (16, 16), "norm_num_groups": 4, "layers_per_block": 1}
    kinds = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    kinds |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    usual = {**sizes, **kinds, "cross_attention_dim": WIDTH, "attention_head_dim": 4}
    return UNet2DConditionModel(**(usual | more))


def small_pipeline(prediction: str = "epsilon", **unet: Any) -> Any:
    torch.manual_seed(3)
    text = CLIPTextConfig(
        vocab_size=54,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=52,
        eos_token_id=53,
        pad_token_id=53,
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=SIZE,
    )
    return StableDiffusionPipeline(
        unet=small_unet(**unet),
        vae=vae,
        text_encoder=CLIPTextModel(text).eval(),
        tokenizer=small_tokenizer(),
        scheduler=DDIMScheduler(prediction_type=prediction, clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def save_photographs(folder: Path, count: int = 3) -> Path:
    """Pictures of one subject, of other sizes than the pipeline's."""
    folder.mkdir(parents=True)
    shapes = make_shapes(count, 24)
    for number in range(count):
        pixels = shapes[number][0].permute(1, 2, 0).numpy()
        Image.fromarray(pixels).resize((40, 32)).save(folder / f"{number}.png")
    return folder
