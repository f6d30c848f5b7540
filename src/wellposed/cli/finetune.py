"""wellposed finetune: adapters on models that are already there."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import tyro
from tyro.extras import SubcommandApp

import wellposed
from wellposed.cli.runs_named import given_fields, named_default
from wellposed.training.finetuning.config import FinetuneConfig, LanguageConfig
from wellposed.training.finetuning.image_config import ImageConfig
from wellposed.training.finetuning.vision_config import VisionConfig

_KINDS: dict[str, tuple[type[FinetuneConfig], str]] = {
    "language": (
        LanguageConfig,
        "Fine-tune a language model on completions or labelled texts: all weights, LoRA and its kin, or sine adapters.",
    ),
    "vision": (
        VisionConfig,
        "Fine-tune a timm or HuggingFace vision model on labelled images, with a new head for their classes.",
    ),
    "image": (
        ImageConfig,
        "Teach a Stable Diffusion pipeline a subject from a few pictures (DreamBooth), and draw it.",
    ),
}


def app(argv: Sequence[str]) -> SubcommandApp:
    """The commands; their flags default to what the file or the run that `argv` names has for them."""
    commands = SubcommandApp()
    for name, (kind, what) in _KINDS.items():
        commands.command(name=name, help=what)(_command(name, kind, argv))
    return commands


def _command(name: str, kind: type[FinetuneConfig], argv: Sequence[str]) -> Callable[..., None]:
    default: Any = named_default(kind, f"finetune {name}", argv)

    def finetune(
        options: kind = default,  # type: ignore[valid-type]
        config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    ) -> None:
        """Fine-tune a model.

        Args:
            options: what to train.
            config: a .toml or .json file of these settings, which flags then override.
        """
        getattr(wellposed, f"finetune_{name}")(options, given=given_fields(options, default))

    return finetune
