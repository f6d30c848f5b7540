"""Stable Diffusion pipelines from disk, and pictures that they draw; nothing in a file is executed, nothing fetched."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidArgumentError, ModelFileError, UnsuitableModelError

_INDEX, _KIND = "model_index.json", "StableDiffusionPipeline"
_PREDICTIONS = ("epsilon", "v_prediction")


def open_pipeline(model: str) -> Any:
    """The pipeline in the folder `model` in float32 on the CPU, frozen, without a safety checker.

    Raises:
        InvalidArgumentError: diffusers, transformers or PEFT is not installed.
        ModelFileError: the folder holds no pipeline, or one that is not whole.
        UnsuitableModelError: it is of another kind.
    """
    try:
        import diffusers
        import peft  # noqa: F401
        import transformers
    except ImportError as error:
        raise InvalidArgumentError(
            f"text-to-image pipelines need diffusers, transformers and PEFT ({error}): "
            "pip install 'wellposed[peft,diffusion]'"
        ) from error
    folder = Path(model)
    scheduler = _scheduler_class(folder, diffusers)
    kinds = {
        "unet": diffusers.UNet2DConditionModel,
        "vae": diffusers.AutoencoderKL,
        "text_encoder": transformers.CLIPTextModel,
        "tokenizer": transformers.CLIPTokenizer,
        "scheduler": scheduler,
    }
    parts = {name: _part(folder / name, kind) for name, kind in kinds.items()}
    pipeline = diffusers.StableDiffusionPipeline(
        **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    _check(pipeline, folder)
    for part in (pipeline.unet, pipeline.vae, pipeline.text_encoder):
        part.eval().requires_grad_(False)
    return pipeline


def _scheduler_class(folder: Path, diffusers: Any) -> Any:
    """The class of the scheduler that the pipeline's index names, once it is sure that it is such an index."""
    if not folder.is_dir():
        raise ModelFileError(f"{folder} is no folder: expected one with a pipeline, as diffusers writes it")
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        kind, scheduler = index["_class_name"], str(index["scheduler"][1])
    except FileNotFoundError as error:
        raise ModelFileError(
            f"{folder} is no pipeline: it has no {_INDEX}. Expected a folder that diffusers' save_pretrained wrote"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelFileError(f"{folder / _INDEX} cannot be read as that of a pipeline: {error!r}") from error
    if kind != _KIND:
        raise UnsuitableModelError(
            f"{folder} holds a {kind}: expected a {_KIND}, that is Stable Diffusion 1.x or 2.x with one text encoder "
            "and a UNet"
        )
    found = getattr(diffusers, scheduler, None) if scheduler.isidentifier() else None
    if not isinstance(found, type) or not issubclass(found, diffusers.SchedulerMixin):
        raise ModelFileError(f"{folder / _INDEX} names the scheduler {scheduler!r}, which diffusers does not have")
    return found


def _part(folder: Path, kind: Any) -> Any:
    """What `kind` makes of a folder of the pipeline; of weights, in 16 bits where there are no others."""
    options: dict[str, Any] = {"local_files_only": True}
    if folder.name in {"unet", "vae", "text_encoder"}:
        stored = [path.name for path in folder.glob("*.safetensors")]
        is_half = bool(stored) and all(".fp16" in name for name in stored)
        options |= {"use_safetensors": True, "variant": "fp16" if is_half else None}
        options["dtype" if folder.name == "text_encoder" else "torch_dtype"] = torch.float32
    try:
        if not folder.is_dir():
            raise FileNotFoundError("there is no such folder")
        return kind.from_pretrained(folder, **options)
    except Exception as error:  # whatever a broken or foreign folder makes the reader raise
        reason = " ".join(str(error).split())[:300]
        raise ModelFileError(f"{folder} cannot be read as a {kind.__name__}: {reason}") from error


def _check(pipeline: Any, folder: Path) -> None:
    unet, vae = pipeline.unet.config, pipeline.vae.config
    if unet.in_channels != vae.latent_channels or unet.out_channels != vae.latent_channels:
        raise UnsuitableModelError(
            f"the UNet in {folder} takes {unet.in_channels} channels and gives {unet.out_channels}, where latents have "
            f"{vae.latent_channels}: expected one that draws from text alone, not one for inpainting or the like"
        )
    if unet.cross_attention_dim != pipeline.text_encoder.config.hidden_size:
        raise ModelFileError(
            f"the UNet in {folder} attends to text of width {unet.cross_attention_dim} and its text encoder's is "
            f"{pipeline.text_encoder.config.hidden_size}: put the parts of one pipeline together"
        )
    known = pipeline.scheduler.config.get("prediction_type", "epsilon")
    if known not in _PREDICTIONS or "num_train_timesteps" not in pipeline.scheduler.config:
        raise UnsuitableModelError(
            f"the UNet in {folder} predicts {known!r}: expected one of {', '.join(_PREDICTIONS)} in its scheduler"
        )


def check_prompts(pipeline: Any, prompts: Sequence[str]) -> None:
    """InvalidArgumentError where the text encoder would not read a prompt to its end."""
    most = pipeline.tokenizer.model_max_length
    for prompt in prompts:
        count = len(pipeline.tokenizer(prompt).input_ids)
        if count > most:
            raise InvalidArgumentError(f"{prompt!r} has {count} tokens with its begin and end: expected at most {most}")


@torch.no_grad()
def drawn(
    pipeline: Any,
    prompt: str,
    seeds: Sequence[int],
    *,
    image_size: int,
    steps: int,
    guidance: float,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    """A picture of `prompt` for each of `seeds`, uint8 (B, 3, H, W) on the CPU.

    The noise comes from the CPU, so that a seed means the same picture, up to rounding, on every device.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    with autocast():
        images = pipeline(
            [prompt] * len(seeds),
            height=image_size,
            width=image_size,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=generators,
            output_type="pt",
        ).images
    return (images.float().clamp(0, 1) * 255).round().to(torch.uint8).cpu()
