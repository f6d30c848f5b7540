"""Fine-tuning a text-to-image pipeline on disk: `wellposed finetune image`."""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from wellposed.data.pictures import picture_files
from wellposed.errors import InvalidArgumentError
from wellposed.evaluation.backbones import Backbone, open_backbone
from wellposed.runs import atomic_path, write_json, writing_to
from wellposed.training.display import Display
from wellposed.training.finetuning.diffusion import check_prompts, open_pipeline
from wellposed.training.finetuning.dreambooth_data import read_pictures
from wellposed.training.finetuning.dreambooth_pictures import (
    SHEET,
    Version,
    compared,
    versions_markdown,
    versions_table,
)
from wellposed.training.finetuning.dreambooth_task import DreamboothTask
from wellposed.training.finetuning.image_config import ImageConfig
from wellposed.training.finetuning.methods import layer_numbers
from wellposed.training.guards import flushed_denormals
from wellposed.training.running import carry_out, described_place


@dataclass(frozen=True)
class ImageResult:
    """How a run ended."""

    scores: dict[str, float]
    """The loss after the last epoch, for noise that is the same in every run."""
    versions: list[Version]
    """What the pipeline draws without the adapter, with it, and with it in k bits."""
    seconds: float
    """Training and testing, over all the times the run was taken up."""
    out: Path
    """The folder of the run."""
    saved: Path
    """The folder in it with the adapter."""
    pipeline: Any
    """With the adapter in place."""


def finetune_image(config: ImageConfig, *, quiet: bool = False, given: Collection[str] | None = None) -> ImageResult:
    """Teach a text-to-image pipeline a subject as `config` says, or go on with the run in `config.out`.

    Pictures are turned into latents once, and prompts into embeddings unless the text encoder learns too; then each
    step adds noise and the UNet learns to tell it. The folder of the run holds config.json, metrics.jsonl,
    tensorboard/, checkpoints/ and, at the end, adapter/ as PEFT saves it, with a card, result.json, and what the
    pipeline draws: pictures/ and, side by side, pictures.png. A run that was killed resumes to the same weights; Ctrl-C
    finishes the step, writes a checkpoint and raises KeyboardInterrupt.

    Args:
        config: what to train.
        quiet: show nothing while training.
        given: where it resumes, the fields of `config` that must be the run's, or override its own; if None, those that
            differ from their default.

    Raises:
        DivergedError: the loss is no longer finite; the last good checkpoint stays.
        RunError: the folder holds another run, or none to resume, or cannot be written.
        InvalidArgumentError, DataError, ModelFileError, UnsuitableModelError: something in `config`, the pictures or
            the pipeline cannot be; nothing has been written then.
    """
    if config.resume:
        config = config.resumed_from(ImageConfig.of_run(config.out), given)
    config.check()
    config = config.resolved()
    picture_files([Path(config.data)])  # raises, before anything large is read, where there are none
    backbone = _backbone(config)
    pipeline = open_pipeline(config.model)
    check_prompts(pipeline, [config.prompt, config.class_prompt, *config.prompts])
    size = _image_size(config, pipeline)
    data = read_pictures(Path(config.data), size, config.limit)
    with flushed_denormals():
        task, loop, display = carry_out(
            *(config, data, lambda place: DreamboothTask(config, pipeline, data, size, place)),
            lambda made, place: _summary(config, made, place),
            quiet=quiet,
            observe=lambda model: layer_numbers(model.unet),
        )
        task.model.eval()
        versions = []
        if task.is_main:
            versions = _draw(task, config, backbone, display)
            _tell(config, versions)
    display.say(f"after {loop.seconds:.0f} s, in {config.folder / 'adapter'}; pictures in {config.folder / SHEET}")
    return ImageResult(loop.results, versions, loop.seconds, config.folder, config.folder / "adapter", pipeline)


def _backbone(config: ImageConfig) -> Backbone | None:
    if not config.features:
        return None
    return open_backbone(config.features, checkpoint=config.features_checkpoint, device=config.device)


def _image_size(config: ImageConfig, pipeline: Any) -> int:
    factor = pipeline.vae_scale_factor
    size = config.image_size or pipeline.unet.config.sample_size * factor
    if size % factor:
        raise InvalidArgumentError(f"image_size={size}: expected a multiple of {factor}, by which the VAE reduces it")
    return int(size)


def _draw(task: DreamboothTask, config: ImageConfig, backbone: Backbone | None, display: Display) -> list[Version]:
    """What every version draws, said too; who stops it has the adapter, and is told how to have the pictures."""
    try:
        versions = compared(task, config, backbone)
    except KeyboardInterrupt:
        display.say(f"{config.folder / 'adapter'} is ready; for its pictures, --resume --out {config.folder}")
        raise
    display.say(versions_table(versions))
    return versions


def _summary(config: ImageConfig, task: DreamboothTask, accelerator: Accelerator) -> str:
    trained, whole = (count / 1e6 for count in task.parameter_counts())
    kept = f" and {task.class_pictures} of its class" if task.class_pictures else ""
    return (
        f"{config.model}, {config.method} of rank {config.r}: {trained:.3f} of {whole:.1f} M parameters are trained; "
        f"{len(task.pictures)} pictures of {task.image_size} px{kept}, {config.epochs * len(task.loader)} steps of "
        f"{config.batch_size}; lr {config.lr:g}; {described_place(config, task, accelerator)}"
    )


def _tell(config: ImageConfig, versions: list[Version]) -> None:
    """Add what was drawn to the card and to result.json."""
    card, result = config.folder / "adapter" / "README.md", config.folder / "result.json"
    with writing_to(config.folder):
        text = card.read_text(encoding="utf-8")
        with atomic_path(card) as temporary:
            temporary.write_text(f"{text}\n{versions_markdown(versions, config)}", encoding="utf-8")
        write_json(result, json.loads(result.read_text(encoding="utf-8")) | {"versions": list(map(asdict, versions))})
