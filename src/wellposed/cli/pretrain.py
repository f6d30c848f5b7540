"""wellposed pretrain: DINO."""

from collections.abc import Callable, Sequence
from typing import Annotated

import tyro

from wellposed.cli.runs_named import given_fields, named_default
from wellposed.training import DinoConfig


def command(argv: Sequence[str]) -> Callable[..., None]:
    """The command; its flags default to what the preset, the file or the run that `argv` names has for them."""
    default = named_default(DinoConfig, "pretrain", argv)

    def pretrain(
        options: DinoConfig = default,
        config: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE")] = None,
    ) -> None:
        """Pretrain a timm ViT on images without their labels by DINO, with or without skip connections.

        Args:
            options: what to train.
            config: a preset or a .toml or .json file of these settings, which flags then override.
        """
        from wellposed.training import pretrain as run

        run(options, given=given_fields(options, default))

    return pretrain
