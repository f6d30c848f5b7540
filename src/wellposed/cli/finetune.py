"""wellposed finetune: adapters on models that are already there."""

from collections.abc import Callable, Sequence
from typing import Annotated

import tyro
from tyro.extras import SubcommandApp

from wellposed.cli.runs_named import given_fields, named_default
from wellposed.training.finetuning.config import LanguageConfig
from wellposed.training.finetuning.image_config import ImageConfig
from wellposed.training.finetuning.vision_config import VisionConfig


def app(argv: Sequence[str]) -> SubcommandApp:
    """The commands; their flags default to what the file or the run that `argv` names has for them."""
    commands = SubcommandApp()
    commands.command(_language(argv))
    commands.command(_vision(argv))
    commands.command(_image(argv))
    return commands


def _language(argv: Sequence[str]) -> Callable[..., None]:
    default = named_default(LanguageConfig, "finetune language", argv)

    def language(
        options: LanguageConfig = default,
        config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    ) -> None:
        """Fine-tune a language model on completions or labelled texts: all weights, LoRA and its kin, or sine adapters.

        Args:
            options: what to train.
            config: a .toml or .json file of these settings, which flags then override.
        """
        from wellposed.training.finetuning.language import finetune_language

        finetune_language(options, given=given_fields(options, default))

    return language


def _vision(argv: Sequence[str]) -> Callable[..., None]:
    default = named_default(VisionConfig, "finetune vision", argv)

    def vision(
        options: VisionConfig = default,
        config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    ) -> None:
        """Fine-tune a timm or HuggingFace vision model on labelled images, with a new head for their classes.

        Args:
            options: what to train.
            config: a .toml or .json file of these settings, which flags then override.
        """
        from wellposed.training.finetuning.vision import finetune_vision

        finetune_vision(options, given=given_fields(options, default))

    return vision


def _image(argv: Sequence[str]) -> Callable[..., None]:
    default = named_default(ImageConfig, "finetune image", argv)

    def image(
        options: ImageConfig = default,
        config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    ) -> None:
        """Teach a Stable Diffusion pipeline a subject from a few pictures (DreamBooth), and draw it.

        Args:
            options: what to train.
            config: a .toml or .json file of these settings, which flags then override.
        """
        from wellposed.training.finetuning.dreambooth import finetune_image

        finetune_image(options, given=given_fields(options, default))

    return image
